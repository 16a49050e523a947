"""Columns and lists of words of an optional table of Trace.extra, looked at before anything of them is used."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stalloc.columns import Column


class DamagedTable(Exception):
    """What is wrong with a table, in a few words; whoever reads it says which table it is."""


class Rule(NamedTuple):
    """What a column may hold, and where it is kept once it was read."""

    field: str
    dtype: Any
    table: str  #: whose columns have one length
    lowest: int
    bound: int | str  #: what is beyond its numbers; or the name of such a number, which depends on the trace


class Rules(dict[str, Rule]):
    """The rules of all columns, by their names in Trace.extra; `tables` are an object with their fields."""

    def written(self, tables: object) -> dict[str, Column]:
        """The columns for Trace.extra."""
        return {name: np.asarray(getattr(tables, rule.field)).astype(rule.dtype) for name, rule in self.items()}

    def read(self, extra: Mapping[str, Column]) -> dict[str, Column]:
        """The columns by field. Raises DamagedTable for one that is missing, or not one row of its type."""
        return {rule.field: _column(extra, name, rule.dtype) for name, rule in self.items()}

    def fields(self) -> dict[str, list[str]]:
        tables: dict[str, list[str]] = {}
        for rule in self.values():
            tables.setdefault(rule.table, []).append(rule.field)
        return tables

    def check(self, tables: object, bounds: Mapping[str, int]) -> None:
        """Raise DamagedTable if a column holds a number out of its bounds; `bounds`: those that depend on the trace."""
        for rule in self.values():
            column = getattr(tables, rule.field)
            bound = bounds[rule.bound] if isinstance(rule.bound, str) else rule.bound
            if len(column) and (int(column.min()) < rule.lowest or int(column.max()) >= bound):
                raise DamagedTable(f"{rule.field} holds numbers beyond its table")


def _column(extra: Mapping[str, Column], name: str, dtype: Any) -> Column:
    if name not in extra:
        raise DamagedTable(f"{name} is missing")
    column = extra[name]
    if column.ndim != 1 or column.dtype != dtype:
        raise DamagedTable(f"{name} is {column.dtype} of shape {column.shape}, expected one row of {np.dtype(dtype)}")
    return column


def packed_list(listed: Sequence[Any]) -> Column:
    """A list of names, or of lists of them, as a column."""
    return np.frombuffer(json.dumps(listed, separators=(",", ":")).encode(), np.uint8)


def unpacked_list(extra: Mapping[str, Column], name: str, max_length: int) -> list[Any]:
    """What `packed_list` made a column of. Raises DamagedTable for what it cannot have made."""
    try:
        listed = json.loads(_column(extra, name, np.uint8).tobytes())
    except (ValueError, RecursionError) as error:
        raise DamagedTable(f"{name} is no JSON") from error
    if not isinstance(listed, list) or len(listed) > max_length:
        raise DamagedTable(f"{name} is no list")
    return listed
