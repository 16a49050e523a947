"""The validation of a plan that was found without marks: its cycle may be a layer's, or one step's of several.

Contract: while a plan is being validated what the program does is recorded beside it, so that a longer cycle can be
looked for at once when it turns out that the plan's is only a part of what repeats.
"""

from stalloc.core.state import DeviceState
from stalloc.runtime import decisions
from stalloc.runtime.recording import Recording
from stalloc.runtime.status import Status


class PlanValidation:
    """Whether the plan in force on one device is being validated, and until when."""

    def __init__(self, status: Status, state: DeviceState, recording: Recording) -> None:
        self._status, self._state, self._recording = status, state, recording
        self.is_on = False
        self.went_on = False  #: since its cycle seemed to be of a part

    def begin(self) -> None:
        """The plan in force, of a cycle that was found without marks, is to be judged."""
        record = self._state.record
        length = record.follow.cycle_end - record.follow.cycle_start
        self._state.triggers.after_requests(decisions.judged_after(length, has_kinds=False))
        self.went_on = False
        if not self._status.settings.keep_recording:
            self.is_on = True
            self._recording.begin_beside()
            self._state.triggers.at_boundary()

    def go_on(self) -> None:
        """What was recorded does not show yet what the program repeats: a quarter more of it may."""
        self._state.triggers.after_requests(self._state.record.log.num_sizable // 4)
        self._state.triggers.at_boundary()
        self.went_on = True

    @property
    def is_over(self) -> bool:
        return self.is_on and self._state.record.total.num_allocs >= self._state.record.triggers.doubt_at

    def end(self) -> None:
        if self.is_on:
            self.is_on = False
            self._state.forget_record()

    def leave(self) -> bool:
        """The plan goes; whether there is a record of the time for which it was in force."""
        was_on, self.is_on = self.is_on, False
        return was_on
