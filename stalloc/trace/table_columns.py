"""Columns and lists of words of an optional table of Trace.extra, looked at before anything of them is used."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stalloc.columns import Column


class DamagedTable(Exception):
    """What is wrong with a table, in a few words; whoever reads it says which table it is."""


def table_column(extra: Mapping[str, Column], name: str, dtype: Any) -> Column:
    """A column of one dimension and this type. Raises DamagedTable for any other."""
    if name not in extra:
        raise DamagedTable(f"{name} is missing")
    column = extra[name]
    if column.ndim != 1 or column.dtype != dtype:
        raise DamagedTable(f"{name} is {column.dtype} of shape {column.shape}, expected one row of {np.dtype(dtype)}")
    return column


def check_numbers(name: str, column: Column, lowest: int, bound: int) -> None:
    """Raise DamagedTable if a column holds a number below `lowest` or from `bound`."""
    if len(column) and (int(column.min()) < lowest or int(column.max()) >= bound):
        raise DamagedTable(f"{name} holds numbers beyond its table")


def packed_list(listed: Sequence[Any]) -> Column:
    """A list of names, or of lists of them, as a column."""
    return np.frombuffer(json.dumps(listed, separators=(",", ":")).encode(), np.uint8)


def unpacked_list(extra: Mapping[str, Column], name: str, max_length: int) -> list[Any]:
    """What `packed_list` made a column of. Raises DamagedTable for what it cannot have made."""
    try:
        listed = json.loads(table_column(extra, name, np.uint8).tobytes())
    except (ValueError, RecursionError) as error:
        raise DamagedTable(f"{name} is no JSON") from error
    if not isinstance(listed, list) or len(listed) > max_length:
        raise DamagedTable(f"{name} is no list")
    return listed
