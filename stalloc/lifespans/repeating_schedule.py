"""The fold: a trace of many steps becomes a schedule, a prologue that runs once and a cycle that repeats for ever.

The clock of a schedule is the position in the sequence of requests that are on it: a request that is allocated at
position i and freed after k further requests were allocated has the lifespan [i, i + k + 1). Nothing is lost by
that: of two requests the later one is allocated before the earlier one is freed exactly if the lifespans overlap.
Frees that come a little earlier or later from step to step then seldom change a lifespan.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.lifespans.periods import TINY_BYTES, Period, find_step_period, sequence_rows
from stalloc.trace import Trace

_MAX_UNROLL = 4
_ITERATIONS_LOOKED_AT = _MAX_UNROLL + 1
_JITTER = 0.01  # of a period: lifespans that differ by no more are the same, and the longest counts
_MORE_LOAD = 1 / 128  # that the longest of lifespans which differ by more may add to what is live at most


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """A program's requests in order: a prologue that runs once, then a cycle that repeats for ever."""

    size: Column
    """(n,) requested bytes; the first num_prologue rows are the prologue, the rest the cycle, ordered by start."""
    stream: Column  #: (n,) index into the trace's streams
    start: Column  #: (n,) schedule event. Prologue: in [0, cycle_start). Cycle: in [cycle_start, cycle_end).
    end: Column
    """(n,) schedule event. Cycle: in (start, start + cycle_length], beyond cycle_end it wraps round to cycle_start.
    Prologue: at most cycle_end if it dies before the end of the first iteration, else cycle_end + cycle_length:
    persistent."""
    planned: Column
    """(n,) bool; False: the lifespan is unknown, longer than the cycle, or varies by much: serve it dynamically."""
    row: Column  #: (n,) row of the request in the trace that the schedule was folded from
    num_prologue: int
    cycle_start: int  #: schedule event
    cycle_end: int  #: schedule event
    period_requests: int  #: requests in one period; the cycle is one period or a few
    covered_requests: int
    """Requests of the trace, of those large enough and from the cycle's first on, that follow the cycle."""
    minimum_size: int  #: bytes; smaller requests are not on the schedule

    @property
    def cycle_length(self) -> int:
        """Schedule events in the cycle."""
        return self.cycle_end - self.cycle_start

    @property
    def num_requests(self) -> int:
        """Rows of the schedule."""
        return len(self.size)

    @property
    def persistent(self) -> Column:
        """(n,) bool: allocated in the prologue and never given back."""
        return (np.arange(len(self.size)) < self.num_prologue) & (self.end > self.cycle_end)


def fold(
    trace: Trace,
    *,
    minimum_size: int = TINY_BYTES + 1,
    with_prologue: bool = True,
    rotate: bool = True,
    period: Period | None = None,
) -> Schedule | None:
    """The schedule of a trace whose steps repeat; None when no period is confirmed.

    Requests below `minimum_size` bytes stay off the schedule. `period` overrides what `find_step_period` finds in
    `sequence_rows(trace, minimum_size)`. The cycle is unrolled up to four periods so that every lifespan fits into it
    once; what lives longer or is never freed is not planned. What lives differently from step to step is planned with
    its longest life where that adds next to nothing to the most that is live. With `rotate` the cycle starts where the
    fewest planned bytes are live. The prologue is what the trace shows before that: everything if
    trace.info["complete"], else what was allocated since recording began.
    """
    rows = sequence_rows(trace, minimum_size)
    if period is None:
        period = find_step_period(trace, minimum_size=minimum_size)
    if period is None:
        return None
    births, size = trace.start[rows], trace.size[rows]
    # how many requests were allocated before each one was freed; the end of the record counts as no free
    deaths = np.where(trace.end[rows] < trace.num_events, np.searchsorted(births, trace.end[rows]), -1)
    size_of_class = size[period.first : period.first + period.length]
    lasts = _lasting(period, deaths, size_of_class)
    planned = lasts > 0
    turn = _quietest_turn(np.where(planned, lasts, 0), size_of_class) if rotate else 0
    unroll = max(1, -(-int(lasts.max(initial=0)) // period.length))

    cycle_start, cycle_length = _first_regular_iteration(period, turn, deaths, lasts), unroll * period.length
    cycle_end = cycle_start + cycle_length
    place = (np.arange(cycle_length) + turn) % period.length  # class of each cycle row
    start = np.arange(cycle_start, cycle_end)
    end = start + np.maximum(lasts[place], 1)  # an unplanned row needs some lifespan: the shortest
    is_seen = start < period.first + period.covered  # what comes later is of the stream of the same class before
    seen = np.where(is_seen, start, period.first + place)
    cycle = {
        "size": size_of_class[place],
        "stream": trace.stream[rows][seen],
        "start": start,
        "end": end,
        "planned": planned[place],
        "row": np.where(is_seen, rows[seen], -1),
    }
    if with_prologue:
        prologue = _prologue(trace, rows, deaths, cycle_start, cycle_end)
        columns = {name: np.concatenate([prologue[name], cycle[name]]) for name in cycle}
    else:
        columns = cycle | {"start": start - cycle_start, "end": end - cycle_start}
    num_prologue = cycle_start if with_prologue else 0
    return Schedule(
        **columns,
        num_prologue=num_prologue,
        cycle_start=num_prologue,
        cycle_end=num_prologue + cycle_length,
        period_requests=period.length,
        covered_requests=period.first + period.covered - cycle_start,
        minimum_size=minimum_size,
    )


def _prologue(trace: Trace, rows: Column, deaths: Column, cycle_start: int, cycle_end: int) -> dict[str, Column]:
    """The columns of what is allocated before the cycle; what outlives its first iteration is there for ever."""
    early = np.arange(cycle_start)
    stays = (deaths[early] < 0) | (deaths[early] > cycle_end)
    return {
        "size": trace.size[rows][early],
        "stream": trace.stream[rows][early],
        "start": early,
        "end": np.where(stays, 2 * cycle_end - cycle_start, deaths[early]),
        "planned": np.ones(cycle_start, bool),
        "row": rows[early],
    }


def expand(schedule: Schedule, offsets: Column, trace: Trace) -> Column:
    """(num_requests of the trace,) bytes: each request that follows the schedule gets the offset of its schedule row.

    `offsets` is (n,) for the rows of the schedule. Requests that are too small, not planned, or off the schedule get
    -1.
    """
    rows = sequence_rows(trace, schedule.minimum_size)
    first = int(np.searchsorted(rows, schedule.row[schedule.num_prologue]))
    cycle_rows = schedule.num_requests - schedule.num_prologue
    given = np.where(schedule.planned, offsets, -1)
    result = np.full(trace.num_requests, -1, np.int64)
    result[schedule.row[: schedule.num_prologue]] = given[: schedule.num_prologue]
    followers = rows[first : first + schedule.covered_requests]
    result[followers] = given[schedule.num_prologue + np.arange(len(followers)) % cycle_rows]
    return result


def _lasting(period: Period, deaths: Column, size: Column) -> Column:
    """(period.length,) lifespans in schedule events, 0 for classes that are not to be planned; `size` is in bytes.

    Looks at the last few iterations and compares what it sees of each class: iterations in which it was freed must
    agree, and an iteration in which it was not freed up to the end of the stretch must not have lived longer than that.
    The first iteration is left out when there are others enough: what precedes it differs. Where iterations do not
    agree, as if Python's collector of garbage frees a block, the longest counts, for as many classes as add next to
    nothing to the load.
    """
    length, stretch_end = period.length, period.first + period.covered
    iterations = range(-(-period.covered // length))
    if period.repeats > 2:
        iterations = iterations[1:]
    shape = (len(iterations[-_ITERATIONS_LOOKED_AT:]), length)
    lived, age = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    for i, number in enumerate(iterations[-_ITERATIONS_LOOKED_AT:]):
        begin = period.first + number * length
        count = min(length, stretch_end - begin)
        position = np.arange(begin, begin + count)
        death = deaths[begin : begin + count]
        # after the stretch the program does something else or ends, and what is freed there may have had longer to go
        freed = (death >= 0) & (death < stretch_end)
        lived[i, :count] = np.where(freed, death - position, -1)
        age[i, :count] = np.where(freed, -1, stretch_end - position)
    longest = lived.max(axis=0)
    shortest = np.where(lived < 0, np.iinfo(np.int64).max, lived).min(axis=0)
    known = (longest > 0) & (age.max(axis=0) <= longest) & (longest <= _MAX_UNROLL * length)
    agree = longest - shortest <= int(_JITTER * length)
    lasts = np.where(known & agree, longest, 0)
    varying = np.flatnonzero(known & ~agree & (longest <= max(length, int(lasts.max(initial=0)))))
    varying = varying[np.argsort(size[varying], kind="stable")]
    limit = (1 + _MORE_LOAD) * _load(lasts, size)
    while len(varying):
        more = lasts.copy()
        more[varying] = longest[varying]
        if _load(more, size) <= limit:
            return more
        varying = varying[: len(varying) // 2]
    return lasts


def _first_regular_iteration(period: Period, turn: int, deaths: Column, lasts: Column) -> int:
    """Where the cycle begins: the first iteration that treats its planned requests as the later ones do.

    In the first iteration a request may be kept that is the same only by size, as the state of an optimizer is; such a
    iteration belongs to the prologue as long as two whole ones are left.
    """
    stretch_end = period.first + period.covered
    begin = period.first + turn
    while stretch_end - begin >= 3 * period.length:
        position = np.arange(begin, begin + period.length)
        expected = lasts[(position - period.first) % period.length]
        death = deaths[position]
        lived = np.where(death < 0, stretch_end, death) - position
        if not np.any((expected > 0) & (abs(lived - expected) > int(_JITTER * period.length))):
            break
        begin += period.length
    return begin


def _quietest_turn(lasts: Column, size: Column) -> int:
    """The first position in the cycle before which the fewest bytes are live."""
    return int(np.argmin(_live(lasts, size)))


def _load(lasts: Column, size: Column) -> int:
    """The most bytes that are live at once."""
    return int((_live(lasts, size) + np.where(lasts > 0, size, 0)).max())


def _live(lasts: Column, size: Column) -> Column:
    """(n,) bytes that are live before each position of a cycle of classes that live so long; 0: not counted."""
    length = len(lasts)
    change = np.zeros(length + 1, np.int64)
    crossed = np.maximum(lasts - 1, 0)  # boundaries that lie inside the lifespan, from the next position on
    begin = (np.arange(length) + 1) % length
    whole, rest = crossed // length, crossed % length
    end = begin + rest
    np.add.at(change, begin, size)
    np.subtract.at(change, np.minimum(end, length), size)
    wraps = end > length
    change[0] += size[wraps].sum()
    np.subtract.at(change, end[wraps] - length, size[wraps])
    return np.cumsum(change[:length]) + int((whole * size).sum())
