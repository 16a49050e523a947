"""Memory that passes from one stream to another: an event where it is freed, a wait where it is taken.

Contract: a planned request on one stream gets cells that another stream used last only after its stream waits for an
event that the other one recorded after the free was asked for; if that cannot be had (a capture, an error of the
driver), the request goes to the heap. Who used a cell last is looked up when it is taken, not read from the plan, so
this holds too when the program deviates from it. The plan only says where an event is worth recording early: at the
free, so that the wait covers no kernel that came later. Elsewhere it is recorded when the cells are taken.

The driver is never called with the lock held. Whoever takes cells has them to itself while it looks at their givers,
and its block keeps the arena and its tables in place.
"""

# ruff: noqa: F403, F405  (the names of layout are constants to the compiler)

from stalloc.compiled import njit
from stalloc.runtime.layout import *
from stalloc.runtime.lending import cell, cells_empty, find_slot
from stalloc.runtime.words import call3, peek, poke

_STATUS = 0xFFFF_FFFF  # the driver's functions return 32 bits


@njit()
def planned_entry(state, slot):
    """The row of the tape entry that lives in a slot."""
    return peek(state, TAPE) + peek(slot, S_ENTRY) * TAPE_ROW * 8


@njit()
def _raw_stream(state, index):
    return peek(peek(state, STREAMS), index)


@njit()
def _is_handle(stream):
    """Whether the driver knows the stream by this; a thread's own default stream goes by another name here."""
    return stream & 7 != 2


@njit()
def _stream_of(entry):
    return peek(entry, T_KEY) & (MAX_STREAMS - 1)


@njit()
def record_free(state, entry):
    """Record an entry's event on its stream, without the lock: True if it holds what the stream was given so far."""
    stream = _raw_stream(state, _stream_of(entry))
    if not _is_handle(stream):
        return False
    return call3(peek(state, RECORD_EVENT), peek(entry, T_EVENT), stream, 0) & _STATUS == 0


@njit()
def note_giver(state, entry, recorded):
    """Its block is about to be freed: whoever takes these cells next has to wait for it. With the lock held."""
    if peek(entry, T_EVENT) == 0:
        return
    number = (entry - peek(state, TAPE)) // (TAPE_ROW * 8)
    _set_givers(state, entry, number if recorded else GIVEN_UNRECORDED - _stream_of(entry))


@njit()
def _set_givers(state, entry, giver):
    for i in range(peek(entry, T_CELL_LOW), peek(entry, T_CELL_HIGH)):
        poke(peek(state, GIVERS), i, giver)


@njit()
def _giving_stream(state, giver):
    if giver < NOBODY:
        return GIVEN_UNRECORDED - giver
    return _stream_of(peek(state, TAPE) + giver * TAPE_ROW * 8)


@njit()
def wait_for_givers(state, entry):
    """Let the stream that took an entry's cells wait for all others that used them last, without the lock.

    How many waits that took; -1: it cannot wait. What it has waited for is kept in mind, the cells are not to be used.
    """
    if peek(entry, T_EVENT) == 0:
        return 0
    givers, high, stream = peek(state, GIVERS), peek(entry, T_CELL_HIGH), _stream_of(entry)
    waits = 0
    for i in range(peek(entry, T_CELL_LOW), high):
        giver = peek(givers, i)
        if giver == NOBODY or _giving_stream(state, giver) == stream:
            continue
        if waits == 0 and not _may_wait(state, entry, stream):
            return -1
        if not _wait_for(state, entry, giver, stream):
            return -1
        waits += 1
        for j in range(i, high):  # the stream's own work comes after the giver's from now on
            if peek(givers, j) == giver:
                poke(givers, j, GIVEN_UNRECORDED - stream)
    return waits


@njit()
def _may_wait(state, entry, stream):
    """Whether the stream is not being captured into a graph, which may not depend on work outside."""
    if not _is_handle(_raw_stream(state, stream)):
        return False
    poke(entry, T_STATUS, 0)
    status = call3(peek(state, IS_CAPTURING), _raw_stream(state, stream), entry + T_STATUS * 8, 0) & _STATUS
    return status == 0 and peek(entry, T_STATUS) & _STATUS == 0


@njit()
def _wait_for(state, entry, giver, stream):
    event = peek(entry, T_EVENT)  # nobody waits for the entry's own one while it lives
    if giver > NOBODY:
        event = peek(peek(state, TAPE), giver * TAPE_ROW + T_EVENT)
    else:
        given_on = _raw_stream(state, GIVEN_UNRECORDED - giver)
        if not _is_handle(given_on) or call3(peek(state, RECORD_EVENT), event, given_on, 0) & _STATUS != 0:
            return False
    return call3(peek(state, WAIT_EVENT), _raw_stream(state, stream), event, 0) & _STATUS == 0


@njit()
def part_streams(state, stream):
    """Give every cell that streams share to the stream of what lives there, or to `stream` if it is empty.

    With the lock held, while no tape is served. What is empty may be used once all streams have been waited for.
    """
    cells, count, i = peek(state, CELLS), peek(state, NUM_CELLS), 0
    info = peek(state, CELL_INFO)
    while i < count:
        high, owner = i + 1, stream
        lease = cell(state, i, CI_LEASE)
        if lease != 0:  # of one stream already
            i = peek(peek(state, CHUNKS), lease * CHUNK_ROW + C_HIGH)
            continue
        if not cells_empty(cells, i, i + 1):
            entry = planned_entry(state, find_slot(state, peek(state, ARENA) + cell(state, i, CI_OFFSET)))
            high, owner = peek(entry, T_CELL_HIGH), _stream_of(entry)
        for j in range(i, high):
            if cell(state, j, CI_STREAM) == NO_STREAM:
                poke(info, j * CELL_ROW + CI_STREAM, owner)
        i = high
