"""Several programs in one arena, one at a time.

Contract: every plan stands by itself, and all state one peak, the size of an arena that serves each of them. Since
only one of them runs at a time, they share all addresses, and the least common peak is the largest of their own.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stalloc.planner.layout import columns
from stalloc.planner.plan_record import Plan
from stalloc.planner.planning import Arrays, plan, plan_schedule, schedule_bound
from stalloc.planner.problem import epochs, load_curve
from stalloc.sizes import aligned
from stalloc.trace import Trace

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule


def plan_joint(sources: "Sequence[Trace | Schedule | Arrays]", *, alignment: int = 512) -> list[Plan]:
    """One plan for each of `sources`: traces, schedules, or (start, end, size). All have the same `peak_bytes`.

    The one that needs most is planned first; the others need not be better than that. Raises BadInputError for input
    that cannot be planned.
    """
    bounds = [_bound(source, alignment) for source in sources]
    plans: dict[int, Plan] = {}
    peak = 0
    for index in np.argsort([-bound for bound in bounds], kind="stable").tolist():
        source = sources[index]
        if isinstance(source, Trace | tuple):
            plans[index] = plan(source, alignment=alignment, aim_bytes=peak)
        else:
            plans[index] = plan_schedule(source, alignment)
        peak = max(peak, plans[index].peak_bytes)
    proven = max((made.proven_bound_bytes for made in plans.values()), default=0)
    return [
        dataclasses.replace(
            plans[index],
            peak_bytes=peak,
            proven_bound_bytes=proven,
            optimal=peak == proven,
            provenance={**plans[index].provenance, "joint": {"index": index, "plans": len(plans)}},
        )
        for index in range(len(plans))
    ]


def _bound(source: "Trace | Schedule | Arrays", alignment: int) -> int:
    """The maximum load of one source, sizes rounded up."""
    if not isinstance(source, Trace | tuple):
        return schedule_bound(source, alignment)
    given = (source.start, source.end, source.size) if isinstance(source, Trace) else source
    start, end, size = columns(*given)
    rows = start < end
    a, b, num_epochs = epochs(start[rows], end[rows])
    return int(load_curve(a, b, aligned(size[rows], alignment), num_epochs).max(initial=0))
