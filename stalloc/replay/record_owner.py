"""A record and the tables that it owns: the state of a model, as compiled code takes it, on Python's side.

How a record is declared and reached is said in stalloc.core.record_types. An owner is one argument of compiled code
however many tables it has: it holds their addresses, and `at(t, block).size += 1` is one load, one addition and one
store.
"""

from typing import Any

import numpy as np

from stalloc.core.record_types import Record, table


def record_type(*fields: str) -> type[Record]:
    """A record whose fields are known only when a model is declared."""
    made: Any = type("Fields", (Record,), {"__annotations__": dict.fromkeys(fields, int)})
    return made


class Owner:
    """A record and the tables that it owns, on Python's side. A table `x` has its address in the field `x`, and its
    number of rows in `num_x` if there is such a field."""

    def __init__(self, record: type[Record], **tables: np.ndarray) -> None:
        self.record = table(record, 1)
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
        """The address of the record."""
        return int(self.record.ctypes.data)

    def __getitem__(self, name: str) -> int:
        return int(self.record[name][0])

    def write(self, **values: int) -> None:
        """Set fields of the record."""
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
