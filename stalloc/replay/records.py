"""Tables of records for compiled code: a table is memory at an address that a record of its owner holds.

Compiled code gets a record as a pointer, so `at(t, block).size += 1` is one load, one addition and one store, and an
owner is one argument however many tables it has. Python sees the same memory as structured arrays.

Contract: whoever makes an owner keeps the arrays alive that its addresses name. No compiled function returns a record:
numba would copy it.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD = ir.IntType(64)


def record_type(*fields: str) -> np.dtype[Any]:
    """A record of int64 fields."""
    return np.dtype([(field, np.int64) for field in fields], align=True)


WORD = record_type("value")  #: of a table of plain numbers


def record_at(dtype: np.dtype[Any]) -> Any:
    """Compiled: the record at an address."""
    kind = numba.from_dtype(dtype)

    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), codegen

    return at


def row_of(table: str, dtype: np.dtype[Any]) -> Any:
    """Compiled: a row of the table whose address is in the field `table` of an owner."""
    kind = numba.from_dtype(dtype)

    @intrinsic
    def at(typingctx, owner, row):
        def codegen(context, builder, signature, args):
            begin = builder.load(cgutils.get_record_member(builder, args[0], owner.offset(table), _WORD), align=8)
            begin = builder.add(begin, builder.mul(args[1], _WORD(dtype.itemsize)))
            return builder.inttoptr(begin, context.get_value_type(kind))

        return kind(owner, types.int64), codegen

    return at


class Owner:
    """A record and the tables that it owns, on Python's side. A table `x` has its address in the field `x`, and its
    number of rows in `num_x` if there is such a field."""

    def __init__(self, dtype: np.dtype[Any], **tables: np.ndarray) -> None:
        self.record = np.zeros(1, dtype)
        self.tables: dict[str, np.ndarray] = {}
        for name, rows in tables.items():
            self._own(name, rows)

    def _own(self, name: str, rows: np.ndarray) -> None:
        self.tables[name] = rows
        self.record[name] = rows.ctypes.data
        if f"num_{name}" in (self.record.dtype.names or ()):
            self.record[f"num_{name}"] = len(rows)

    @property
    def pointer(self) -> int:
        """Where the record is."""
        return int(self.record.ctypes.data)

    def __getitem__(self, name: str) -> int:
        return int(self.record[name][0])

    def write(self, **values: int) -> None:
        """Set fields."""
        for name, value in values.items():
            self.record[name] = value

    def lengthen(self, **lengths: int) -> None:
        """Give tables at least so many rows; new ones are zeros."""
        for name, length in lengths.items():
            rows = self.tables[name]
            if length > len(rows):
                longer = np.zeros((length, *rows.shape[1:]), rows.dtype)
                longer[: len(rows)] = rows
                self._own(name, longer)
