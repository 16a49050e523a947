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
def _next_entry(state, size):
    """The first entry of a size that the capture has not asked for; the length of the plan if there is none."""
    capture = state.capture
    while capture.capture_plan_first < capture.capture_plan_length:
        if capture_entry_at(state, capture.capture_plan_first).size_bytes != 0:
            break
        capture.capture_plan_first += 1
    i = capture.capture_plan_first
    while i < capture.capture_plan_length and capture_entry_at(state, i).size_bytes != size:
        i += 1
    return i


@inner()
def planned_place(state, pool, size):
    """A block of `size` bytes at the place of a request, taken off its list; 0: none is free, -1: it lacks memory."""
    i = _next_entry(state, size)
    if i == state.capture.capture_plan_length:
        return 0
    entry = capture_entry_at(state, i)
    address = state.capture.capture_plan_base + entry.offset
    row = _unused_block(state, pool, address, size)
    if row < 0:
        state.capture.capture_plan_lacks = address
        return -1
    entry.size_bytes = 0
    return cut_out(state, row, address, size) if row != 0 and has_rows(state, 2) else 0


@inner()
def lasts_as_planned(state, size):
    """Whether the next request of a size is expected to outlive the capture, as its like did the one before."""
    i = _next_entry(state, size)
    return i < state.capture.capture_plan_length and capture_entry_at(state, i).offset < 0


@inner()
def note_lasting(state, size):
    """A request got memory among what outlives captures: it is not expected any more, if it was."""
    if lasts_as_planned(state, size):
        capture_entry_at(state, _next_entry(state, size)).size_bytes = 0


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


@inner()
def _behind_all(state, segment):
    """The address behind all that lives in a segment."""
    address, row = segment.address, segment.first
    while row != 0:
        block = block_at(state, row)
        if block.state not in (BLOCK_FREE, BLOCK_UNMAPPED):
            address = block.address + block.size_bytes
        row = block.next
    return address


@njit()
def find_range(device, pool, size):
    """Where addresses of a pool begin, behind what lives there, of which there are so many bytes; 0: nowhere.
    For Python.
    """
    state = locked(device)
    address = 0
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if segment.address != 0 and segment.pool == pool and segment.is_paged == 1:
            begin = _behind_all(state, segment)
            if segment.address + segment.size_bytes - begin >= size:
                address = begin
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
def num_live(device, pool):
    """How many blocks of a pool are not free. For Python."""
    state = locked(device)
    count = 0
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        count += segment.num_live if segment.address != 0 and segment.pool == pool else 0
    unlock(state)
    return count
