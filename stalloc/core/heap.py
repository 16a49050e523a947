"""The heap, for what no plan serves: best fit, blocks that are split and coalesced inside segments.

Contract: the lock is held; no two live blocks overlap; a block that is freed is coalesced with its free neighbours at
once. A request takes the end of a free block that only memory from below can make larger, so that what is left over is
not shut in.
"""

from typing import NamedTuple

from stalloc.compiled import inner
from stalloc.core.capture_plan import planned_place
from stalloc.core.constants import (
    ALIGNMENT,
    BLOCK_FREE,
    BLOCK_LIVE,
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
from stalloc.core.free_lists import best_fit, insert_free, is_before, pool_of, remove_free
from stalloc.core.hash_table import add_live, drop_live, live_is_full
from stalloc.core.pools import find_pool
from stalloc.core.records import block_at, graph_pool_at, persistent_size_at, pool_at, segment_at
from stalloc.core.segments import absorb, allocate_block_row

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
        pool = find_pool(state, stream, private | LASTING_BIT if _outlives_capture(state, size) else private, True)
        if pool >= 0:  # the kind may have served graphs before that are gone
            pool_at(state, pool).status = POOL_PINNED
        return pool, best_fit(state, pool, size) if pool >= 0 else 0
    is_short = state.policy.memory_is_short == 1 and stage != HEAP_ONLY
    if size <= SMALL_LIMIT:
        pool = find_pool(state, stream, SMALL_KIND, True)
        fit = best_fit(state, pool, size) if pool >= 0 else 0
        if fit == 0 and pool >= 0 and (is_short or _fills_pages(state)):
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
def _outlives_capture(state, size):
    """Whether a request of a capture is expected to live on after it; a wrong guess costs memory, nothing else."""
    lasts = False
    for i in range(state.capture.num_persistent_sizes):
        lasts = lasts or persistent_size_at(state, i).value == size
    return lasts


@inner()
def _fills_pages(state):
    """Whether small requests use what large ones leave over of their pages before more are mapped.

    Where steps are marked they do not, unless the plan is bypassed: what lives on would keep pages from the plan.
    """
    return state.policy.expects_marks == 0 or state.follow.bypassed != 0


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
def _split(state, row, size):
    """Split a block that is in no free list after `size` bytes; what is left becomes free, if a row is left for it."""
    other = allocate_block_row(state)
    if other == 0:
        return
    block, rest = block_at(state, row), block_at(state, other)
    rest.address = block.address + size
    rest.size_bytes = block.size_bytes - size
    rest.previous = row
    rest.next = block.next
    rest.segment = block.segment
    rest.state = BLOCK_FREE
    if block.next != 0:
        block_at(state, block.next).previous = other
    block.next = other
    block.size_bytes = size
    insert_free(state, other)


@inner()
def take_block(state, row, size, requested):
    """Make a free block live, and split it if it is larger than needed; its address."""
    remove_free(state, row)
    block = block_at(state, row)
    kind = pool_at(state, pool_of(state, row)).kind
    keeps_rest = kind == GENERAL_KIND and size > SMALL_LIMIT and segment_at(state, block.segment).is_paged == 0
    if block.size_bytes - size > (_SPLIT_LIMIT if keeps_rest else 0):
        _split(state, row, size)
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
    if (
        state.hot.private_kind != 0
        and pool_at(state, pool).kind == state.hot.private_kind
        and state.capture.capture_plan_length != 0
    ):
        if state.capture.capture_plan_base == 0:
            return Outcome(0, NEED_SEGMENT, pool)
        planned = planned_place(state, pool, size)
        if planned < 0:
            return Outcome(0, NEED_SEGMENT, pool)
        if planned != 0:
            return Outcome(begin_life(state, planned, requested), 0, 0)
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
    block = block_at(state, row)
    drop_live(state, block.address)
    segment_at(state, block.segment).num_live -= 1
    block.state = BLOCK_FREE
    following, previous = block.next, block.previous
    if following != 0 and block_at(state, following).state == BLOCK_FREE:
        remove_free(state, following)
        absorb(state, row, following)
    if previous != 0 and block_at(state, previous).state == BLOCK_FREE:
        remove_free(state, previous)
        absorb(state, previous, row)
        row = previous
    insert_free(state, row)
