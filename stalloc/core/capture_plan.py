"""Planned places for the requests of a capture: the k-th of a size has that of the k-th of its warm-up.

Contract: the lock is held, except where Python calls. A place is given only if all of it is free, so a capture that
differs from its warm-up costs memory, never correctness: its other requests are served best fit.
"""

from stalloc.compiled import inner, njit
from stalloc.core.constants import BLOCK_FREE, BLOCK_UNMAPPED
from stalloc.core.free_lists import best_fit
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.pages import cut_out, has_rows
from stalloc.core.records import block_at, capture_entry_at, segment_at


@inner()
def planned_place(state, pool, size):
    """A block of `size` bytes at the place of a request, taken off its list; 0: none is free, -1: it lacks memory."""
    capture = state.capture
    while capture.capture_plan_first < capture.capture_plan_length:
        if capture_entry_at(state, capture.capture_plan_first).size_bytes != 0:
            break
        capture.capture_plan_first += 1
    for i in range(capture.capture_plan_first, capture.capture_plan_length):
        entry = capture_entry_at(state, i)
        if entry.size_bytes == size:
            address = state.capture.capture_plan_base + entry.offset
            row = _unused_block(state, pool, address, size)
            if row < 0:
                state.capture.capture_plan_lacks = address
                return -1
            entry.size_bytes = 0
            return cut_out(state, row, address, size) if row != 0 and has_rows(state, 2) else 0
    return 0


@inner()
def _unused_block(state, pool, address, size):
    """The free block of a pool that has all of [address, address + size); 0: something lives there, -1: some lacks."""
    row = _block_with(state, pool, address)
    block = block_at(state, row)
    if row == 0 or (block.state == BLOCK_FREE and address + size <= block.address + block.size_bytes):
        return row
    while row != 0 and block_at(state, row).address < address + size:
        if block_at(state, row).state != BLOCK_FREE and block_at(state, row).state != BLOCK_UNMAPPED:
            return 0
        row = block_at(state, row).next
    return -1


@inner()
def _block_with(state, pool, address):
    """The block of a pool that an address is in; 0: there is none."""
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if segment.address == 0 or segment.pool != pool:
            continue
        if segment.address <= address < segment.address + segment.size_bytes:
            row = segment.first
            while block_at(state, row).address + block_at(state, row).size_bytes <= address:
                row = block_at(state, row).next
            return row
    return 0


@njit()
def find_range(device, pool, size):
    """Where addresses of a pool begin, of which there are so many bytes in one piece; 0: there are none. For Python."""
    state = locked(device)
    address = 0
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if segment.address != 0 and segment.pool == pool and segment.is_paged == 1 and segment.size_bytes >= size:
            address = segment.address
    unlock(state)
    return address


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
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        idle = idle and not (segment.address != 0 and segment.pool == pool and segment.num_live != 0)
    unlock(state)
    return idle
