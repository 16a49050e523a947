"""The naive validator: judges every plan, whoever made it, and names what is wrong with it.

Contract: shares nothing with the planner but the record it reads, and does nothing clever. A plan that it accepts is
safe to follow: every entry, however short its lifespan, lies inside the arena, and no two requests that are live
together share a byte. It takes time in proportion to the plan, whoever wrote it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column
from stalloc.compiled import BORROWING, njit
from stalloc.planner.plan_record import Plan


@dataclass(frozen=True)
class Verdict:
    """What the validator says of a plan."""

    ok: bool
    reason: str = ""  #: one of REASONS; empty if the plan is valid
    detail: str = ""  #: one sentence with rows, bytes and events


#: every reason a plan can be refused for
REASONS = (
    "trace-mismatch",  # the rows are not those of the trace
    "bad-size",  # a size is negative or more than any address space holds
    "bad-lifespan",  # a request ends before it starts
    "bad-stream",  # a stream has a negative index, or one that no program reaches
    "bad-schedule",  # the schedule is no prologue and cycle, or the rows do not follow it
    "negative-offset",  # below the arena
    "misaligned",  # an offset is no multiple of the alignment
    "bad-constraint",  # a table of constraints or handovers names what is not there
    "moved",  # a request that was placed beforehand is elsewhere
    "forbidden",  # a request uses bytes that it must not
    "beyond-peak",  # a request, its size rounded up, ends above the stated peak
    "overlap",  # two requests that are live together share bytes
    "shared-by-streams",  # requests of two streams share bytes in a plan that is to be followed
    "bad-handover",  # a planned handover joins two schedule entries that cannot follow each other in one place
    "bad-handed-on",  # what one kind of step leaves to the next is not where all kinds keep a place free for it
    "wrong-lower-bound",  # the stated bound is not the maximum load
    "wrong-proven-bound",  # what is said to be proven contradicts the plan
)


class Uses(NamedTuple):
    """The stays of requests in the arena, in columns of m: bytes [low, high) during events [start, end)."""

    start: Column
    end: Column
    low: Column
    high: Column
    row: Column

    def lasting(self) -> "Uses":
        """The uses that are not empty: at least one byte during at least one event."""
        return self._of((self.low < self.high) & (self.start < self.end))

    def by_start(self) -> "Uses":
        """The uses in the order in which they begin."""
        return self._of(np.argsort(self.start, kind="stable"))

    def tuples(self) -> Iterator[tuple[int, int, int, int, int]]:
        """One after the other."""
        return zip(*(column.tolist() for column in self), strict=True)

    def _of(self, chosen: NDArray[Any]) -> "Uses":
        return Uses(*(column[chosen] for column in self))


def uses_of_rows(plan: Plan) -> Uses:
    """Every request that has a place."""
    rows = np.flatnonzero(plan.offset != -1)
    low = plan.offset[rows]
    return Uses(plan.start[rows], plan.end[rows], low, low + plan.size[rows], rows)


def uses_of_schedule(plan: Plan) -> Uses:
    """The schedule unrolled over prologue and two iterations."""
    period = plan.cycle_end - plan.cycle_start
    first = np.flatnonzero(plan.schedule_offset != -1)
    second = first[first >= plan.num_prologue]
    end = np.minimum(plan.schedule_end[second] + period, plan.cycle_end + period)
    rows = np.concatenate([first, second])
    low = plan.schedule_offset[rows]
    return Uses(
        np.concatenate([plan.schedule_start[first], plan.schedule_start[second] + period]),
        np.concatenate([plan.schedule_end[first], end]),
        low,
        low + plan.schedule_size[rows],
        rows,
    )


class Walk(NamedTuple):
    """What was met."""

    pair: tuple[int, int] | None  #: two stays, by their place in the columns, that are live together and share bytes
    load_bytes: int  #: the most that is live at once, sizes rounded up to the alignment, until then


def walk(uses: Uses, alignment: int) -> Walk:
    """Begin and end each of `uses`, all of some bytes and some time: those that end at an event before its begins."""
    if not len(uses.row):
        return Walk(None, 0)
    numbers = np.arange(len(uses.row))
    changes = np.concatenate([~numbers, numbers])[np.argsort(np.concatenate([uses.end, uses.start]), kind="stable")]
    one, two, load_bytes = _walk(changes, uses.low, uses.high, np.int64(alignment), np.empty_like(numbers))
    return Walk((int(one), int(two)) if one >= 0 else None, int(load_bytes))


@njit(nogil=True, **BORROWING)
def _walk(changes, low, high, alignment, live):
    """`walk` over changes: the number of a stay that begins, its complement where it ends.

    As long as no two overlap, a newcomer can only clash with its neighbours in `live` (m,), which is sorted by address.
    """
    num_live = 0
    load = highest = np.int64(0)
    for change in changes:
        stay = change if change >= 0 else ~change
        at, beyond = 0, num_live  # the first that lies no lower is looked for
        while at < beyond:
            middle = (at + beyond) // 2
            if low[live[middle]] < low[stay]:
                at = middle + 1
            else:
                beyond = middle
        rounded = (high[stay] - low[stay] + alignment - 1) // alignment * alignment
        if change < 0:
            num_live -= 1
            for i in range(at, num_live):
                live[i] = live[i + 1]
            load -= rounded
            continue
        if at > 0 and high[live[at - 1]] > low[stay]:
            return live[at - 1], stay, highest
        if at < num_live and low[live[at]] < high[stay]:
            return live[at], stay, highest
        for i in range(num_live, at, -1):
            live[i] = live[i - 1]
        live[at] = stay
        num_live += 1
        load += rounded
        highest = max(highest, load)
    return np.int64(-1), np.int64(-1), highest


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


def check_streams(*plans: Plan) -> Verdict:
    """Whether two streams have bytes in common, at whatever time, in plans of one arena."""
    columns = [
        (plan.schedule_offset.tolist(), plan.schedule_size.tolist(), plan.schedule_stream.tolist()) for plan in plans
    ]
    if len({stream for _, _, streams in columns for stream in streams}) == 1:
        return Verdict(True)
    rows = [(row, *entry) for entries in columns for row, entry in enumerate(zip(*entries, strict=True))]
    spaces = sorted((low, low + size, stream, row) for row, low, size, stream in rows if low >= 0 < size)
    furthest, reacher, owner = 0, -1, -1  # the furthest byte so far, the entry that reaches it and its stream
    for low, high, stream, row in spaces:
        if furthest > low and owner != stream:
            return Verdict(
                False,
                "shared-by-streams",
                f"schedule entries {reacher} and {row} of streams {owner} and {stream} share bytes from {low}",
            )
        if high > furthest:
            furthest, reacher, owner = high, row, stream
    return Verdict(True)


def check_handovers(plan: Plan) -> Verdict:
    """Whether every byte that passes from one stream to another does so by a listed handover, and no other is listed.

    Looks at who used each byte last, over prologue and two iterations; what follows is like the second.
    """
    count = len(plan.schedule_size)
    listed = set(zip(plan.handover_earlier.tolist(), plan.handover_later.tolist(), strict=True))
    if any(not (0 <= one < count and 0 <= two < count) for one, two in listed):
        return Verdict(False, "bad-handover", f"a handover names a schedule entry that is none of {count}")
    stream = plan.schedule_stream.tolist()
    seen: set[tuple[int, int]] = set()
    last: list[tuple[int, int, int]] = []  # bytes [low, high) and the entry that used them last, by address
    for _, _, low, high, user in uses_of_schedule(plan).lasting().by_start().tuples():
        first = bisect_right(last, low, key=lambda piece: piece[1])  # the first that ends above its low
        beyond = bisect_left(last, high, key=lambda piece: piece[0])  # the first that begins at its high or above
        pieces = [(low, high, user)]
        for begin, end, row in last[first:beyond]:
            if stream[row] != stream[user]:
                seen.add((row, user))
            pieces += [piece for piece in ((begin, low, row), (high, end, row)) if piece[0] < piece[1]]
        last[first:beyond] = sorted(pieces)
    for one, two in sorted(seen ^ listed):
        if (one, two) in seen:
            return Verdict(
                False,
                "shared-by-streams",
                f"schedule entry {two} of stream {stream[two]} takes bytes of entry {one} of stream {stream[one]} "
                f"without a handover",
            )
        return Verdict(False, "bad-handover", f"schedule entry {two} takes over no bytes of entry {one}")
    return Verdict(True)


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
