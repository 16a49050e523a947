"""The kinds of steps that the record shows, by name, and how often each was seen, there or before.

Contract: how often a kind was seen is kept, whatever becomes of records and plans. Noise are requests of any size, as
for labels of any number, which keep steps from being equal: they are left out only if no step recurred with them and
most do without, and of none that equals the one before. They are few, and of sizes that the step has in common with no
other one. The heap serves them, as all that no plan knows of.
"""

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from stalloc.columns import Column
from stalloc.core.constants import MAX_STREAMS, TINY
from stalloc.core.state import DeviceState
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import SteadySteps

if TYPE_CHECKING:
    from stalloc.trace import Trace


def name_of(size: Column, stream: Column) -> bytes:
    name = hashlib.blake2b(np.ascontiguousarray(size, np.int64).data, digest_size=16)
    name.update(np.ascontiguousarray(stream, np.int64).data)
    return name.digest()


def recurring_names(trace: "Trace") -> set[bytes]:
    """The names of the steps between a trace's marks that come twice."""
    rows = np.flatnonzero(trace.size > TINY)
    bounds = np.searchsorted(trace.start[rows], trace.mark_event).tolist()
    size, stream = trace.size[rows], trace.stream[rows]
    names = Counter(name_of(size[begin:end], stream[begin:end]) for begin, end in itertools.pairwise(bounds))
    return {name for name, count in names.items() if count > 1}


_MOST = 8  # one request of a step in so many, at most
_RECENT = 16  # steps like no other, with which the next one is compared
_MAX_KINDS = 64  # that are remembered


@dataclass(frozen=True, eq=False)
class _Step:
    """A recorded step, of the events [begin, end)."""

    begin: int
    end: int
    keys: Column  #: (n,) sizes and streams of its requests

    @cached_property
    def distinct(self) -> frozenset[int]:
        return frozenset(self.keys.tolist())

    def without_others(self, other: "_Step") -> Column | None:
        """(n,) bool: its requests of which another has the like; None if more others are left than may be noise."""
        most = len(self.keys) // _MOST
        if abs(len(other.keys) - len(self.keys)) > most or len(self.distinct - other.distinct) > most:
            return None
        kept = np.isin(self.keys, other.keys)
        return kept if 0 < len(kept) <= np.count_nonzero(kept) + most else None


class NoiseRequests:
    """Finds noise among the steps of one device's record, and has it left out of them."""

    def __init__(self, state: DeviceState, recording: Recording) -> None:
        self._state, self._recording = state, recording
        self._kinds: deque[_Step] = deque(maxlen=_MAX_KINDS)  # a step of each, without its noise
        self._recent: deque[_Step] = deque(maxlen=_RECENT)
        self._last: Column = np.empty(0, np.int64)  # the requests of the last step that was looked at

    def forget_record(self) -> None:
        self._recent.clear()

    def leave_out(self) -> bool:
        steps = [*itertools.pairwise(self._recording.step_events)]
        found = [one for begin, end in steps for one in self._found(begin, end)]
        if 2 * len(found) <= len(steps):
            self._kinds.clear()
            self._recent.clear()
            return False
        self._recording.leaves_out_noise = True
        self._note(found)
        return True

    def look(self, begin: int, end: int) -> None:
        """A step was recorded, as the events [begin, end): see what noise it has, where these are left out."""
        if self._recording.leaves_out_noise:
            self._note(self._found(begin, end))

    def _note(self, found: list[tuple[_Step, Column]]) -> None:
        for step, kept in found:
            *_, is_noise = self._state.recorded_requests(step.begin, step.end)
            rows = np.flatnonzero(is_noise == 0)
            if len(rows) == len(kept):  # else the record began anew since that step
                noise = np.zeros(len(is_noise), bool)
                noise[rows[~kept]] = True
                self._state.note_noise(step.begin, step.end, noise)

    def _found(self, begin: int, end: int) -> list[tuple[_Step, Column]]:
        """The step of these events, if it is like another one but for noise, and that one if it was like none so far.

        With each of them which of its requests (n,) are no noise.
        """
        size, stream = self._recording.requests(begin, end)
        step, last = _Step(begin, end, size * MAX_STREAMS + stream), self._last
        self._last = step.keys
        if np.array_equal(step.keys, last):
            return []
        for kind in self._kinds:
            kept = step.without_others(kind)
            if kept is not None and np.array_equal(step.keys[kept], kind.keys):
                return [(step, kept)]
        for other in self._recent:
            kept, others = step.without_others(other), other.without_others(step)
            if kept is not None and others is not None and np.array_equal(step.keys[kept], other.keys[others]):
                self._kinds.append(_Step(begin, end, step.keys[kept]))
                self._recent.remove(other)
                return [(other, others), (step, kept)]
        self._recent.append(step)
        return []


_MAX_REMEMBERED = 4096  # kinds of steps that were seen


@dataclass
class _Recorded:
    """One kind of step in the record."""

    first: int  # whole steps before its first
    count: int = 0


class RecordedSteps:
    """What is known of the steps of one device without a look at what lives how long."""

    def __init__(self, state: DeviceState, recording: Recording) -> None:
        self._state, self._recording = state, recording
        self._noise = NoiseRequests(state, recording)
        self._times_seen: dict[bytes, int] = {}
        self._of_kind: dict[bytes, _Recorded] = {}  # what the record shows of each kind
        self._order: list[int] = []  # whole steps before the first of the kind of each step in the record
        self.count = 0  #: whole steps in the record
        self.num_records = 0  #: that were begun
        self._asked = self._last_asked = 0, 0  # requests and bytes, when the last step ended, and of that step
        self._missed = 0, 0  # of the step that was not on the plan, nor recorded, but began the record

    def forget(self) -> None:
        self._begin_to_count()
        self._noise.forget_record()
        self.num_records += 1

    def begin_anew(self) -> None:
        self._recording.begin_beside(at_step=True)
        self.forget()

    def expect_last(self) -> None:
        self._missed = self._last_asked

    def note(self, followed: bytes | None, *, counts: bool) -> None:
        """A step ended; it `counts` if anybody looks for steps in the record, which may be kept for the program only.

        `followed` is its name, None: that is not known.
        """
        record, before = self._state.record, self._asked
        self._asked = record.total.num_allocs, self._state.requested_ever_bytes
        self._last_asked = self._asked[0] - before[0], self._asked[1] - before[1]
        events = self._recording.step_events
        if counts and record.hot.recording and len(events) > 1:
            if followed is None:
                self._noise.look(events[-2], events[-1])
            self._count(followed or self._name(events[-2], events[-1]))

    def skip(self, steps: SteadySteps, names: Sequence[bytes]) -> None:
        before, self._asked = self._asked, (steps.num_requests, steps.requested_bytes)
        num_requests, requested_bytes = self._asked[0] - before[0], self._asked[1] - before[1]
        self._last_asked = num_requests // steps.count, requested_bytes // steps.count
        for name in names:
            self._count(name)

    def _begin_to_count(self) -> None:
        self._of_kind.clear()
        self._order.clear()
        self.count = 0

    def _count(self, name: bytes) -> None:
        kind = self._of_kind.setdefault(name, _Recorded(self.count))
        kind.count += 1
        self._order.append(kind.first)
        self.count += 1
        self._times_seen[name] = self._times_seen.get(name, 0) + 1

    def leave_out_noise(self) -> bool:
        """No recorded step recurs: leave out requests of any size if most steps recur without them; whether they do."""
        if not self._noise.leave_out():
            return False
        self._begin_to_count()
        for step in itertools.pairwise(self._recording.step_events):
            self._count(self._name(*step))
        return True

    def _name(self, begin: int, end: int) -> bytes:
        size, stream = self._recording.requests(begin, end)
        name = name_of(size, stream)
        if len(self._times_seen) >= _MAX_REMEMBERED:
            self._times_seen.clear()
        if name not in self._times_seen:
            self._times_seen[name] = int(self._was_seen_before(size, stream))
        return name

    def _was_seen_before(self, size: Column, stream: Column) -> bool:
        """Whether a step that is recorded first occurred before there were marks, or just before recording began."""
        if self._last_asked == self._missed:
            self._missed = 0, 0
            return True
        early_size, early_stream = self._recording.requests_before_marks()
        if not len(size) or len(early_size) < len(size) or early_size[-1] != size[-1]:
            return False
        tail = slice(len(early_size) - len(size), None)
        return bool((early_size[tail] == size).all() and (early_stream[tail] == stream).all())

    @property
    def names(self) -> Set[bytes]:
        return self._of_kind.keys()

    def first_of(self, names: set[bytes]) -> int:
        return min(self._of_kind[name].first for name in names)

    def is_shown(self, name: bytes) -> bool:
        """Whether the record shows how long the requests of a kind of step live, up to the next step."""
        recorded = self._of_kind.get(name)
        return recorded is not None and recorded.first + 1 < self.count

    def comes_twice(self, name: bytes) -> bool:
        return name in self._of_kind and self._of_kind[name].count > 1

    @property
    def recurring(self) -> set[bytes]:
        return {name for name in self._of_kind if self._times_seen.get(name, 0) > 1}

    @property
    def make_a_cycle(self) -> bool:
        """Whether any steps of the record, in a row, are of the same kinds in the same order as those after them."""
        from stalloc.lifespans.periods import longest_runs

        return next(iter(longest_runs(np.array(self._order, np.int64), 2, 1)), None) is not None

    @property
    def num_recurring(self) -> int:
        return sum(self._of_kind[name].count for name in self.recurring)
