"""The naive validator: judges every plan, whoever made it, and names what is wrong with it.

Contract: shares nothing with the planner but the record it reads, and does nothing clever beyond keeping what is live
sorted by address. A plan that it accepts is safe to follow: every entry, however short its lifespan, lies inside the
arena, and no two requests that are live together share a byte. It takes time in proportion to the plan, whoever wrote
it.

Plans of several kinds of steps may follow one another in any order, in one arena. The cycle of each is one step; its
prologue is what earlier steps carry over to it: one place after the other, the same for all kinds, each kept free until
the end of that entry. What a step carries over is ranked by size, stream by stream, the largest first; what is of rank
i lies in the i-th place of its stream. Where kinds have two plans, which their steps alternate between, there are as
many places again, for what the plans of the second buffer carry over; one of no bytes stands for that of the first.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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


def walk(uses: Uses, alignment: int) -> tuple[tuple[int, int] | None, int]:
    """Begin and end each of `uses`, all of some bytes and some time: those that end at an event before its begins.

    Two that are live together and share bytes, by their place in the columns, and the most that is live at once until
    then, sizes rounded up to the alignment.
    """
    if not len(uses.row):
        return None, 0
    numbers = np.arange(len(uses.row))
    changes = np.concatenate([~numbers, numbers])[np.argsort(np.concatenate([uses.end, uses.start]), kind="stable")]
    one, two, load_bytes = _walk(changes, uses.low, uses.high, np.int64(alignment), np.empty_like(numbers))
    return (int(one), int(two)) if one >= 0 else None, int(load_bytes)


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


class _Wrong(Exception):
    """What is wrong with a plan: a reason and one sentence."""


def validate(plan: Plan, trace: Any = None, *, handovers: bool = False) -> Verdict:
    """Judge a plan by itself and, if `trace` is given, as a plan of that trace: columns start, end and size of (n,).

    With `handovers`, streams may share bytes where the plan lists a handover: for those who will secure each of them
    with an event and a wait. Without, they may not.

    A "program" plan is judged twice: its rows as a recording, its schedule as prologue, first iteration and second
    iteration of the cycle, all later iterations being like the second.
    """
    is_program = plan.kind == "program"
    try:
        if trace is not None:
            _like_trace(plan, trace)
        if is_program:
            names = "schedule_start", "schedule_end", "schedule_offset", "schedule_size", "schedule_stream"
            _in_range(plan, "schedule entry", tuple(getattr(plan, name) for name in names))
            _schedule_form(plan)
            _judge(plan, uses_of_schedule(plan), "schedule entry", bound=True)
            if handovers:
                _check_handovers(plan)
            else:
                _check_streams(plan)
        # whether the rows are the schedule itself: what a recording has is in the first iteration
        names = "start", "end", "offset", "size", "stream"
        same = is_program and all(getattr(plan, name) is getattr(plan, f"schedule_{name}") for name in names)
        if not same:
            _in_range(plan, "request", tuple(getattr(plan, name) for name in names))
        _constraints(plan)
        if not same:
            _judge(plan, uses_of_rows(plan), "request", bound=not is_program)
        _proven(plan)
    except _Wrong as wrong:
        return Verdict(False, *wrong.args)
    return Verdict(True)


def _in_range(plan: Plan, what: str, columns: tuple[Any, ...]) -> None:
    """Each entry by itself, planned or not and however short its lifespan: what builds an arena goes by all of them."""
    if plan.alignment < 1 or plan.alignment & (plan.alignment - 1):
        raise _Wrong("bad-constraint", f"the alignment is {plan.alignment}, no power of two")
    for row in _doubtful(plan, columns):
        start, end, offset, size, stream = (int(column[row]) for column in columns)
        if not 0 <= size <= _MAX_BYTES:
            raise _Wrong("bad-size", f"{what} {row} has {size} bytes")
        if end < start:
            raise _Wrong("bad-lifespan", f"{what} {row} is live [{start}, {end})")
        if not 0 <= stream < _MAX_STREAMS:
            raise _Wrong("bad-stream", f"{what} {row} is of stream {stream}")
        if offset == -1:
            continue
        if offset < 0:
            raise _Wrong("negative-offset", f"{what} {row} is at offset {offset}")
        if offset % plan.alignment:
            raise _Wrong("misaligned", f"{what} {row} is at {offset}, no multiple of {plan.alignment}")
        end_byte = offset + -(-size // plan.alignment) * plan.alignment
        if end_byte > min(plan.peak_bytes, _MAX_BYTES):
            raise _Wrong("beyond-peak", f"{what} {row} ends at byte {end_byte}, above the peak of {plan.peak_bytes}")


def _doubtful(plan: Plan, columns: tuple[Any, ...]) -> list[int]:
    """The entries that are not surely right, to be looked at one by one: all if sums could be too large for words."""
    start, end, offset, size, stream = columns
    if plan.alignment > _MAX_BYTES or not 0 <= plan.peak_bytes <= _MAX_BYTES:
        return [*range(len(size))]
    good = (size >= 0) & (size <= _MAX_BYTES) & (end >= start) & (stream >= 0) & (stream < _MAX_STREAMS)
    rounded = (np.minimum(size, _MAX_BYTES) + (plan.alignment - 1)) & -plan.alignment
    inside = (offset >= 0) & (offset & (plan.alignment - 1) == 0) & (offset <= plan.peak_bytes - rounded)
    return np.flatnonzero(~(good & (inside | (offset == -1)))).tolist()


def _constraints(plan: Plan) -> None:
    """What was asked for beside the lifespans: alignments, places and forbidden ranges."""
    for row, (offset, alignment) in enumerate(zip(plan.offset.tolist(), plan.row_alignment.tolist(), strict=False)):
        if alignment < 1 or alignment & (alignment - 1):
            raise _Wrong("bad-constraint", f"the alignment of request {row} is {alignment}, no power of two")
        if offset != -1 and offset % alignment:
            raise _Wrong("misaligned", f"request {row} is at {offset}, no multiple of its {alignment}")
    for row, place in zip(plan.fixed_row.tolist(), plan.fixed_offset.tolist(), strict=True):
        if not 0 <= row < len(plan.size):
            raise _Wrong("bad-constraint", f"request {row} is fixed, of {len(plan.size)}")
        if plan.offset[row] != place:
            raise _Wrong("moved", f"request {row} is at {plan.offset[row]}, it was placed at {place}")
    _forbidden(plan)


def _forbidden(plan: Plan) -> None:
    if not len(plan.forbidden_low):
        return
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
            raise _Wrong("forbidden", detail)
        furthest[row < 0] = max(furthest[row < 0], (low, high, row), key=lambda space: space[1])


def _proven(plan: Plan) -> None:
    """Whether the claims about the peak agree with each other; whether a proof is right cannot be seen from here."""
    proven = plan.proven_bound_bytes
    if proven and not plan.lower_bound_bytes <= proven <= plan.peak_bytes:
        raise _Wrong(
            "wrong-proven-bound",
            f"{proven} bytes are said to be needed, the load needs {plan.lower_bound_bytes} and the plan "
            f"{plan.peak_bytes}",
        )
    if proven and plan.optimal and plan.peak_bytes != proven:
        detail = f"the peak of {plan.peak_bytes} is said to be optimal, {proven} is proven"
        raise _Wrong("wrong-proven-bound", detail)


def _like_trace(plan: Plan, trace: Any) -> None:
    if len(plan.size) != len(trace.size):
        raise _Wrong("trace-mismatch", f"the plan has {len(plan.size)} requests, the trace {len(trace.size)}")
    for name in ("size", "start", "end"):
        ours, theirs = np.asarray(getattr(plan, name)), np.asarray(getattr(trace, name))
        for row in np.flatnonzero(ours != theirs).tolist():
            detail = f"the {name} of request {row} is {ours[row]} in the plan and {theirs[row]} in the trace"
            raise _Wrong("trace-mismatch", detail)


def _schedule_form(plan: Plan) -> None:
    """Whether the schedule is a prologue and a cycle, and the rows that it names live where it says."""
    period, length = plan.cycle_end - plan.cycle_start, len(plan.schedule_size)
    if period <= 0:
        raise _Wrong("bad-schedule", f"the cycle [{plan.cycle_start}, {plan.cycle_end}) is empty")
    if plan.num_prologue >= length:
        raise _Wrong("bad-schedule", f"the prologue has {plan.num_prologue} of {length} entries, the cycle none")
    if not -_MAX_TIME <= plan.cycle_start < plan.cycle_end <= _MAX_TIME:
        detail = f"the cycle [{plan.cycle_start}, {plan.cycle_end}) is of times no schedule reaches"
        raise _Wrong("bad-schedule", detail)
    start, end = plan.schedule_start, plan.schedule_end
    once = (start < plan.cycle_start) & (start <= end) & ((end <= plan.cycle_end) | (end == plan.cycle_end + period))
    again = (plan.cycle_start <= start) & (start < plan.cycle_end) & (start <= end) & (end - period <= start)
    in_prologue = np.arange(length) < plan.num_prologue
    for row in np.flatnonzero(~np.where(in_prologue, once, again)).tolist():
        part = "prologue" if row < plan.num_prologue else "cycle"
        detail = f"schedule entry {row} is live [{start[row]}, {end[row]}), which the {part} cannot hold"
        raise _Wrong("bad-schedule", detail)
    _schedule_rows(plan, in_prologue)


def _schedule_rows(plan: Plan, in_prologue: NDArray[np.bool_]) -> None:
    """Whether each entry, but those of the cycle that come after the end of the recording, is where its row is."""
    row, count = plan.schedule_row, len(plan.size)
    known = (row >= 0) & (row < count)
    for entry in np.flatnonzero(~known & ~((row == -1) & ~in_prologue)).tolist():
        raise _Wrong("bad-schedule", f"schedule entry {entry} stands for request {row[entry]}, of {count}")
    entries = np.flatnonzero(known)
    for entry in entries[plan.offset[row[entries]] != plan.schedule_offset[entries]].tolist():
        detail = f"request {row[entry]} is at {plan.offset[row[entry]]}, its schedule entry {entry} at "
        raise _Wrong("bad-schedule", f"{detail}{plan.schedule_offset[entry]}")


def _judge(plan: Plan, uses: Uses, what: str, *, bound: bool) -> None:
    """All uses together, then the stated bound against the load."""
    uses = uses.lasting()
    pair, load_bytes = walk(uses, plan.alignment)
    if pair is not None:
        one, two = sorted(pair, key=lambda number: int(uses.row[number]))
        both = "requests" if what == "request" else "schedule entries"
        low, high = max(uses.low[one], uses.low[two]), min(uses.high[one], uses.high[two])
        start, end = max(uses.start[one], uses.start[two]), min(uses.end[one], uses.end[two])
        raise _Wrong(
            "overlap",
            f"{both} {uses.row[one]} and {uses.row[two]} share bytes [{low}, {high}) during events [{start}, {end})",
        )
    if bound and load_bytes != plan.lower_bound_bytes:
        raise _Wrong("wrong-lower-bound", f"the plan states {plan.lower_bound_bytes}, the maximum load is {load_bytes}")


def _check_streams(*plans: Plan) -> None:
    """Whether two streams have bytes in common, at whatever time, in plans of one arena."""
    columns = [
        (plan.schedule_offset.tolist(), plan.schedule_size.tolist(), plan.schedule_stream.tolist()) for plan in plans
    ]
    if len({stream for _, _, streams in columns for stream in streams}) == 1:
        return
    rows = [(row, *entry) for entries in columns for row, entry in enumerate(zip(*entries, strict=True))]
    spaces = sorted((low, low + size, stream, row) for row, low, size, stream in rows if low >= 0 < size)
    furthest, reacher, owner = 0, -1, -1  # the furthest byte so far, the entry that reaches it and its stream
    for low, high, stream, row in spaces:
        if furthest > low and owner != stream:
            raise _Wrong(
                "shared-by-streams",
                f"schedule entries {reacher} and {row} of streams {owner} and {stream} share bytes from {low}",
            )
        if high > furthest:
            furthest, reacher, owner = high, row, stream


def _check_handovers(plan: Plan) -> None:
    """Whether every byte that passes from one stream to another does so by a listed handover, and no other is listed.

    Looks at who used each byte last, over prologue and two iterations; what follows is like the second.
    """
    count = len(plan.schedule_size)
    listed = set(zip(plan.handover_earlier.tolist(), plan.handover_later.tolist(), strict=True))
    if any(not (0 <= one < count and 0 <= two < count) for one, two in listed):
        raise _Wrong("bad-handover", f"a handover names a schedule entry that is none of {count}")
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
            raise _Wrong(
                "shared-by-streams",
                f"schedule entry {two} of stream {stream[two]} takes bytes of entry {one} of stream {stream[one]} "
                f"without a handover",
            )
        raise _Wrong("bad-handover", f"schedule entry {two} takes over no bytes of entry {one}")


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
    try:
        for index, plan in enumerate(plans):
            if _places(plan) != places or plan.peak_bytes != plans[0].peak_bytes:
                raise _Wrong("bad-handed-on", f"kinds 0 and {index} differ in the places kept, or in the peak")
            row = _misplaced(plan, places, index * num_buffers // len(plans), num_buffers)
            if row is not None:
                detail = f"kind {index}: schedule entry {row} outlives its step in no kept place"
                raise _Wrong("bad-handed-on", detail)
        _check_streams(*plans)
    except _Wrong as wrong:
        return Verdict(False, *wrong.args)
    return Verdict(True)


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
