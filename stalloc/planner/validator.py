"""The naive validator: judges every plan, whoever made it, and names what is wrong with it.

Contract: shares nothing with the planner but the record it reads, and does nothing clever. A plan that it accepts is
safe to follow: every entry, however short its lifespan, lies inside the arena, and no two requests that are live
together share a byte. It takes time in proportion to the plan, whoever wrote it.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stalloc.planner.overlaps import walk
from stalloc.planner.plan_record import Plan
from stalloc.planner.stream_check import check_handovers, check_streams
from stalloc.planner.verdict import Uses, Verdict, uses_of_rows, uses_of_schedule

_MAX_BYTES = 1 << 61  # of a request or an arena: sums of two stay below 2**62
_MAX_STREAMS = 1 << 16
_MAX_TIME = 1 << 61  # of a cycle's begin and end


class Lifespans(Protocol):
    """What the validator reads of a trace: columns of n event indices and bytes."""

    @property
    def start(self) -> Any: ...
    @property
    def end(self) -> Any: ...
    @property
    def size(self) -> Any: ...


def validate(plan: Plan, trace: Lifespans | None = None, *, handovers: bool = False) -> Verdict:
    """Judge a plan by itself and, if `trace` is given, as a plan of that trace.

    With `handovers`, streams may share bytes where the plan lists a handover: for those who will secure each of them
    with an event and a wait. Without, they may not.

    A "program" plan is judged twice: its rows as a recording, its schedule as prologue, first iteration and second
    iteration of the cycle, all later iterations being like the second.
    """
    if trace is not None and (wrong := _unlike(plan, trace)):
        return Verdict(False, "trace-mismatch", wrong)
    checks: list[Callable[[Plan], Verdict]] = []
    if plan.kind == "program":
        checks = [
            _schedule_in_range,
            _schedule_form,
            lambda plan: _judge(plan, uses_of_schedule(plan), "schedule entry", bound=True),
            check_handovers if handovers else check_streams,
        ]
    if _rows_are_schedule(plan):
        checks += [_constraints]
    else:
        checks += [
            _rows_in_range,
            _constraints,
            lambda plan: _judge(plan, uses_of_rows(plan), "request", bound=plan.kind != "program"),
        ]
    for check in (*checks, _proven):
        verdict = check(plan)
        if not verdict.ok:
            return verdict
    return Verdict(True)


def _rows_are_schedule(plan: Plan) -> bool:
    """Whether the rows of a "program" plan are its schedule itself: what a recording has, is in the first iteration."""
    names = "offset", "size", "start", "end", "stream"
    return plan.kind == "program" and all(getattr(plan, name) is getattr(plan, f"schedule_{name}") for name in names)


def _rows_in_range(plan: Plan) -> Verdict:
    return _in_range(plan, "request", (plan.start, plan.end, plan.offset, plan.size, plan.stream))


def _schedule_in_range(plan: Plan) -> Verdict:
    columns = plan.schedule_start, plan.schedule_end, plan.schedule_offset, plan.schedule_size, plan.schedule_stream
    return _in_range(plan, "schedule entry", columns)


def _in_range(plan: Plan, what: str, columns: tuple[Any, ...]) -> Verdict:
    """Each entry by itself, planned or not and however short its lifespan: what builds an arena goes by all of them."""
    if plan.alignment < 1 or plan.alignment & (plan.alignment - 1):
        return Verdict(False, "bad-constraint", f"the alignment is {plan.alignment}, no power of two")
    for row in _doubtful(plan, columns):
        start, end, offset, size, stream = (int(column[row]) for column in columns)
        if not 0 <= size <= _MAX_BYTES:
            return Verdict(False, "bad-size", f"{what} {row} has {size} bytes")
        if end < start:
            return Verdict(False, "bad-lifespan", f"{what} {row} is live [{start}, {end})")
        if not 0 <= stream < _MAX_STREAMS:
            return Verdict(False, "bad-stream", f"{what} {row} is of stream {stream}")
        if offset == -1:
            continue
        if offset < 0:
            return Verdict(False, "negative-offset", f"{what} {row} is at offset {offset}")
        if offset % plan.alignment:
            return Verdict(False, "misaligned", f"{what} {row} is at {offset}, no multiple of {plan.alignment}")
        end_byte = offset + -(-size // plan.alignment) * plan.alignment
        if end_byte > min(plan.peak_bytes, _MAX_BYTES):
            return Verdict(
                False, "beyond-peak", f"{what} {row} ends at byte {end_byte}, above the peak of {plan.peak_bytes}"
            )
    return Verdict(True)


def _doubtful(plan: Plan, columns: tuple[Any, ...]) -> list[int]:
    """The entries that are not surely right, to be looked at one by one: all if sums could be too large for words."""
    start, end, offset, size, stream = columns
    if plan.alignment > _MAX_BYTES or not 0 <= plan.peak_bytes <= _MAX_BYTES:
        return [*range(len(size))]
    good = (size >= 0) & (size <= _MAX_BYTES) & (end >= start) & (stream >= 0) & (stream < _MAX_STREAMS)
    rounded = (np.minimum(size, _MAX_BYTES) + (plan.alignment - 1)) & -plan.alignment
    inside = (offset >= 0) & (offset & (plan.alignment - 1) == 0) & (offset <= plan.peak_bytes - rounded)
    return np.flatnonzero(~(good & (inside | (offset == -1)))).tolist()


def _constraints(plan: Plan) -> Verdict:
    """What was asked for beside the lifespans: alignments, places and forbidden ranges."""
    for row, (offset, alignment) in enumerate(zip(plan.offset.tolist(), plan.row_alignment.tolist(), strict=False)):
        if alignment < 1 or alignment & (alignment - 1):
            return Verdict(False, "bad-constraint", f"the alignment of request {row} is {alignment}, no power of two")
        if offset != -1 and offset % alignment:
            return Verdict(False, "misaligned", f"request {row} is at {offset}, no multiple of its {alignment}")
    for row, place in zip(plan.fixed_row.tolist(), plan.fixed_offset.tolist(), strict=True):
        if not 0 <= row < len(plan.size):
            return Verdict(False, "bad-constraint", f"request {row} is fixed, of {len(plan.size)}")
        if plan.offset[row] != place:
            return Verdict(False, "moved", f"request {row} is at {plan.offset[row]}, it was placed at {place}")
    return _forbidden(plan)


def _forbidden(plan: Plan) -> Verdict:
    """Whether any request uses bytes that it must not."""
    if not len(plan.forbidden_low):
        return Verdict(True)
    ranges = zip(plan.forbidden_low.tolist(), plan.forbidden_high.tolist(), strict=True)
    uses = uses_of_rows(plan).lasting().tuples()
    used = ((low, high, row) for _, _, low, high, row in uses)
    spaces = sorted([*((low, high, -1) for low, high in ranges if low < high), *used])
    furthest = {True: (0, 0, 0), False: (0, 0, 0)}  # of the forbidden ranges and of the requests so far: by its end
    for low, high, row in spaces:
        other_low, other_high, other_row = furthest[row >= 0]
        if other_high > low:
            banned, taken, user = (other_low, other_high), (low, high), row
            if row < 0:
                banned, taken, user = taken, banned, other_row
            detail = f"request {user} uses bytes [{taken[0]}, {taken[1]}) of [{banned[0]}, {banned[1]})"
            return Verdict(False, "forbidden", detail)
        furthest[row < 0] = max(furthest[row < 0], (low, high, row), key=lambda space: space[1])
    return Verdict(True)


def _proven(plan: Plan) -> Verdict:
    """Whether the claims about the peak agree with each other; whether a proof is right cannot be seen from here."""
    proven = plan.proven_bound_bytes
    if proven and not plan.lower_bound_bytes <= proven <= plan.peak_bytes:
        return Verdict(
            False,
            "wrong-proven-bound",
            f"{proven} bytes are said to be needed, the load needs {plan.lower_bound_bytes} and the plan "
            f"{plan.peak_bytes}",
        )
    if proven and plan.optimal and plan.peak_bytes != proven:
        return Verdict(
            False, "wrong-proven-bound", f"the peak of {plan.peak_bytes} is said to be optimal, {proven} is proven"
        )
    return Verdict(True)


def _unlike(plan: Plan, trace: Lifespans) -> str:
    """How the plan's rows differ from the trace's; empty if they do not."""
    if len(plan.size) != len(trace.size):
        return f"the plan has {len(plan.size)} requests, the trace {len(trace.size)}"
    for name in ("size", "start", "end"):
        ours, theirs = getattr(plan, name).tolist(), getattr(trace, name).tolist()
        for row, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine != other:
                return f"the {name} of request {row} is {mine} in the plan and {other} in the trace"
    return ""


def _schedule_form(plan: Plan) -> Verdict:
    """Whether the schedule is a prologue and a cycle, and the rows that it names live where it says."""
    period, length = plan.cycle_end - plan.cycle_start, len(plan.schedule_size)
    if period <= 0:
        return Verdict(False, "bad-schedule", f"the cycle [{plan.cycle_start}, {plan.cycle_end}) is empty")
    if plan.num_prologue >= length:
        return Verdict(
            False, "bad-schedule", f"the prologue has {plan.num_prologue} of {length} entries, the cycle none"
        )
    if not -_MAX_TIME <= plan.cycle_start < plan.cycle_end <= _MAX_TIME:
        return Verdict(
            False, "bad-schedule", f"the cycle [{plan.cycle_start}, {plan.cycle_end}) is of times no schedule reaches"
        )
    start, end = plan.schedule_start, plan.schedule_end
    once = (start < plan.cycle_start) & (start <= end) & ((end <= plan.cycle_end) | (end == plan.cycle_end + period))
    again = (plan.cycle_start <= start) & (start < plan.cycle_end) & (start <= end) & (end - period <= start)
    in_prologue = np.arange(length) < plan.num_prologue
    for row in np.flatnonzero(~np.where(in_prologue, once, again)).tolist():
        part = "prologue" if row < plan.num_prologue else "cycle"
        detail = f"schedule entry {row} is live [{start[row]}, {end[row]}), which the {part} cannot hold"
        return Verdict(False, "bad-schedule", detail)
    return _schedule_rows(plan, in_prologue)


def _schedule_rows(plan: Plan, in_prologue: NDArray[np.bool_]) -> Verdict:
    """Whether each entry, but those of the cycle that come after the end of the recording, is where its row is."""
    row, count = plan.schedule_row, len(plan.size)
    known = (row >= 0) & (row < count)
    for entry in np.flatnonzero(~known & ~((row == -1) & ~in_prologue)).tolist():
        return Verdict(False, "bad-schedule", f"schedule entry {entry} stands for request {row[entry]}, of {count}")
    entries = np.flatnonzero(known)
    for entry in entries[plan.offset[row[entries]] != plan.schedule_offset[entries]].tolist():
        detail = f"request {row[entry]} is at {plan.offset[row[entry]]}, its schedule entry {entry} at "
        return Verdict(False, "bad-schedule", f"{detail}{plan.schedule_offset[entry]}")
    return Verdict(True)


def _judge(plan: Plan, uses: Uses, what: str, *, bound: bool) -> Verdict:
    """All uses together, then the stated bound against the load."""
    uses = uses.lasting()
    seen = walk(uses, plan.alignment)
    if seen.pair is not None:
        one, two = sorted(seen.pair, key=lambda number: int(uses.row[number]))
        both = "requests" if what == "request" else "schedule entries"
        low, high = max(uses.low[one], uses.low[two]), min(uses.high[one], uses.high[two])
        start, end = max(uses.start[one], uses.start[two]), min(uses.end[one], uses.end[two])
        return Verdict(
            False,
            "overlap",
            f"{both} {uses.row[one]} and {uses.row[two]} share bytes [{low}, {high}) during events [{start}, {end})",
        )
    if bound and seen.load_bytes != plan.lower_bound_bytes:
        return Verdict(
            False,
            "wrong-lower-bound",
            f"the plan states {plan.lower_bound_bytes}, the maximum load is {seen.load_bytes}",
        )
    return Verdict(True)
