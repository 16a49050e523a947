"""Planned places for the requests of a capture: the k-th of a size has that of the k-th of its warm-up.

Contract: the lock is held, except where Python calls. A place is given only if all of it is free, so a capture that
differs from its warm-up costs memory, never correctness: its other requests are served best fit.
"""

from stalloc.compiled import inner, njit
from stalloc.core.constants import BLOCK_FREE
from stalloc.core.free_lists import best_fit
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.pages import cut_out, has_rows
from stalloc.core.records import block_at, capture_entry_at, segment_at


@inner()
def planned_place(state, pool, size):
    """A block of `size` bytes at the place of a request, taken off its list; 0 if it has none that is free."""
    for i in range(state.capture_plan_length):
        entry = capture_entry_at(state, i)
        if entry.size_bytes == size:
            entry.size_bytes = 0
            row = _free_block(state, pool, state.capture_plan_base + entry.offset, size)
            if row == 0 or not has_rows(state, 2):
                return 0
            return cut_out(state, row, state.capture_plan_base + entry.offset, size)
    return 0


@inner()
def _free_block(state, pool, address, size):
    """The free block of a pool that has all of [address, address + size); 0: there is none."""
    for number in range(1, state.segments_used):
        segment = segment_at(state, number)
        if segment.address == 0 or segment.pool != pool:
            continue
        if not segment.address <= address < segment.address + segment.size_bytes:
            continue
        row = segment.first
        while row != 0:
            block = block_at(state, row)
            if address < block.address + block.size_bytes:
                fits = block.address <= address and address + size <= block.address + block.size_bytes
                return row if fits and block.state == BLOCK_FREE else 0
            row = block.next
    return 0


@njit()
def find_place(device, pool, size):
    """Where a pool has so many free bytes in one piece; 0: nowhere. For Python."""
    state = locked(device)
    row = best_fit(state, pool, size)
    address = block_at(state, row).address if row != 0 else 0
    unlock(state)
    return address


@njit()
def is_idle(device, pool):
    """Whether nothing lives in a pool. For Python."""
    state = locked(device)
    idle = True
    for number in range(1, state.segments_used):
        segment = segment_at(state, number)
        idle = idle and not (segment.address != 0 and segment.pool == pool and segment.num_live != 0)
    unlock(state)
    return idle
