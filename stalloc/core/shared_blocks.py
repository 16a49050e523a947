"""Blocks that several streams use: noted while they live, freed when all their other streams are done with them.

Contract: as in requests.py; when a use is over is said in stream_uses.py. Where Python has something to do before such
a block is free (STALLOC_POISON), only Python asks.
"""

from stalloc.compiled import BORROWING, cfunc, inner, njit
from stalloc.core.constants import BLOCK_LIVE, BLOCK_SHARED, MAX_STREAMS, NEED_EVENTS, STATE_MASK
from stalloc.core.counters import count_deferred
from stalloc.core.free_lists import pool_of
from stalloc.core.frees import find_block, release, set_status, size_at, status_at
from stalloc.core.handovers import note_user
from stalloc.core.intrinsics import call3, lock, locked, unlock
from stalloc.core.records import entry_at, pool_at, slot_at, state_at, stream_at, stream_use_at
from stalloc.core.stream_uses import ask_uses, begin_asking, end_asking, forget_uses, is_over, note_use

_PATIENCE = 3  # times that events could not be made
BUSY, UNKNOWN, KNOWN = -1, 0, 1  # another thread is asking; of some uses the driver did not know; it did


@inner()
def share(device, address, stream):
    """Note that a stream (handle) uses a block; what is not stalloc's, or is the stream's own, is left alone."""
    num_failures = 0
    while True:
        state = locked(device)
        slot, block = find_block(state, address)
        status = status_at(state, slot, block)
        if status & STATE_MASK not in (BLOCK_LIVE, BLOCK_SHARED) or _own_stream(state, slot, block) == stream:
            break
        noted = note_use(state, address, status, stream)
        if noted == 0 and num_failures == _PATIENCE:
            noted = BLOCK_SHARED  # the driver is lost: a block that is known to wait for nothing is never free again
        if noted != 0:
            set_status(state, slot, block, noted)
            break
        unlock(state)
        num_failures += call3(state.driver.slow_function, state.driver.device, NEED_EVENTS, 0) != 1
    unlock(state)


@inner()
def _own_stream(state, slot, block):
    """The handle of the stream that a block was asked for on."""
    if slot >= 0:
        index = entry_at(state, slot_at(state, slot).entry).key & (MAX_STREAMS - 1)
    else:
        index = pool_at(state, pool_of(state, block)).stream
    return stream_at(state, index).value


@inner()
def free_those_over(state):
    """Free blocks whose other streams are done with them; whether there is nothing more to be done now."""
    if state.shared.frees_in_python == 1 or state.driver.record_event == 0:
        return False
    return _ask_and_release(state, 0) != UNKNOWN


@njit()
def poll(device, before):
    """Free blocks whose uses are over, unseen by Python: BUSY, UNKNOWN or KNOWN; `before` as in `ask_uses`."""
    return _ask_and_release(state_at(device), before)


@inner()
def _ask_and_release(state, before):
    if not begin_asking(state):
        return BUSY
    knew = ask_uses(state, before)
    _release_those_over(state)
    end_asking(state)
    return KNOWN if knew else UNKNOWN


@njit(**BORROWING)
def ask(device, before, addresses):
    """Write the addresses of blocks whose other streams are done with them, as many as there is room for. For Python.

    How many, or BUSY; and whether the driver knew. They wait until `release_those_over`.
    """
    state = state_at(device)
    if not begin_asking(state):
        return BUSY, False
    knew = ask_uses(state, before)
    count = 0
    lock(state)
    first = state.shared.first_freed_use
    while first != 0 and count < len(addresses):
        if is_over(state, first):
            addresses[count] = stream_use_at(state, first).address
            count += 1
        first = stream_use_at(state, first).next_freed
    unlock(state)
    end_asking(state)
    return count, knew


@njit()
def release_those_over(device):
    """Free the blocks that `ask` found, if it had room for all. For Python."""
    _release_those_over(state_at(device))


@inner()
def _release_those_over(state):
    previous = 0
    lock(state)
    first = state.shared.first_freed_use
    unlock(state)
    while first != 0:
        lock(state)
        uses, first = first, stream_use_at(state, first).next_freed
        if is_over(state, uses):
            address = stream_use_at(state, uses).address
            forget_uses(state, previous, uses)
            _finish(state, address)
        else:
            previous = uses
        unlock(state)


@inner()
def _finish(state, address):
    """Free a block that does not wait any more."""
    slot, block = find_block(state, address)
    count_deferred(state, size_at(state, slot, block), -1)
    if slot >= 0 and state.hot.has_handovers == 1:
        note_user(state, slot_at(state, slot).entry, False)
    release(state, address, slot, block)


@cfunc("void(int64, int64, int64)")
def share_entry(device, address, stream):
    """What C code calls: `address` has it."""
    share(device, address, stream)
