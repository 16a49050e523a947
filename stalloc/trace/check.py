"""What must hold of a trace that was read, beyond what every Trace satisfies: events fit requests, tables fit both.

Contract: in a trace that passes, each request that was allocated in the record names the event of its alloc and of its
free, and these events name it; a known table of `extra` has one entry for each row it belongs to and points inside
other tables. Those of call sites are checked where they are read, in stalloc.trace.sites; tables that nobody knows are
not looked at.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.trace.activity import read_activity
from stalloc.trace.operations import read_operations
from stalloc.trace.record import MAX_BYTES, Action, Trace

_BLOCKS = ("block_address", "block_size", "block_request")
_MAX_ADDRESS = (1 << 63) - MAX_BYTES  # so that a block ends below 2**63
_SEGMENTS = ("segment_pool", "segment_is_small", "segment_is_expandable")


def check_read(trace: Trace) -> None:
    """Raise BadInputError, naming the column or the table, for the first one that does not fit the others."""
    if len(trace.action):
        _check_events(trace)
    _check_extra(trace)
    read_operations(trace)
    read_activity(trace)


def _check_events(trace: Trace) -> None:
    for name, action, outside in (("start", Action.ALLOC, -1), ("end", Action.FREE_COMPLETED, trace.num_events)):
        event = getattr(trace, name)
        rows = np.flatnonzero(event != outside)
        if not np.array_equal(trace.event_request[event[rows]], rows) or np.any(trace.action[event[rows]] != action):
            raise _wrong(trace, f"column {name} names other events than those of its requests")
        if np.count_nonzero((trace.action == action) & (trace.event_request >= 0)) != len(rows):
            raise _wrong(trace, f"its events name requests that column {name} does not know")
    asked = np.flatnonzero((trace.action == Action.FREE_REQUESTED) & (trace.event_request >= 0))
    row = trace.event_request[asked]
    if np.any((asked < trace.free_requested[row]) | (asked < trace.start[row]) | (asked > trace.end[row])):
        raise _wrong(trace, "its events ask to free what does not live")
    if np.any((trace.free_requested < trace.start) | (trace.free_requested > trace.end)):
        raise _wrong(trace, "column free_requested names events at which its requests do not live")


def _check_extra(trace: Trace) -> None:
    extra, num_requests = trace.extra, trace.num_requests
    for name in ("offset", "alignment"):
        if name in extra:
            column = _numbers(trace, name, (num_requests,))
            if len(column) and (column.min() < 0 or column.max() >= MAX_BYTES):
                _refuse(trace, name, "holds what is no number of bytes")
    if "id" in extra and (extra["id"].shape != (num_requests,) or extra["id"].dtype.kind not in "iuU"):
        _refuse(trace, "id", "is not one for each request")
    num_segments = len(trace.segment_address)
    for name in _SEGMENTS:
        if name in extra:
            _numbers(trace, name, (num_segments, 2) if name == "segment_pool" else (num_segments,))
    present = [name for name in _BLOCKS if name in extra]
    if present and len(present) < len(_BLOCKS):
        _refuse(trace, present[0], f"comes without {', '.join(set(_BLOCKS) - set(present))}")
    if present:
        columns = [_numbers(trace, name, extra[_BLOCKS[0]].shape[:1]) for name in _BLOCKS]
        address, size, request = columns
        if len(size) and (size.min() < 0 or float(size.sum(dtype=np.float64)) >= MAX_BYTES):
            _refuse(trace, "block_size", "holds what is no number of bytes")
        if len(address) and int(address.max()) > _MAX_ADDRESS:
            _refuse(trace, "block_address", "holds an address that no address space has")
        if len(request) and (request.min() < -1 or request.max() >= num_requests):
            _refuse(trace, "block_request", "points outside the requests")


def _numbers(trace: Trace, name: str, shape: tuple[int, ...]) -> Column:
    column = trace.extra[name]
    if column.shape != shape or column.dtype.kind not in "iub":
        _refuse(trace, name, f"is {column.dtype} of shape {column.shape}, expected whole numbers of shape {shape}")
    return column


def _refuse(trace: Trace, name: str, why: str) -> None:
    raise _wrong(trace, f"table {name} {why}")


def _wrong(trace: Trace, what: str) -> BadInputError:
    return BadInputError(f"trace of device {trace.device}: {what}: the file is damaged.")
