"""Tables that travel with a trace in `extra` and that some part of stalloc reads: their shapes and ranges.

Contract: a known table that passes has one entry for each row it belongs to and points inside other tables. Those of
call sites are checked where they are read, in stalloc.trace.sites; tables that nobody knows are not looked at.
"""

import numpy as np

from stalloc.errors import BadInputError
from stalloc.trace.record import MOST_BYTES, Column, Trace

_BLOCKS = ("block_address", "block_size", "block_request")
_SEGMENTS = ("segment_pool", "segment_is_small", "segment_is_expandable")


def check_extra(trace: Trace) -> None:
    """Raise BadInputError, naming the table, for the first known one that does not fit its trace."""
    extra, num_requests = trace.extra, trace.num_requests
    for name in ("offset", "alignment"):
        if name in extra:
            column = _numbers(trace, name, (num_requests,))
            if len(column) and (column.min() < 0 or column.max() >= MOST_BYTES):
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
        _, size, request = columns
        if len(size) and (size.min() < 0 or float(size.sum(dtype=np.float64)) >= MOST_BYTES):
            _refuse(trace, "block_size", "holds what is no number of bytes")
        if len(request) and (request.min() < -1 or request.max() >= num_requests):
            _refuse(trace, "block_request", "points outside the requests")


def _numbers(trace: Trace, name: str, shape: tuple[int, ...]) -> Column:
    column = trace.extra[name]
    if column.shape != shape or column.dtype.kind not in "iub":
        _refuse(trace, name, f"is {column.dtype} of shape {column.shape}, expected whole numbers of shape {shape}")
    return column


def _refuse(trace: Trace, name: str, why: str) -> None:
    raise BadInputError(f"trace of device {trace.device}: table {name} {why}: the file is damaged.")
