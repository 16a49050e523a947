"""The naive validator: judges every plan, whoever made it, and names what is wrong with it.

Contract: shares nothing with the planner but the record it reads; no cleverness beyond keeping what is live sorted by
address. A plan that it accepts is safe to follow: no two requests that are live together share a byte.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from stalloc.planner.record import Plan


@dataclass(frozen=True)
class Verdict:
    """What the validator says of a plan."""

    ok: bool
    reason: str = ""  #: one of REASONS; empty if the plan is valid
    detail: str = ""  #: one sentence with rows, bytes and events


#: every reason a plan can be refused for
REASONS = (
    "trace-mismatch",  # the rows are not those of the trace
    "bad-tape",  # the tape is no prologue and ring, or the rows do not follow it
    "negative-offset",  # below the arena
    "misaligned",  # an offset is no multiple of the alignment
    "bad-constraint",  # a table of constraints or hand-overs names what is not there
    "moved",  # a request that was placed beforehand is elsewhere
    "forbidden",  # a request uses bytes that it must not
    "beyond-peak",  # a request ends above the stated peak
    "overlap",  # two requests that are live together share bytes
    "shared-by-streams",  # requests of two streams share bytes in a plan that is to be followed
    "bad-handover",  # a planned hand-over joins two tape entries that cannot follow each other in one place
    "wrong-lower-bound",  # the stated bound is not the maximum load
    "wrong-proven-bound",  # what is said to be proven contradicts the plan
)


class Lifespans(Protocol):
    """What the validator reads of a trace: columns of n event indices and bytes."""

    @property
    def start(self) -> Any: ...
    @property
    def end(self) -> Any: ...
    @property
    def size(self) -> Any: ...


class _Use(NamedTuple):
    """One stay of a request in the arena: bytes [low, high) during events [start, end)."""

    start: int
    end: int
    low: int
    high: int
    row: int


def validate(plan: Plan, trace: Lifespans | None = None, *, handovers: bool = False) -> Verdict:
    """Judge a plan by itself and, if `trace` is given, as a plan of that trace.

    With `handovers`, streams may share bytes where the plan lists a hand-over: for those who will secure each of them
    with an event and a wait. Without, they may not.

    A "program" plan is judged twice: its rows as a recording, its tape as prologue, first pass and second pass of the
    ring, all later passes being like the second.
    """
    if trace is not None and (wrong := _unlike(plan, trace)):
        return Verdict(False, "trace-mismatch", wrong)
    checks: list[Callable[[Plan], Verdict]] = [
        _constraints,
        lambda plan: _judge(plan, _uses_of_rows(plan), "request", bound=plan.kind != "program"),
    ]
    if plan.kind == "program":
        checks = [
            _tape_form,
            lambda plan: _judge(plan, _uses_of_tape(plan), "tape entry", bound=True),
            _handovers if handovers else _streams,
            *checks,
        ]
    for check in (*checks, _proven):
        verdict = check(plan)
        if not verdict.ok:
            return verdict
    return Verdict(True)


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
    for low, high in zip(plan.forbidden_low.tolist(), plan.forbidden_high.tolist(), strict=True):
        for use in _uses_of_rows(plan):
            if use.start < use.end and max(use.low, low) < min(use.high, high):
                return Verdict(
                    False, "forbidden", f"request {use.row} uses bytes [{use.low}, {use.high}) of [{low}, {high})"
                )
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


def _uses_of_rows(plan: Plan) -> list[_Use]:
    columns = (plan.start, plan.end, plan.offset, plan.size)
    return [
        _Use(start, end, offset, offset + size, row)
        for row, (start, end, offset, size) in enumerate(zip(*(column.tolist() for column in columns), strict=True))
        if offset != -1
    ]


def _uses_of_tape(plan: Plan) -> list[_Use]:
    """The tape unrolled over prologue and two passes."""
    period = plan.ring_end - plan.ring_start
    horizon = plan.ring_end + period
    uses = []
    columns = (plan.tape_start, plan.tape_end, plan.tape_offset, plan.tape_size)
    for row, (start, end, offset, size) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if offset == -1:
            continue
        uses.append(_Use(start, end, offset, offset + size, row))
        if row >= plan.num_prologue:
            uses.append(_Use(start + period, min(end + period, horizon), offset, offset + size, row))
    return uses


def _tape_form(plan: Plan) -> Verdict:
    """Whether the tape is a prologue and a ring, and the rows that it names live where it says."""
    period = plan.ring_end - plan.ring_start
    if period <= 0:
        return Verdict(False, "bad-tape", f"the ring [{plan.ring_start}, {plan.ring_end}) is empty")
    times = zip(plan.tape_start.tolist(), plan.tape_end.tolist(), strict=True)
    for row, (start, end) in enumerate(times):
        if row < plan.num_prologue:
            good = start < plan.ring_start and start <= end and (end <= plan.ring_end or end == plan.ring_end + period)
        else:
            good = plan.ring_start <= start < plan.ring_end and start <= end <= start + period
        if not good:
            part = "prologue" if row < plan.num_prologue else "ring"
            return Verdict(
                False, "bad-tape", f"tape entry {row} is live [{start}, {end}), which the {part} cannot hold"
            )
    for entry, row in enumerate(plan.tape_row.tolist()):
        if not 0 <= row < len(plan.size):
            return Verdict(False, "bad-tape", f"tape entry {entry} stands for request {row}, of {len(plan.size)}")
        if plan.offset[row] != plan.tape_offset[entry]:
            return Verdict(
                False,
                "bad-tape",
                f"request {row} is at {plan.offset[row]}, its tape entry {entry} at {plan.tape_offset[entry]}",
            )
    return Verdict(True)


def _judge(plan: Plan, uses: list[_Use], what: str, *, bound: bool) -> Verdict:
    """Each use by itself, then all together, then the stated bound against the load."""
    for use in uses:
        if use.low < 0:
            return Verdict(False, "negative-offset", f"{what} {use.row} is at offset {use.low}")
        if use.low % plan.alignment:
            return Verdict(False, "misaligned", f"{what} {use.row} is at {use.low}, no multiple of {plan.alignment}")
        if use.high > plan.peak_bytes and use.low < use.high and use.start < use.end:
            return Verdict(
                False, "beyond-peak", f"{what} {use.row} ends at byte {use.high}, above the peak of {plan.peak_bytes}"
            )
    lived = [use for use in uses if use.low < use.high and use.start < use.end]
    pair = _first_overlap(lived)
    if pair is not None:
        one, two = sorted(pair, key=lambda use: use.row)
        both = "requests" if what == "request" else "tape entries"
        low, high = max(one.low, two.low), min(one.high, two.high)
        start, end = max(one.start, two.start), min(one.end, two.end)
        return Verdict(
            False,
            "overlap",
            f"{both} {one.row} and {two.row} share bytes [{low}, {high}) during events [{start}, {end})",
        )
    load = _maximum_load(lived, plan.alignment)
    if bound and load != plan.lower_bound_bytes:
        return Verdict(
            False, "wrong-lower-bound", f"the plan states {plan.lower_bound_bytes}, the maximum load is {load}"
        )
    return Verdict(True)


def _in_time(uses: Iterable[_Use]) -> list[tuple[int, bool, _Use]]:
    """Ends and starts in order of time, ends first: lifespans are half open."""
    ends = [(use.end, False, use) for use in uses]
    return sorted(ends + [(use.start, True, use) for _, _, use in ends], key=lambda change: change[:2])


def _first_overlap(uses: list[_Use]) -> tuple[_Use, _Use] | None:
    """Two uses that are live together and share bytes; None if there are none.

    What is live is kept sorted by address. As long as no two overlap, a newcomer can only clash with its neighbours.
    """
    live: list[tuple[int, int, _Use]] = []
    for _, begins, use in _in_time(uses):
        key = (use.low, use.high, use)
        at = bisect_left(live, key)
        if not begins:
            live.pop(at)
            continue
        for neighbour in live[max(at - 1, 0) : at + 1]:
            if neighbour[0] < use.high and use.low < neighbour[1]:
                return neighbour[2], use
        insort(live, key)
    return None


def _maximum_load(uses: list[_Use], alignment: int) -> int:
    load = highest = 0
    for _, begins, use in _in_time(uses):
        rounded = -(-(use.high - use.low) // alignment) * alignment
        load += rounded if begins else -rounded
        highest = max(highest, load)
    return highest


def _streams(plan: Plan) -> Verdict:
    """Whether two streams have bytes in common, at whatever time."""
    columns = (plan.tape_offset, plan.tape_size, plan.tape_stream)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    spaces = sorted((low, low + size, stream, row) for row, (low, size, stream) in enumerate(rows) if low >= 0 < size)
    reach: dict[int, tuple[int, int]] = {}  # stream: the furthest byte so far and the entry that reaches it
    for low, high, stream, row in spaces:
        for other, (furthest, other_row) in reach.items():
            if other != stream and furthest > low:
                return Verdict(
                    False,
                    "shared-by-streams",
                    f"tape entries {other_row} and {row} of streams {other} and {stream} share bytes from {low}",
                )
        if high > reach.get(stream, (0, 0))[0]:
            reach[stream] = (high, row)
    return Verdict(True)


def _handovers(plan: Plan) -> Verdict:
    """Whether every byte that passes from one stream to another does so by a listed hand-over, and no other is listed.

    Looks at who used each byte last, over prologue and two passes; what follows is like the second.
    """
    count = len(plan.tape_size)
    listed = set(zip(plan.handover_earlier.tolist(), plan.handover_later.tolist(), strict=True))
    if any(not (0 <= one < count and 0 <= two < count) for one, two in listed):
        return Verdict(False, "bad-handover", f"a hand-over names a tape entry that is none of {count}")
    stream = plan.tape_stream.tolist()
    seen: set[tuple[int, int]] = set()
    last: list[tuple[int, int, int]] = []  # bytes [low, high) and the entry that used them last
    uses = [use for use in _uses_of_tape(plan) if use.low < use.high and use.start < use.end]
    for use in sorted(uses, key=lambda use: use.start):
        kept = [(use.low, use.high, use.row)]
        for low, high, row in last:
            if max(low, use.low) >= min(high, use.high):
                kept.append((low, high, row))
                continue
            if stream[row] != stream[use.row]:
                seen.add((row, use.row))
            kept += [piece for piece in ((low, use.low, row), (use.high, high, row)) if piece[0] < piece[1]]
        last = kept
    for one, two in sorted(seen ^ listed):
        if (one, two) in seen:
            return Verdict(
                False,
                "shared-by-streams",
                f"tape entry {two} of stream {stream[two]} takes bytes of entry {one} of stream {stream[one]} "
                f"without a hand-over",
            )
        return Verdict(False, "bad-handover", f"tape entry {two} takes over no bytes of entry {one}")
    return Verdict(True)
