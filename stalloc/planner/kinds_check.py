"""Whether the plans of several kinds of steps may follow one another in any order, in one arena.

Contract: as of validator.py. The cycle of each plan is one step; its prologue is what earlier steps carry over to it:
one place after the other, the same for all kinds, each kept free until the end of that entry. What a step carries over
is ranked by size, stream by stream, the largest first; what is of rank i lies in the i-th place of its stream. Where
kinds have two plans, which their steps alternate between, there are as many places again, for what the plans of the
second buffer carry over; one of no bytes stands for that of the first.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from stalloc.planner.plan_record import Plan
from stalloc.planner.stream_check import check_streams
from stalloc.planner.validator import validate
from stalloc.planner.verdict import Verdict

_Places = dict[int, list[tuple[int, int]]]  # stream -> bytes [low, high) by rank


def validate_kinds(
    plans: Sequence[Plan], num_buffers: int = 1, *, judge: Callable[[Plan], Verdict] = validate
) -> Verdict:
    """Judge each "program" plan by itself, and all as plans of one arena whose cycles follow one another in any order.

    Those of the first buffer come first, then those of the second, if there is one. The places of the prologue are
    judged in the prologue of the plan itself, so what is placed around them in a step is safe whichever came before.
    `judge` may stand in for `validate`, if it remembers what that said of a plan.
    """
    for index, plan in enumerate(plans):
        verdict = judge(plan)
        if not verdict.ok:
            return replace(verdict, detail=f"kind {index}: {verdict.detail}")
    places = _places(plans[0])
    for index, plan in enumerate(plans):
        if _places(plan) != places or plan.peak_bytes != plans[0].peak_bytes:
            return Verdict(False, "bad-handed-on", f"kinds 0 and {index} differ in the places kept, or in the peak")
        row = _misplaced(plan, places, index * num_buffers // len(plans), num_buffers)
        if row is not None:
            return Verdict(
                False, "bad-handed-on", f"kind {index}: schedule entry {row} outlives its step in no kept place"
            )
    return check_streams(*plans)


def _places(plan: Plan) -> _Places:
    found: _Places = {}
    columns = plan.schedule_offset, plan.schedule_size, plan.schedule_stream
    for low, size, stream in zip(*(column[: plan.num_prologue].tolist() for column in columns), strict=True):
        found.setdefault(stream, []).append((low, low + size))
    return found


def _misplaced(plan: Plan, places: _Places, buffer: int, num_buffers: int) -> int | None:
    """The schedule entry that outlives its step, but not where all kinds keep a place for it; None if there is none."""
    ends, sizes = plan.schedule_end.tolist(), plan.schedule_size.tolist()
    handed = [row for row in range(plan.num_prologue, len(ends)) if ends[row] >= plan.cycle_end]
    ranks: dict[int, int] = {}
    for row in sorted(handed, key=lambda row: -sizes[row]):
        stream, low = int(plan.schedule_stream[row]), int(plan.schedule_offset[row])
        rank = ranks[stream] = ranks.get(stream, -1) + 1
        kept = places.get(stream, [])
        num_ranks = len(kept) // num_buffers
        if low < 0:
            continue
        if rank >= num_ranks:
            return row
        begin, end = kept[buffer * num_ranks + rank]
        if begin == end:
            begin, end = kept[rank]
        if not begin <= low <= low + sizes[row] <= end:
            return row
    return None
