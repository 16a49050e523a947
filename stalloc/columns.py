"""Columns: what every table here is made of, with names for what their numbers mean.

A column is one-dimensional. The aliases say nothing to NumPy; they tell a reader whether a number is bytes, a place or
a moment.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]
"""An array of numbers of any type."""
Ints = NDArray[np.int64]
"""Numbers of no special meaning."""
Sizes = NDArray[np.int64]
"""Bytes."""
Offsets = NDArray[np.int64]
"""Bytes from the begin of an arena or a packing; -1 where there is none."""
Times = NDArray[np.int64]
"""Moments on one clock: event indices of a trace, schedule time, or epochs of a problem."""
Rows = NDArray[np.int64]
"""Rows of another table."""


def distinct(values: Column) -> Column:
    """(k,) the values (n,) ascending, each once.

    In place of np.unique, whose C++ code lets other threads run: a thread of the program that is in it when the
    interpreter ends takes the process with it ("terminate called without an active exception").
    """
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def read_only(values: Column, kind: type[np.generic]) -> Column:
    """Numbers for compiled code that only reads them, of one type wherever they come from: it is compiled once for all.

    numba takes what cannot be written, as it comes out of a file, for another type than what can.
    """
    view = np.ascontiguousarray(values, kind).view()
    view.flags.writeable = False
    return view
