"""A linear program some of whose variables are integers, solved by HiGHS.

HiGHS comes with SciPy, which is looked for only when a program is solved.
"""

import importlib
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.errors import SetupError

_PROVEN = (0, 2)  # what SciPy calls an optimal and an impossible program
Terms = list[tuple[int, float]]
"""Variables, with what each counts."""


class IntegerProgram:
    """Variables with a cost each, to be chosen within limits so that all together cost least."""

    def __init__(self) -> None:
        self._columns: list[tuple[float, bool, float, float]] = []  # cost, whether it is an integer, lowest, highest
        self._rows: list[tuple[Terms, float, float]] = []

    def variable(self, cost: float, *, is_integer: bool = True, lowest: float = 0.0, highest: float = 1.0) -> int:
        self._columns.append((cost, is_integer, lowest, highest))
        return len(self._columns) - 1

    def limit(self, terms: Terms, low: float, high: float) -> None:
        """The sum of these lies between `low` and `high`; variables below 0 do not exist, and count nothing."""
        self._rows.append(([(column, factor) for column, factor in terms if column >= 0], low, high))

    def solve(self, limit_seconds: float) -> tuple[Column | None, bool]:
        """The values of the variables, None if none were found, and whether it is proven that none cost 0.01 % less.

        Raises SetupError without SciPy.
        """
        optimize = find_solver()
        sparse = importlib.import_module("scipy.sparse")
        entries = [(row, column, factor) for row, (terms, *_) in enumerate(self._rows) for column, factor in terms]
        rows, columns, factors = zip(*entries, strict=True)
        matrix = sparse.coo_array((factors, (rows, columns)), shape=(len(self._rows), len(self._columns))).tocsr()
        cost, is_integer, lowest, highest = (np.array(column, float) for column in zip(*self._columns, strict=True))
        low, high = (np.array([row[side] for row in self._rows]) for side in (1, 2))
        found = optimize.milp(
            cost,
            constraints=optimize.LinearConstraint(matrix, low, high),
            bounds=optimize.Bounds(lowest, highest),
            integrality=is_integer,
            options={"time_limit": limit_seconds},
        )
        return found.x, found.status in _PROVEN


def find_solver() -> Any:
    try:
        return importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise SetupError(
            "integer programs are solved by HiGHS, which comes with SciPy: pip install 'stalloc[solver]'"
        ) from error
