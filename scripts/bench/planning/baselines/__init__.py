"""What others publish for the same problem, and single methods of ours, each behind one signature.

Contract: `place(start, end, size) -> offsets` takes (n,) int64, lifespans [start, end) not empty and sizes positive;
it gives (n,) int64 offsets of a packing without overlap, the same for the same input. What others publish is written
from the description that its module names, and is named in the table after the project or paper that it comes from.
Limits on the number of requests keep a method from taking minutes; the table says where one was left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stalloc.planner import plan_arrays
from stalloc.planner.budget import Budget

from . import cp_sat, greedy, inductor, stalloc_paper
from .placing import Column


@dataclass(frozen=True)
class Baseline:
    name: str
    place: Callable[..., Column]
    max_requests: int
    missing: str = ""  #: why it cannot run here; empty if it can


def _annealing(start: Column, end: Column, size: Column) -> Column:
    """The planner's own method of that name, which is after their paper."""
    return plan_arrays(start, end, size, alignment=1, budget=Budget(method="annealing")).offset


def _colouring(start: Column, end: Column, size: Column) -> Column:
    """The planner's own method of that name: the colours of the lifespan graph alone."""
    return plan_arrays(start, end, size, alignment=1, budget=Budget(method="colouring")).offset


BASELINES = (
    Baseline("TFLite, by size", greedy.gaps_by_size, 120_000),
    Baseline("TFLite, by breadth", greedy.gaps_by_breadth, 120_000),
    Baseline("XLA", greedy.better_of_two_orders, 120_000),
    Baseline("USMP, by size", greedy.stacked_by_size, 120_000),
    Baseline("USMP, by conflicts", greedy.stacked_by_conflicts, 120_000),
    Baseline("USMP, hill climb", greedy.hill_climb, 8_000),
    Baseline("ONNX Runtime", greedy.as_it_runs, 120_000),
    Baseline("Inductor", inductor.place, 5_000),
    Baseline("STAlloc paper", stalloc_paper.place, 2_000_000),
    Baseline("Imanishi and Xu", _annealing, 20_000),
    Baseline("stalloc, colouring", _colouring, 70_000),
    Baseline("CP-SAT", cp_sat.place, 500, cp_sat.missing()),
)
ANNEALING, COLOURING = (
    next(row for row, baseline in enumerate(BASELINES) if baseline.place is place) for place in (_annealing, _colouring)
)
