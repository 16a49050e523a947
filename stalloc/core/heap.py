"""The heap, for what no plan serves: best fit, blocks that are split and coalesced inside segments.

Contract: the lock is held, except where Python calls; no two live blocks overlap; a block that is freed is coalesced
with its free neighbours at once. A request of a capture gets the place of the same request of its warm-up (the k-th of
a size that of the k-th) only if all of it is free, so a capture that differs costs memory, never correctness.
"""

from typing import NamedTuple

from stalloc.compiled import inner
from stalloc.core.constants import (
    ALIGNMENT,
    BLOCK_FREE,
    BLOCK_LIVE,
    BLOCK_UNMAPPED,
    FULL_LIVE,
    FULL_POOLS,
    GENERAL_KIND,
    GRANULE,
    HEAP_ONLY,
    LASTING_BIT,
    MAX_SHARED_SEGMENT,
    NEED_SEGMENT,
    PERSISTENT_KIND,
    POOL_PINNED,
    POOL_USED,
    REFUSED,
    SMALL_KIND,
    SMALL_LIMIT,
    WASTE_SHIFT,
)
from stalloc.core.intrinsics import under_lock
from stalloc.core.lookup import add_live, drop_live, live_is_full
from stalloc.core.pages import cut_out, has_rows
from stalloc.core.records import block_at, capture_entry_at, graph_pool_at, persistent_size_at, pool_at, segment_at
from stalloc.core.segments import best_fit, cut, find_pool, insert_free, is_before, join, pool_of, remove_free

# bytes; a general block keeps a smaller remainder of a large request, or it would crumble, unless pages make it whole
_SPLIT_LIMIT = 1 << 20


class Outcome(NamedTuple):
    """What became of a try to serve a request."""

    address: int  # 0: it was not served
    reason: int  # then: why Python is to be entered (NEED_SEGMENT and so on)
    subject: int  # what the reason is about: the pool that needs a segment, the table that is full


@inner(forceinline=True)
def rounded_bytes(state, row):
    """The bytes that a block which is not free was asked for, rounded up."""
    return (block_at(state, row).requested_bytes + (ALIGNMENT - 1)) & -ALIGNMENT


@inner()
def _choose(state, stream, size, stage):
    """The pool that serves a request and its best block; block 0 if the pool needs a segment.

    Where memory is short, all holes are used, and a free segment that is much too large is left to go back to the
    device, unless Python was asked already.
    """
    private = state.hot.private_kind
    if private != 0:
        for i in range(state.capture.num_persistent_sizes):
            if persistent_size_at(state, i).value == size:  # a wrong guess costs memory, nothing else
                private |= LASTING_BIT
        pool = find_pool(state, stream, private, True)
        if pool >= 0:  # the kind may have served graphs before that are gone
            pool_at(state, pool).status = POOL_PINNED
        return pool, best_fit(state, pool, size) if pool >= 0 else 0
    is_short = state.policy.memory_is_short == 1 and stage != HEAP_ONLY
    if size <= SMALL_LIMIT:
        pool = find_pool(state, stream, SMALL_KIND, True)
        fit = best_fit(state, pool, size) if pool >= 0 else 0
        # where steps are marked, unless the plan is bypassed, what lives on would keep pages from the plan
        fills_pages = state.policy.expects_marks == 0 or state.follow.bypassed != 0
        if fit == 0 and pool >= 0 and (is_short or fills_pages):
            return _remnant(state, stream, pool, size, is_short)
        return pool, fit
    lasts = state.policy.allocating_persistent == 1
    persistent = find_pool(state, stream, PERSISTENT_KIND, lasts)
    lasts = lasts and persistent >= 0
    pool = find_pool(state, stream, GENERAL_KIND, not lasts)
    fit = best_fit(state, pool, size) if pool >= 0 and (is_short or not lasts) else 0
    if is_short and fit != 0 and _is_much_too_large(state, fit, size):
        fit = 0
    # holes among what lasts are in segments that stay anyhow
    hole = best_fit(state, persistent, size) if persistent >= 0 else 0
    if hole != 0 and (fit == 0 or is_before(state, hole, fit)):
        return persistent, hole
    return persistent if lasts and fit == 0 else pool, fit


@inner()
def _remnant(state, stream, pool, size, is_short):
    """What is left over among large requests and too small for those, with its pool; else `pool` and 0.

    It is of a page that is held for them anyhow. A segment without pages would be kept whole, so its rest is used only
    where memory is short.
    """
    for kind in (PERSISTENT_KIND, GENERAL_KIND):
        other = find_pool(state, stream, kind, False)
        fit = best_fit(state, other, size) if other >= 0 else 0
        if fit == 0 or block_at(state, fit).size_bytes >= GRANULE:
            continue
        if is_short or segment_at(state, block_at(state, fit).segment).is_paged == 1:
            return other, fit
    return pool, 0


@inner()
def _is_much_too_large(state, row, size):
    """Whether a free block is a whole segment, and one that is made for requests of `size` bytes would be smaller."""
    block = block_at(state, row)
    if block.previous != 0 or block.next != 0:
        return False
    alone = (size + (GRANULE - 1)) & -GRANULE
    if (alone - size) << WASTE_SHIFT > alone:
        return block.size_bytes > MAX_SHARED_SEGMENT
    return block.size_bytes > alone + (alone >> 3)


@inner()
def take_block(state, row, size, requested):
    """Make a free block live, and split it if it is larger than needed; its address."""
    remove_free(state, row)
    block = block_at(state, row)
    kind = pool_at(state, pool_of(state, row)).kind
    keeps_rest = kind == GENERAL_KIND and size > SMALL_LIMIT and segment_at(state, block.segment).is_paged == 0
    rest = cut(state, row, size) if block.size_bytes - size > (_SPLIT_LIMIT if keeps_rest else 0) else 0
    if rest != 0:
        insert_free(state, rest)
    return begin_life(state, row, requested)


@inner()
def begin_life(state, row, requested):
    """Make a block that is on no list live; its address."""
    block = block_at(state, row)
    block.state = BLOCK_LIVE
    block.requested_bytes = requested
    block.born = -1
    add_live(state, block.address, row)
    segment = segment_at(state, block.segment)
    segment.num_live += 1
    segment.last_used = state.iterations.iterations_ever
    return block.address


@inner()
def heap_allocate(state, stream, size, requested, stage):
    """Serve a request of `size` (rounded) bytes, or say what that needs."""
    pool, row = _choose(state, stream, size, stage)
    if pool < 0:
        return Outcome(0, REFUSED, FULL_POOLS)
    if live_is_full(state):
        return Outcome(0, REFUSED, FULL_LIVE)
    private = state.hot.private_kind
    if private != 0 and state.capture.capture_plan_length != 0 and pool_at(state, pool).kind == private:
        planned = _planned_place(state, pool, size) if state.capture.capture_plan_base != 0 else -1
        if planned > 0:
            return Outcome(begin_life(state, planned, requested), 0, 0)
        row = row if planned == 0 else 0
    if row == 0:
        return Outcome(0, NEED_SEGMENT, pool)
    return Outcome(take_block(state, row, size, requested), 0, 0)


@inner()
def any_pool_fit(state, stream, size, requested):
    """The last resort before an out-of-memory error: any free block of the stream, whatever its pool; 0 if none.

    A capture gets only what is private to it: others would reuse a block that its graph goes on writing to.
    """
    if live_is_full(state):
        return 0
    private, best = state.hot.private_kind, 0
    for row in range(state.heap.pools_mask + 1):
        pool_row = pool_at(state, row)
        # what graphs that are gone have lent may still be used on another stream
        is_ours = pool_row.status == POOL_USED and graph_pool_at(state, pool_row.graphs).has_lent == 0
        if private != 0:
            is_ours = pool_row.status != 0 and (pool_row.kind | LASTING_BIT) == (private | LASTING_BIT)
        if is_ours and pool_row.stream == stream:
            fit = best_fit(state, row, size)
            if fit != 0 and (best == 0 or is_before(state, fit, best)):
                best = fit
    if best == 0:
        return 0
    if private != 0:
        pool_at(state, pool_of(state, best)).status = POOL_PINNED
    return take_block(state, best, size, requested)


@inner()
def heap_free(state, row):
    """Free a live block and coalesce it with its free neighbours."""
    drop_live(state, block_at(state, row).address)
    segment_at(state, block_at(state, row).segment).num_live -= 1
    join(state, row, BLOCK_FREE)


@inner()
def _planned_place(state, pool, size):
    """A block of `size` bytes at the place of a request, taken off its list; 0: none is free, -1: it lacks memory."""
    capture = state.capture
    first, length = capture.capture_plan_first, capture.capture_plan_length
    while first < length and capture_entry_at(state, first).size_bytes == 0:
        first += 1
    capture.capture_plan_first = first
    for i in range(first, length):
        entry = capture_entry_at(state, i)
        if entry.size_bytes == size:
            address = capture.capture_plan_base + entry.offset
            row = _unused_block(state, pool, address, size)
            if row < 0:
                capture.capture_plan_lacks = address
                return -1
            entry.size_bytes = 0
            return cut_out(state, row, address, size) if row != 0 and has_rows(state, 2) else 0
    return 0


@inner()
def _unused_block(state, pool, address, size):
    """The free block of a pool that has all of [address, address + size); 0: something lives there, -1: some lacks."""
    row = 0
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        inside = segment.address <= address < segment.address + segment.size_bytes
        if inside and segment.address != 0 and segment.pool == pool:
            row = segment.first
            break
    while row != 0 and block_at(state, row).address + block_at(state, row).size_bytes <= address:
        row = block_at(state, row).next
    block = block_at(state, row)
    if row == 0 or (block.state == BLOCK_FREE and address + size <= block.address + block.size_bytes):
        return row
    while row != 0 and block_at(state, row).address < address + size:
        if block_at(state, row).state not in (BLOCK_FREE, BLOCK_UNMAPPED):
            return 0
        row = block_at(state, row).next
    return -1


@under_lock()
def find_range(state, pool, size):
    address = 0
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if segment.address != 0 and segment.pool == pool and segment.is_paged == 1 and segment.size_bytes >= size:
            address = segment.address
    return address


@under_lock()
def find_place(state, pool, size):
    row = best_fit(state, pool, size)
    return block_at(state, row).address if row != 0 else 0


@under_lock()
def is_idle(state, pool):
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if segment.address != 0 and segment.pool == pool and segment.num_live != 0:
            return False
    return True
