"""Where on the schedules in force the program's steps begin, and which of them comes next.

Contract: at a mark the core is told where the schedule goes on, if it has lost its way. A step that asked for what its
schedule has, from its begin to its end, is known without a look at the record. Without a schedule there are no places.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from copy import copy

from stalloc.core.device_parts import StepAhead
from stalloc.core.state import DeviceState
from stalloc.runtime import decisions
from stalloc.runtime.runtime_settings import SteadySteps


class KindOrder:
    """The kinds of steps of one program, by number."""

    def __init__(self, switches_buffers: Sequence[bool]) -> None:
        """`switches_buffers`: for each kind, whether the schedules of the other buffer are followed after it."""
        self._switches_buffers = switches_buffers
        self._buffer = 0  # whose schedules are followed
        self._followers: dict[tuple[int, int], int] = {}  # two kinds in a row -> the one that came next
        self._run = -1, -1, 0  # the kind before the last one, the last one, and how often that came in a row
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}  # the first two -> how often it was, and what came next
        self._last_two = -1, -1

    def copy(self) -> "KindOrder":
        one = copy(self)
        one._followers, one._runs = self._followers.copy(), self._runs.copy()
        return one

    def after(self, kind: int) -> int:
        """A step of a kind is over: the number of the schedule that is expected next, all of the first buffer first."""
        self._buffer ^= self._switches_buffers[kind]
        self._followers[self._last_two] = kind
        self._last_two = self._last_two[1], kind
        before, last, count = self._run
        if kind != last:
            self._runs[before, last] = count, kind
        self._run = (before, last, count + 1) if kind == last else (last, kind, 1)
        return self._buffer * len(self._switches_buffers) + self._expected()

    def _expected(self) -> int:
        before, last, count = self._run
        earlier, following = self._runs.get((before, last), (0, last))
        if count <= earlier:
            return following if count == earlier else last
        return self._followers.get(self._last_two, last)


_REMEMBERED = 16  # marks


class StepPlaces:
    """The begins of steps on the schedules of one device."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self.forget()

    def forget(self) -> None:
        self._positions: list[int] = []  # of marks in all periods of the cycle
        self._names: list[bytes] = []  # of the steps that begin there, or of the kinds of steps
        self._begins: list[int] = []  # where the schedules of all kinds begin, those of one turn after those of another
        self._ends: list[int] = []
        self._order = KindOrder([])  # of the kinds
        self._current = 0  # which of the positions was the last
        self._seen: list[int] = []  # where the last marks came, if no positions are known, as of a plan from a file
        self._ahead: list[StepAhead] = []  # steps that were expected after the last mark
        self._since = -1, 0, 0, 0  # at the last mark: the cursor, requests followed, misses, and where its cycle begins

    def follow_cycle(self, places: dict[int, bytes], cycle_length: int, period_requests: int) -> None:
        self.forget()
        turns = range(0, cycle_length, period_requests)
        self._positions = [turn + place for turn in turns for place in sorted(places)]
        self._names = [places[place] for place in sorted(places)] * len(turns)

    def follow_kinds(
        self, begins: Sequence[int], lengths: Sequence[int], names: Sequence[bytes], switches_buffers: Sequence[bool]
    ) -> None:
        """The schedules of several kinds of steps are followed: where each begins, the lengths and names of the kinds.

        There may be several for each kind, all of the first buffer coming first; `switches_buffers`: the kinds after
        whose steps those of the other buffer are followed.
        """
        self.forget()
        self._begins, self._names, self._order = [*begins], [*names], KindOrder(switches_buffers)
        self._ends = [begin + length for begin, length in zip(begins, itertools.cycle(lengths), strict=False)]

    @property
    def num_in_cycle(self) -> int:
        return len(self._positions)

    def find(self) -> None:
        record = self._state.record
        if self._begins:
            begin, end = self.expected_after(record.follow.cycle_start)
            self._state.arena.begin_step(begin, end, begin)
        elif self._positions:
            self._find_position(record.follow.cycle_start, record.follow.cycle_end, record.follow.cursor)
        else:
            self._seen = [*self._seen, record.follow.cursor - record.follow.cycle_start][-_REMEMBERED:]
        follow = record.follow
        self._since = follow.cursor, follow.history_count, record.iterations.misses, follow.cycle_start

    def expected_after(self, cycle_start: int) -> tuple[int, int]:
        """The schedule [begin, end) of the step that is expected after the one whose schedule begins there."""
        expected = self._order.after(self._kind_of(cycle_start))
        return self._begins[expected], self._ends[expected]

    def _kind_of(self, cycle_start: int) -> int:
        return (bisect.bisect_right(self._begins, cycle_start) - 1) % len(self._names)

    def ahead(self, most: int) -> Iterator[tuple[StepAhead, bytes]]:
        """The steps that are expected after the last mark, and their names, `most` of them.

        They are what is known of the program's order, not more; b"": a name that is not known.
        """
        self._ahead = []
        for step, name in itertools.islice(self._kinds_ahead() if self._begins else self._cycle_ahead(), most):
            self._ahead.append(step)
            yield step, name

    def _kinds_ahead(self) -> Iterator[tuple[StepAhead, bytes]]:
        order, schedule = self._order.copy(), bisect.bisect_right(self._begins, self._since[3]) - 1
        while True:
            begin, kind = self._begins[schedule], schedule % len(self._names)
            length = self._ends[schedule] - begin
            schedule = order.after(kind)
            following = self._begins[schedule], self._ends[schedule], self._begins[schedule]
            yield StepAhead(begin, length, following), self._names[kind]

    def _cycle_ahead(self) -> Iterator[tuple[StepAhead, bytes]]:
        positions, at, names = self._positions, self._current, self._names
        if not positions:
            last, seen = self._seen[-1:], self._seen[:-1]
            if not {*last} & {*seen}:
                return
            positions = sorted({*seen[len(seen) - 1 - seen[::-1].index(*last) :]})
            at, names = positions.index(*last), [b""] * len(positions)
        begin, end = self._since[3], self._state.record.follow.cycle_end
        while True:
            name, before, at = names[at], positions[at], (at + 1) % len(positions)
            cursor, length = begin + positions[at], end - begin
            yield StepAhead(cursor, (positions[at] - before - 1) % length + 1, (begin, end, cursor)), name

    def skip(self, steps: SteadySteps) -> None:
        ahead = self._ahead[: steps.count]
        if self._begins:
            for step in ahead:
                self._order.after(self._kind_of(step.end))
        elif self._positions:
            self._current = (self._current + steps.count) % len(self._positions)
        else:
            self._seen.append(steps.place)
        if ahead:
            begin, _, cursor = ahead[-1].following
            self._since = cursor, steps.followed, self._since[2], begin

    def _find_position(self, begin: int, end: int, cursor: int) -> None:
        """The position next to the cursor; the one after the last where there is none near."""
        length, at = end - begin, cursor - begin
        after = bisect.bisect_left(self._positions, at) % len(self._positions)
        behind, ahead = (at - self._positions[after - 1]) % length, (self._positions[after] - at) % length
        nearest = after if ahead < behind else (after - 1) % len(self._positions)
        if not decisions.is_near_mark(min(behind, ahead)):
            nearest = (self._current + 1) % len(self._positions)
            self._state.arena.begin_step(begin, end, begin + self._positions[nearest])
        elif min(behind, ahead) == 0:
            self._state.arena.begin_step(begin, end, cursor)
        self._current = nearest

    def name_of_followed(self) -> bytes | None:
        """The name of the step that just ended, if it asked for just what its schedule has; None: not known."""
        record, (cursor, count, misses, cycle_start) = self._state.record, self._since
        num_followed = record.follow.history_count - count
        if record.iterations.misses != misses or cursor < 0:
            return None
        if self._begins:
            schedule = bisect.bisect_right(self._begins, record.follow.cycle_start) - 1
            begin, end = self._begins[schedule], self._ends[schedule]
            is_whole = record.follow.cursor == begin and num_followed == end - begin
            return self._names[schedule % len(self._names)] if is_whole else None
        if not self._positions or cursor != cycle_start + self._positions[self._current]:
            return None
        length = record.follow.cycle_end - record.follow.cycle_start
        following = self._positions[(self._current + 1) % len(self._positions)]
        expected = (following - self._positions[self._current] - 1) % length + 1  # a whole cycle where there is but one
        is_whole = num_followed == expected and record.follow.cursor == record.follow.cycle_start + following
        return self._names[self._current] if is_whole else None
