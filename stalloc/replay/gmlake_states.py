"""GMLake's states: how a request is served, from a block of its size down to plain new memory.

Contract: a block that a function returns is taken by the request; -1 says that the device has no room for it.
"""

from stalloc.compiled import inner
from stalloc.replay.blocks import FREE, LIVE, at, drop_segment, fits, is_whole, new_segment, split
from stalloc.replay.gmlake_chunks import (
    CHUNK_BYTES,
    LARGE,
    SMALL,
    STITCHED,
    TREES,
    add_chunks,
    cut,
    drop_stitched,
    forget_chunks,
    new_stitched,
    num_chunks,
    number_chunks,
    take_block,
    take_stitched,
)
from stalloc.replay.rounding import GRANULE, LARGE_SEGMENT, round_up, torch_segment_size
from stalloc.replay.treap import after, best_fit, first, insert, last, remove
from stalloc.sizes import ALIGNMENT_BYTES


@inner()
def release(t, m):
    """Give back every segment without live blocks."""
    for tree in range(t.num_headers):
        if tree % TREES == STITCHED:
            continue
        block = first(t, tree)
        while block != 0:
            size, address = at(t, block).size, at(t, block).address
            if is_whole(t, block):
                remove(t, block)
                if tree % TREES == LARGE:
                    before = m.stitched_bytes
                    forget_chunks(t, m, block)
                    m.forgotten += before != m.stitched_bytes
                    t.device_frees += num_chunks(t, block) - 1
                drop_segment(t, block)
            block = after(t, tree, size, address)


@inner()
def _new_chunks(t, m, size, stream):
    """New physical memory as one free block in no tree, -1 if the device has no room."""
    block = new_segment(t, size, stream, 0)
    if block > 0:
        number_chunks(t, m, block)
        t.device_allocs += num_chunks(t, block) - 1
        m.maps += num_chunks(t, block)
    return block


@inner()
def allocate_small(t, m, requested, stream):
    size, tree = round_up(requested, ALIGNMENT_BYTES), stream * TREES + SMALL
    block = best_fit(t, tree, size)
    if block != 0:
        remove(t, block)
    else:
        if not fits(t, GRANULE):
            t.retries += 1
            release(t, m)
        block = new_segment(t, GRANULE, stream, 0)
        if block < 0:
            return -1
    if at(t, block).size > size:
        insert(t, tree, split(t, block, size))
    return block


@inner()
def _collect_garbage(t, m):
    """Forget every stitched block that nobody holds."""
    block = m.stitched_first
    while block != 0:
        following = at(t, block).next
        if at(t, block).state == FREE:
            drop_stitched(t, m, block)
            m.forgotten += 1
        block = following


@inner()
def _stitch(t, m, size, stream, row):
    """Stitch free blocks, the largest first, with new memory for what they lack if that is allowed; 0 if impossible."""
    tree = stream * TREES + LARGE
    taken, total, block = 0, 0, last(t, tree)
    while block != 0 and total < size and at(t, block).size >= m.smallest_part:
        remove(t, block)
        at(t, block).other = taken  # a list of what was taken, the last one first
        taken, total = block, total + at(t, block).size
        block = last(t, tree)
    lacking = size - total
    possible = taken != 0 and (lacking <= 0 or (m.allocate_and_stitch != 0 and fits(t, lacking)))
    if not possible:
        while taken != 0:
            insert(t, tree, taken)
            taken = at(t, taken).other
        return 0
    if lacking > 0:
        block = _new_chunks(t, m, lacking, stream)
        at(t, block).other = taken
        taken = block
        m.stitches_with_new_memory += 1
    else:
        if lacking < 0:
            cut(t, m, taken, at(t, taken).size + lacking)
        m.stitches += 1
    # turn the list round: the largest comes first
    forward = 0
    while taken != 0:
        before = at(t, taken).other
        at(t, taken).other = forward
        forward, taken = taken, before
    stitched, tail = new_stitched(t, m, size // CHUNK_BYTES, stream), 0
    at(t, stitched).state = LIVE
    at(t, stitched).other = size // CHUNK_BYTES
    while forward != 0:
        take_block(t, m, forward, row)
        tail = add_chunks(t, m, stitched, tail, forward)
        forward = at(t, forward).other
    m.maps += size // CHUNK_BYTES
    return stitched


@inner()
def _find(t, m, size, stream, row):
    """Go through the states with what there is, as far as stitching with new memory; 0 if they do not serve."""
    tree = stream * TREES + LARGE
    block = best_fit(t, tree, size)
    if block != 0 and at(t, block).size == size:
        m.exact += 1
        remove(t, block)
        take_block(t, m, block, row)
        return block
    stitched = best_fit(t, stream * TREES + STITCHED, size)
    if stitched != 0 and at(t, stitched).size == size:
        m.exact += 1
        take_stitched(t, m, stitched, size // CHUNK_BYTES, row)
        return stitched
    if block != 0:
        m.splits += 1
        remove(t, block)
        cut(t, m, block, size)
        take_block(t, m, block, row)
        return block
    if stitched != 0 and at(t, stitched).size <= size * m.reuse_limit:
        m.larger_stitched += 1
        take_stitched(t, m, stitched, size // CHUNK_BYTES, row)
        return stitched
    if size < m.fragmentation_limit:
        return 0
    return _stitch(t, m, size, stream, row)


@inner()
def _new(t, m, size, stream, row):
    """Plain new memory; -1 if the device has no room."""
    whole = torch_segment_size(size, LARGE_SEGMENT)
    block = _new_chunks(t, m, whole, stream)
    if block > 0:
        if whole > size:
            cut(t, m, block, size)
        take_block(t, m, block, row)
    return block


@inner()
def allocate_large(t, m, requested, stream, row):
    size = round_up(requested, CHUNK_BYTES)
    if m.stitched_bytes > m.stitch_limit:
        _collect_garbage(t, m)
    block = _find(t, m, size, stream, row)
    if block == 0:
        block = _new(t, m, size, stream, row)
    if block < 0:
        t.retries += 1
        release(t, m)
        block = _find(t, m, size, stream, row)
        if block == 0:
            block = _new(t, m, size, stream, row)
    return block
