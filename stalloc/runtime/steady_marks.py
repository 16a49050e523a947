"""Steps that come as the plan in force has them: the core notes their marks, the parts of a device are told later.

Contract: a step goes by only where nothing would come of it: no search is under way, all that is recorded is known,
nearly all of the step was served from the plan, and no page moved. Whatever enters Python for the device has the parts
told first, so that what they know is as of the last mark.
"""

import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from stalloc.core.device_parts import StepAhead
from stalloc.runtime import decisions
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.recording import Recording
from stalloc.runtime.steps import Steps


@dataclass(frozen=True)
class SteadySteps:
    """Steps of one device that went by, and counts as of the mark that ended the last of them."""

    names: list[str]  #: of their marks
    num_events: list[int]  #: in the record, at each of these
    place: int  #: entries of the schedule from where the cycle begins
    hits: int
    lost: int  #: misses and conflicts
    followed: int  #: requests that the schedule was followed by
    num_requests: int
    requested_bytes: int
    allocated_bytes: int

    @property
    def count(self) -> int:
        """How many."""
        return len(self.num_events)


class Told(Protocol):
    """A part of a device that counts steps, or what they were like."""

    def skip(self, steps: SteadySteps) -> None:
        """These went by."""


class SteadyMarks:
    """The marks of one device's steps, as far as nobody has to be told at once."""

    def __init__(self, memory: DeviceMemory, recording: Recording, steps: Steps, told: Iterable[Told]) -> None:
        """`told`: who else has to know of the steps that went by."""
        self._state, self._lock = memory.state, memory.lock
        self._recording, self._steps = recording, steps
        self._told: tuple[Told, ...] = (recording, steps.misses, steps.places, steps.watch, *told)
        self._thread = -1  # whose steps may go by
        self._names: list[str] = []  # of the marks of those that did
        self._kinds: list[bytes] = []  # of steps that are expected, if they are recorded
        self._num_expected, self._num_wanted = 0, 1
        self._heard, self._to_hear = 0, 0  # marks to be heard after a step that did not come, and those left of them

    def ends_step(self, name: str) -> bool:
        """The program marks a step: whether it went by, so that this was all."""
        if self._thread != threading.get_ident() or not self._state.expected.end_known():
            return False
        self._names.append(name)
        self._recording.step_times_ns.append(time.monotonic_ns())
        self._recording.num_planned += 1
        return True

    def begin(self) -> None:
        """A mark of a step was looked at: let those after it go by, as far as it is known what they should be."""
        if self._to_hear > 0:
            self._to_hear -= 1
        elif ahead := self._ahead():
            self._names, self._num_expected = [], len(ahead)
            self._state.expected.expect(ahead, self._recording.overdue_requests)
            self._thread = threading.get_ident()

    def _ahead(self) -> list[StepAhead]:
        """The steps from here on that are expected, as far as nothing new is learnt if they come.

        None while a search is under way, or while what is recorded is not all planned.
        """
        steps, is_recorded = self._steps, self._state.record.hot.recording
        if steps.search is not None or steps.cycles.is_found:
            return []
        if not is_recorded:
            self._kinds = []
            return [step for step, _ in steps.places.ahead(self._num_wanted)]
        if not steps.recorded.names <= steps.planned:
            return []
        most = max(0, min(self._num_wanted, steps.watch.num_left, steps.cycles.num_left))
        known = [*itertools.takewhile(lambda ahead: ahead[1] in steps.planned, steps.places.ahead(most))]
        self._kinds = [kind for _, kind in known]
        return [step for step, _ in known]

    def end(self) -> None:
        """None goes by from here on, and the parts are told of those that did; in any thread."""
        if self._thread != -1:
            with self._lock:
                self._end()

    def _end(self) -> None:
        self._thread = -1
        num_events, last = self._state.expected.end_all(), self._state.record.known_steps
        self._learn(len(num_events))
        if not num_events:
            return
        steps = SteadySteps(
            (self._names + [""] * len(num_events))[: len(num_events)],  # one may have been interrupted
            num_events,
            place=last.place,
            hits=last.hits,
            lost=last.misses + last.conflicts,
            followed=last.followed,
            num_requests=last.num_allocs,
            requested_bytes=last.requested_ever,
            allocated_bytes=last.allocated_bytes,
        )
        for part in self._told:
            part.skip(steps)
        self._steps.recorded.skip(steps, self._kinds[: steps.count])

    def _learn(self, num_steps: int) -> None:
        """So many of the steps came that were expected: see how many are worth expecting."""
        if num_steps:
            self._heard = 0
            self._num_wanted = decisions.next_passed_steps(num_steps, self._num_expected)
        else:
            self._num_wanted, self._heard = 1, decisions.next_heard_marks(self._heard)
            self._to_hear = self._heard
