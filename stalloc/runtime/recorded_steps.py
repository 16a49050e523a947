"""The kinds of steps that the record shows, by name, and how often each was seen, there or before.

Contract: how often a kind was seen is kept, whatever becomes of records and plans.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.state import DeviceState
from stalloc.runtime.kind_names import name_of
from stalloc.runtime.noise_requests import NoiseRequests
from stalloc.runtime.recording import Recording

if TYPE_CHECKING:
    from stalloc.runtime.steady_marks import SteadySteps
    from stalloc.trace.record import Column

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
        self.last: bytes | None = None  #: the name of the step that just ended, if it is in the record
        self._asked = self._last_asked = 0, 0  # requests and bytes, when the last step ended, and of that step
        self._missed = 0, 0  # of the step that was not on the plan, nor recorded, but began the record

    def forget(self) -> None:
        """The record begins anew."""
        self._begin_to_count()
        self._noise.forget_record()
        self.num_records += 1

    def begin_anew(self) -> None:
        """Record from here on, where a step begins."""
        self._recording.begin_at_step()
        self.forget()

    def expect_last(self) -> None:
        """The record begins after the last step, which is not in it."""
        self._missed = self._last_asked

    def note(self, followed: bytes | None) -> None:
        """Count the step that just ended, if it is in the record from its begin; its name, if it is known."""
        record, before = self._state.record, self._asked
        self._asked = record.total.num_allocs, self._state.requested_ever_bytes
        self._last_asked = self._asked[0] - before[0], self._asked[1] - before[1]
        step = self._recording.last_step() if record.hot.recording else None
        self.last = None
        if step is None:
            return
        if followed is None:
            self._noise.look(*step)
        self.last = followed or self._name(*step)
        self._count(self.last)

    def skip(self, steps: "SteadySteps", names: Sequence[bytes]) -> None:
        """Steps went by, which had these names as far as they are in the record."""
        num_requests, requested_bytes = self._asked
        self._asked = steps.num_requests, steps.requested_bytes
        self._last_asked = (
            (steps.num_requests - num_requests) // steps.count,
            (steps.requested_bytes - requested_bytes) // steps.count,
        )
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
        """The name of the step of the recorded events [begin, end)."""
        size, stream = self._recording.requests(begin, end)
        name = name_of(size, stream)
        if len(self._times_seen) >= _MAX_REMEMBERED:
            self._times_seen.clear()
        if name not in self._times_seen:
            self._times_seen[name] = int(self._was_seen_before(size, stream))
        return name

    def _was_seen_before(self, size: "Column", stream: "Column") -> bool:
        """Whether a step that is recorded for the first time has occurred before.

        It may have occurred before there were marks; or, to judge by its requests and bytes, recording began after it.
        """
        if self._last_asked == self._missed:
            self._missed = 0, 0
            return True
        early_size, early_stream = self._recording.requests_before_marks()
        tail = slice(len(early_size) - len(size), None)
        if not len(size) or len(early_size) < len(size) or early_size[-1] != size[-1]:
            return False
        return bool((early_size[tail] == size).all() and (early_stream[tail] == stream).all())

    @property
    def names(self) -> set[bytes]:
        """The kinds that the record shows."""
        return {*self._of_kind}

    def times_seen(self, name: bytes) -> int:
        """How often a kind was seen, in the record or before."""
        return self._times_seen.get(name, 0)

    def first_of(self, names: set[bytes]) -> int:
        """Which of the whole steps in the record is the first of any of these kinds, which it shows."""
        return min(self._of_kind[name].first for name in names)

    def is_shown(self, name: bytes) -> bool:
        """Whether the record shows how long the requests of a kind of step live, up to the next step."""
        recorded = self._of_kind.get(name)
        return recorded is not None and recorded.first + 1 < self.count

    def comes_twice(self, name: bytes) -> bool:
        """Whether the record shows a kind twice."""
        return name in self._of_kind and self._of_kind[name].count > 1

    @property
    def recurring(self) -> set[bytes]:
        """Names of the kinds in the record that were seen twice, there or before."""
        return {name for name in self._of_kind if self.times_seen(name) > 1}

    @property
    def make_a_cycle(self) -> bool:
        """Whether any steps of the record, in a row, are of the same kinds in the same order as those after them."""
        from stalloc.lifespans.periods import longest_runs

        return next(iter(longest_runs(np.array(self._order, np.int64), 2, 1)), None) is not None

    @property
    def num_recurring(self) -> int:
        """Steps in the record that are of such kinds."""
        return sum(self._of_kind[name].count for name in self.recurring)
