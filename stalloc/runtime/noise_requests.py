"""Requests of any size, as for labels of any number, which keep a program's steps from being equal.

Contract: they are left out of steps only if no step recurred with them and most do without, and of none that equals the
one before. They are few, and of sizes that the step has in common with no other one. The heap serves them, as all that
no plan knows of.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stalloc.columns import Column
from stalloc.core.constants import MAX_STREAMS
from stalloc.core.state import DeviceState
from stalloc.runtime.recording import Recording

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
            self._leave_out(step.begin, step.end, ~kept)

    def _leave_out(self, begin: int, end: int, chosen: Column) -> None:
        *_, is_noise = self._state.recorded_requests(begin, end)
        rows = np.flatnonzero(is_noise == 0)
        if len(rows) != len(chosen):
            return  # the record began anew since that step
        noise = np.zeros(len(is_noise), bool)
        noise[rows[chosen]] = True
        self._state.note_noise(begin, end, noise)

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
