"""Room in a program's plan for requests that are none of it, whose sizes differ from step to step.

Contract: the peak does not rise for them, and they get no place that is theirs. They are planned with the rest, as they
came in one step; where they lay the plan leaves memory idle in one piece, for as long as such a request lives. STAlloc
(EuroSys 2026, section 5.2) serves them from the idle space that its plan happens to leave.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stalloc.columns import Column
from stalloc.planner.plan_record import Plan
from stalloc.planner.planning import plan_schedule
from stalloc.planner.problem import epochs, load_curve
from stalloc.sizes import aligned

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule


def leave_room(plan: Plan, wider: "Schedule") -> Plan:
    """A plan of a cycle that leaves room for what else comes in it; the plan itself if that would raise its peak.

    `wider` is the plan's cycle on a finer clock, with such requests among its own: `row` is the entry of the cycle, -1
    for these. Of them, the largest first, those are taken that fit below the cycle's own load. Streams are kept apart.
    """
    kept = _that_fit(wider, plan.alignment)
    columns = ("size", "stream", "start", "end", "planned", "row")
    taken = replace(wider, **{name: getattr(wider, name)[kept] for name in columns})
    made = plan_schedule(taken, plan.alignment, device=plan.device)
    own = np.flatnonzero(taken.row >= 0)
    offset = np.full(len(plan.schedule_size), -1, np.int64)
    offset[taken.row[own]] = made.schedule_offset[own]
    rounded = aligned(plan.schedule_size, plan.alignment)
    if ((offset >= 0) & (offset + rounded > plan.peak_bytes)).any() or (
        (offset < 0) & (plan.schedule_offset >= 0)
    ).any():
        return plan
    return replace(plan, offset=offset, schedule_offset=offset, method=made.method)


def _that_fit(wider: "Schedule", alignment: int) -> Column:
    """The rows of the cycle, and of what else comes in it those that do not raise its load, in order."""
    size, period = aligned(wider.size, alignment), wider.cycle_end - wider.cycle_start
    wraps = np.flatnonzero(wider.end > wider.cycle_end)
    begin, end, num_epochs = epochs(
        np.concatenate([wider.start, np.full(len(wraps), wider.cycle_start)]),
        np.concatenate([np.minimum(wider.end, wider.cycle_end), wider.end[wraps] - period]),
    )
    row = np.concatenate([np.arange(len(size)), wraps])
    own = np.flatnonzero((wider.row >= 0) & wider.planned)
    counted = np.isin(row, own)
    load = load_curve(begin[counted], end[counted], size[row[counted]], num_epochs)
    most, kept = int(load.max(initial=0)), wider.row >= 0
    others = np.flatnonzero(wider.row < 0)  # none of which lives on from one iteration to the next
    for other in others[np.argsort(-size[others], kind="stable")].tolist():
        lives = load[begin[other] : end[other]]
        if lives.max(initial=0) + size[other] <= most:
            lives += size[other]
            kept[other] = True
    return np.flatnonzero(kept)
