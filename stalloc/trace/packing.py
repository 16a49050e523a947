"""A trace that nobody looks at for a while, in a tenth of the memory.

Contract: what comes out equals what went in, column by column.
"""

import zlib
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.trace.record import COLUMNS, Trace

_EXTRA = "extra."
_Packed = tuple[bytes, np.dtype[Any], tuple[int, ...]]


class KeptTrace:
    """A trace that can be packed: its columns are then kept as compressed differences of neighbours."""

    def __init__(self, trace: Trace) -> None:
        self._trace: Trace | None = trace
        self._packed: dict[str, _Packed] = {}
        self._rest: dict[str, Any] = {}

    def pack(self) -> None:
        """Pack the trace, if it is not packed yet."""
        trace = self._trace
        if trace is not None:
            self._packed = {name: _pack(getattr(trace, name)) for name in COLUMNS}
            self._packed |= {_EXTRA + name: _pack(column) for name, column in trace.extra.items()}
            self._rest = {name: value for name, value in vars(trace).items() if name not in (*COLUMNS, "extra")}
            self._trace = None

    def trace(self) -> Trace:
        trace = self._trace
        if trace is not None:
            return trace
        columns: dict[str, Any] = {name: _unpack(*packed) for name, packed in self._packed.items()}
        known = {name: columns.pop(name) for name in COLUMNS}
        return Trace(**known, **self._rest, extra={name.removeprefix(_EXTRA): one for name, one in columns.items()})


def _is_words(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 and dtype.itemsize == 8 and dtype.kind in "iu"


def _pack(column: Column) -> _Packed:
    words = _is_words(column.dtype, column.shape)
    data = np.diff(column.view(np.int64), prepend=np.int64(0)) if words else np.ascontiguousarray(column)
    return zlib.compress(data.tobytes(), 1), column.dtype, column.shape


def _unpack(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Column:
    raw = zlib.decompress(data)
    if _is_words(dtype, shape):
        return np.cumsum(np.frombuffer(raw, np.int64)).view(dtype)
    return np.frombuffer(raw, dtype).reshape(shape).copy()
