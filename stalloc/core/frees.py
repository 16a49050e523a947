"""free: what lives at an address is freed at once, or waits for the other streams that use it (shared_blocks.py).

Contract: as in requests.py. The functions that take a state are called with the lock held.
"""

from stalloc.compiled import inner
from stalloc.core.arena_intervals import flip_intervals
from stalloc.core.constants import (
    ACTION_FREE_COMPLETED,
    ACTION_FREE_REQUESTED,
    BLOCK_DEFERRED,
    BLOCK_FREE,
    BLOCK_IN_HANDOVER,
    BLOCK_LIVE,
    BLOCK_SHARED,
    MAX_STREAMS,
    MODE_PLANNED,
    STATE_BITS,
    STATE_MASK,
    STREAM_BITS,
)
from stalloc.core.counters import count_deferred, count_free
from stalloc.core.event_log import record
from stalloc.core.free_lists import pool_of
from stalloc.core.handovers import note_user, record_free
from stalloc.core.hash_table import find_live
from stalloc.core.heap import heap_free, rounded_bytes
from stalloc.core.intrinsics import lock, locked, unlock
from stalloc.core.learnt_lifespans import note_death
from stalloc.core.records import block_at, entry_at, pool_at, slot_at
from stalloc.core.slots import find_slot, in_arena
from stalloc.core.stream_uses import await_uses, record_uses


@inner(forceinline=True)
def free(device, address):
    """Free a block, or, if other streams have used it, let it wait for them."""
    if address == 0:
        return
    state = locked(device)
    slot, block = find_block(state, address)
    status, uses = status_at(state, slot, block), 0
    if status == BLOCK_LIVE:
        if state.hot.has_handovers == 1:
            _hand_over(state, address, slot, block)
        else:
            release(state, address, slot, block)
    elif status & STATE_MASK == BLOCK_SHARED:
        uses = _defer(state, address, slot, block, status >> STATE_BITS)
    else:
        state.statistics.num_unknown_frees += 1
    unlock(state)
    if uses != 0:
        record_uses(state, uses)


@inner()
def _defer(state, address, slot, block, uses):
    """Let a block wait for its uses; those that are to be recorded as soon as the lock is released, 0: none."""
    set_status(state, slot, block, BLOCK_DEFERRED | uses << STATE_BITS)
    count_deferred(state, size_at(state, slot, block), 1)
    if state.hot.recording == 1:
        record(state, ACTION_FREE_REQUESTED, 0, address, 0)
    return uses if uses != 0 and await_uses(state, uses) else 0


@inner(forceinline=True)
def find_block(state, address):
    """What lives at an address: the row of its slot (-1: none) and of its block (0: none)."""
    slot = find_slot(state, address) if in_arena(state, address) else -1
    return slot, find_live(state, address) if slot < 0 else 0


@inner(forceinline=True)
def status_at(state, slot, block):
    """The state of a slot or a block."""
    if slot >= 0:
        return slot_at(state, slot).state
    return block_at(state, block).state if block != 0 else BLOCK_FREE


@inner(forceinline=True)
def set_status(state, slot, block, status):
    """Write the status of a slot or, without one, of a block."""
    if slot >= 0:
        slot_at(state, slot).state = status
    else:
        block_at(state, block).state = status


@inner()
def size_at(state, slot, block):
    """The bytes of what lives in a slot or a block, rounded up."""
    if slot >= 0:
        return entry_at(state, slot_at(state, slot).entry).key >> STREAM_BITS
    return rounded_bytes(state, block)


@inner(forceinline=True)
def _release_planned(state, address, slot):
    """Free what lives in a slot."""
    planned = slot_at(state, slot)
    entry = entry_at(state, planned.entry)
    flip_intervals(state.plan.interval_bits, entry.interval_low, entry.interval_high)
    planned.entry = -1
    planned.state = BLOCK_FREE
    state.plan.arena_live -= 1
    count_free(state, entry.key >> STREAM_BITS, planned.requested_bytes)
    if state.hot.recording == 1:
        record(state, ACTION_FREE_COMPLETED, entry.key & (MAX_STREAMS - 1), address, planned.requested_bytes)


@inner()
def _release_block(state, address, block):
    """Free a block of the heap."""
    size, requested = rounded_bytes(state, block), block_at(state, block).requested_bytes
    stream = pool_at(state, pool_of(state, block)).stream
    if block_at(state, block).born >= 0 and state.hot.mode == MODE_PLANNED:
        note_death(state, block)
    heap_free(state, block)
    count_free(state, size, requested)
    if state.hot.recording == 1:
        record(state, ACTION_FREE_COMPLETED, stream, address, requested)


@inner(forceinline=True)
def release(state, address, slot, block):
    """Free the slot or the block that lives at an address."""
    if slot >= 0:
        _release_planned(state, address, slot)
    else:
        _release_block(state, address, block)


@inner()
def _hand_over(state, address, slot, block):
    """Free a block; if another stream takes its memory on the plan, with an event that says when it may be used.

    The lock is released while the event is recorded: the block is nobody's then, but its intervals stay taken.
    """
    position = slot_at(state, slot).entry if slot >= 0 else -1
    recorded = False
    if position >= 0 and entry_at(state, position).hands_over == 1 and state.hot.private_kind == 0:
        slot_at(state, slot).state = BLOCK_IN_HANDOVER
        unlock(state)
        recorded = record_free(state, position)
        lock(state)
        slot, block = find_block(state, address)  # a segment may have been made of the arena meanwhile
    if slot >= 0:
        note_user(state, slot_at(state, slot).entry, recorded)
    release(state, address, slot, block)
