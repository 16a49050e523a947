"""A ring that was found without marks is on probation: it may be a layer's, or one step's of several.

Contract: while a plan is on probation what the program does is recorded beside it, so that a longer ring can be looked
for at once when it turns out that the plan's is only a part of what repeats.
"""

from stalloc.core.state import DeviceState
from stalloc.runtime.recording import Recording
from stalloc.runtime.status import Status

_PASSES = 8  # over a ring found without marks, after which it is judged


class Probation:
    """The probation of one device's plan, if it is on any."""

    def __init__(self, status: Status, state: DeviceState, recording: Recording) -> None:
        self._status, self._state, self._recording = status, state, recording
        self.is_on = False

    def begin(self, ring_length: int) -> None:
        """A plan of a ring of so many requests has come into force."""
        self._state.record.doubt_at = self._state.record.total.num_allocs + _PASSES * ring_length
        if not self._status.settings.keep_recording:
            self.is_on = True
            self._recording.begin_beside()
            self._state.record.ask_at_boundary = 1

    @property
    def is_over(self) -> bool:
        """Whether the plan has been in force for so long that it is known what its ring is of."""
        return self.is_on and self._state.record.total.num_allocs >= self._state.record.doubt_at

    def end(self) -> None:
        """The plan stays, or there are marks now: what was recorded is not needed."""
        if self.is_on:
            self.is_on = False
            self._state.forget_record()

    def leave(self) -> bool:
        """The plan goes; whether there is a record of the time for which it was in force."""
        was_on, self.is_on = self.is_on, False
        return was_on
