"""Streams by number: each handle that a program uses has a row, its index; the default stream has row 0.

Contract: the lock is held, except where Python calls. A row is given to another handle only when no segment and no
schedule knows the old one.
"""

from stalloc.compiled import inner, njit
from stalloc.core.constants import MAX_STREAMS, NO_HANDLE
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.records import pool_at, segment_at, stream_at


@inner()
def _find_stream(state, handle):
    """The index of a stream other than the last; a new row if it has none, -1 if the table is full."""
    count = state.lookup.num_streams
    index, spare = -1, count
    for i in range(count):
        found = stream_at(state, i).value
        if found == handle:
            index = i
            break
        if found == NO_HANDLE and spare == count:
            spare = i
    if index < 0:
        if spare == MAX_STREAMS:
            return -1
        index = spare
        stream_at(state, index).value = handle
        state.lookup.num_streams = max(count, index + 1)
    state.hot.last_stream = handle
    state.hot.last_stream_index = index
    return index


@inner(forceinline=True)
def stream_index(state, handle):
    """The index of a stream; -1 if the table is full."""
    if state.hot.last_stream == handle:
        return state.hot.last_stream_index
    return _find_stream(state, handle)


@njit()
def forget_streams(device, kept):
    """Forget streams that hold no segment and are not marked in `kept`, a word for each; how many. For Python."""
    state = locked(device)
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        if segment.address != 0:
            kept[pool_at(state, segment.pool).stream] = 1
    count = 0
    for index in range(1, state.lookup.num_streams):
        stream = stream_at(state, index)
        if kept[index] == 0 and stream.value != NO_HANDLE:
            stream.value = NO_HANDLE
            count += 1
    state.hot.last_stream = 0
    state.hot.last_stream_index = 0
    unlock(state)
    return count
