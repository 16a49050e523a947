"""Several strands of one program: threads that each follow tapes of their own, and whose requests come in any order.

Contract: the lock is held, except where Python calls. `State` holds the cursor of one strand, that of the last request;
those of the others wait in the table of strands. A request is its strand's by who asks: the thread whose strand it is,
or else whoever asked for what that strand expected, as a backward pass does in a thread of torch's. Strands have places
of their own, so nothing depends on the order in which they ask.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import MODE_REPLAY, NUM_ASKERS
from stalloc.core.event_log import this_asker
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.records import asker_at, entry_at, history_at, kept_at, ring_at, strand_at


@inner()
def _copy_cursor(source, target):
    """From the state to a strand, or back."""
    target.ring_start = source.ring_start
    target.ring_end = source.ring_end
    target.cursor = source.cursor
    target.pass_start = source.pass_start
    target.history_count = source.history_count
    target.miss_run = source.miss_run
    target.last_miss = source.last_miss
    target.tapes = source.tapes
    target.num_tapes = source.num_tapes


@inner()
def _save(state):
    """Keep the cursor of the strand that asked last."""
    strand = strand_at(state, state.strand)
    _copy_cursor(state, strand)
    for i in range(4):
        kept_at(strand, i).value = history_at(state, i).value


@inner()
def switch_to(state, index):
    """Go on with the cursor of a strand."""
    if index == state.strand:
        return
    _save(state)
    strand = strand_at(state, index)
    state.strand = index
    _copy_cursor(strand, state)
    for i in range(4):
        history_at(state, i).value = kept_at(strand, i).value


@inner()
def _expects(state, key):
    """Whether the strand that asked last expects this request: next, or as the first of another of its tapes."""
    if entry_at(state, state.cursor).key == key:
        return True
    if state.cursor != state.ring_start:
        return False
    tape = 0
    while tape < state.num_tapes and entry_at(state, ring_at(state, tape).begin).key != key:
        tape += 1
    return tape < state.num_tapes


@inner()
def _find_expecting(state, key, busy):
    """Go on with a strand that expects this request, the one that asked last before others; whether there is one.

    `busy`: of those that others work for.
    """
    last, index = state.strand, state.strand
    for _ in range(state.num_strands):
        strand = strand_at(state, index)
        switch_to(state, index)
        if busy == (strand.asker != strand.thread) and _expects(state, key):
            return True
        index = index + 1 if index + 1 < state.num_strands else 0
    switch_to(state, last)
    return False


@inner()
def _asker_row(state, asker):
    return asker_at(state, (asker ^ asker >> 12) & (NUM_ASKERS - 1))


@inner()
def _own_strand(state, thread):
    """The strand of a thread, -1 if it has none."""
    index = state.num_strands - 1
    while index >= 0 and strand_at(state, index).thread != thread:
        index -= 1
    return index


@inner()
def choose_strand(state, key):
    """Go on with the strand that a request belongs to; False: it is none of any."""
    asker = this_asker(state)
    index = _own_strand(state, asker)
    if index < 0:
        row = _asker_row(state, asker)
        index = row.strand if row.asker == asker else -1
        if index >= 0:
            switch_to(state, index)
        if index < 0 or not _expects(state, key):
            if _find_expecting(state, key, False) or _find_expecting(state, key, True):
                index = state.strand
            row.asker = asker
            row.strand = index
    if index < 0:
        state.misses += 1
        state.step_misses += 1
        state.excess_misses += 1
        return False
    switch_to(state, index)
    strand_at(state, index).asker = asker
    return True


@njit()
def strand_of(device, thread):
    """Which strand a thread's requests belong to, -1 if to none; it is that strand's own from here on. For Python."""
    state = locked(device)
    index = -1
    if state.mode == MODE_REPLAY and state.num_strands > 0:
        index = _own_strand(state, thread)
        row = _asker_row(state, thread)
        if index < 0 and row.asker == thread and 0 <= row.strand < state.num_strands:
            index = row.strand
            strand_at(state, index).thread = thread
    unlock(state)
    return index


@njit(**BORROWING)
def cursors(device, rows):
    """Write for each strand where the tape begins and ends that it follows, and its cursor. For Python."""
    state = locked(device)
    if state.num_strands > 0:
        _save(state)
    for index in range(min(state.num_strands, len(rows))):
        strand = strand_at(state, index)
        rows[index, 0], rows[index, 1], rows[index, 2] = strand.ring_start, strand.ring_end, strand.cursor
    unlock(state)
