"""When a record is searched for a repeating step, what is found in it, and whether a plan without marks is of a step.

Contract: without marks only what fills most of the record is a step, since layers and microbatches repeat too; a scan
costs the program time, so the record has to have grown by a quarter since the last one. While a plan without marks is
validated, what the program does is recorded beside it, so that a longer cycle can be looked for at once.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core import constants
from stalloc.core.schedule_cursor import SURE
from stalloc.core.state import DeviceState
from stalloc.runtime import decisions
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Settings, Status

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule
    from stalloc.trace import Trace
    from stalloc.trace.record import Column


@dataclass(frozen=True, eq=False)
class Found:
    """A record, and the cycle that repeats in it."""

    trace: "Trace"
    schedule: "Schedule | None"  #: None: no cycle of steps
    sizable: "Column"  #: (m,) rows of the trace's requests that are larger than TINY

    @property
    def first(self) -> int:
        assert self.schedule is not None
        return int(np.searchsorted(self.sizable, self.schedule.row[self.schedule.num_prologue]))

    @property
    def cursor(self) -> int:
        assert self.schedule is not None
        return (len(self.sizable) - self.first) % self.schedule.cycle_length

    @property
    def is_sure(self) -> bool:
        """Whether the last requests of the record are those before the cursor, in as many entries as the core asks."""
        assert self.schedule is not None
        last = self.sizable[::-1][: min(SURE, self.schedule.cycle_length)]
        entries = self.schedule.num_prologue + (self.cursor - 1 - np.arange(len(last))) % self.schedule.cycle_length
        pairs = (self.trace.size, self.schedule.size), (self.trace.stream, self.schedule.stream)
        return all(np.array_equal(seen[last], planned[entries]) for seen, planned in pairs)


class RecordSearch:
    """The search for a repeating step in one device's record."""

    def __init__(self, state: DeviceState, recording: Recording) -> None:
        self._state, self._recording = state, recording
        self._min_period = decisions.least_period(0)  # without marks
        self._min_record, self._is_part = 0, False  # requests before the first scan; what was found before was a part
        self._scan_at = 0  # sizable requests in the record at the next scan
        self._waited = 0  # scans, for lifespans

    def begin(self) -> None:
        self._waited = self._scan_at = 0

    def was_misled(self, *, is_part: bool) -> None:
        """The cycle that is followed is no step: only a longer one can be, with `is_part` one that holds it."""
        length = self._cycle_length
        self._min_period = decisions.least_period(length)
        if is_part:
            self._min_record = min(decisions.least_record(length), self._state.record.log.num_sizable)
            self._is_part = True

    def shows_longer_cycle(self) -> bool:
        """Whether the record shows a cycle that is longer than the one in force, which was found without marks."""
        from stalloc.lifespans.periods import find_period

        size, stream = self._recording.requests(0, self._state.record.log.num_events)
        period = find_period(size * constants.MAX_STREAMS + stream, decisions.least_repeats(0))
        found = (period.length, period.covered) if period is not None else (0, 0)
        return decisions.shows_longer_cycle(*found, self._cycle_length, len(size))

    @property
    def is_long(self) -> bool:
        return decisions.shows_kinds(self._state.record.log.num_sizable, decisions.least_record(self._cycle_length))

    @property
    def _cycle_length(self) -> int:
        return int(self._state.record.follow.cycle_end - self._state.record.follow.cycle_start)

    @property
    def shows_kinds(self) -> bool:
        return decisions.shows_kinds(self._state.record.log.num_sizable, self._min_record)

    def is_due(self, settings: Settings, *, expects_marks: bool) -> bool:
        state, marks, num_steps = self._state, self._recording.marks, len(self._recording.step_events)
        if not decisions.scans_at_each_mark(num_steps) and state.record.log.num_sizable < self._scan_at:
            return False
        self._scan_at = state.record.log.num_sizable * 5 // 4
        if not marks and state.record.log.num_sizable < self._min_record:
            state.triggers.at_recorded(self._min_record)
            return False
        if marks:  # they come at the right moments
            state.triggers.at_recorded(0)
            return num_steps >= settings.observe_steps
        if expects_marks and state.record.log.num_sizable < self._recording.overdue_requests:
            state.triggers.at_recorded(self._recording.overdue_requests)
            return False
        state.triggers.at_recorded(decisions.next_scan_at(state.record.log.num_sizable))
        return True

    def may_find(self) -> bool:
        """Whether an unmarked record may repeat; False is certain, and much quicker found than by `find`."""
        from stalloc.lifespans.periods import may_repeat

        size, stream = self._recording.requests(0, self._state.record.log.num_events)
        return may_repeat(size * constants.MAX_STREAMS + stream)

    def find(self, settings: Settings) -> Found | None:
        from stalloc.lifespans.periods import find_step_period
        from stalloc.lifespans.repeating_schedule import fold

        trace = self._recording.regular_trace()
        if self._recording.marks:
            period = find_step_period(trace)
        else:
            repeats = decisions.least_repeats(settings.observe_steps)
            share = decisions.needed_coverage(is_part=self._is_part)
            period = find_step_period(trace, min_repeats=repeats, min_share=share, min_length=self._min_period)
        schedule = fold(trace, with_prologue=False, period=period) if period is not None else None
        if schedule is not None and not schedule.planned.any():
            schedule = None  # nothing of it was freed so far
        if schedule is not None and not schedule.planned.all() and self._is_worth_waiting(schedule):
            return None
        return Found(trace, schedule, np.flatnonzero(trace.size > constants.TINY))

    def _is_worth_waiting(self, schedule: "Schedule") -> bool:
        """Whether to look again one period later, when lifespans may be known that are not known yet."""
        unknown = ~schedule.planned
        unknown_bytes, num_bytes = int(schedule.size[unknown].sum()), int(schedule.size.sum())
        if decisions.are_little(int(np.count_nonzero(unknown)), len(unknown), unknown_bytes, num_bytes):
            return False
        waits, marks = decisions.may_wait_for_lifespans(self._waited), self._recording.marks
        if marks:
            self._scan_at = 0 if waits else self._scan_at  # at the next mark, however long the record is by now
        else:
            waits = waits and decisions.are_periods_few(schedule.covered_requests, schedule.period_requests)
            self._scan_at = self._state.record.log.num_sizable + schedule.period_requests
            self._state.triggers.at_recorded(self._scan_at)
        self._waited += waits
        return waits


class PlanValidation:
    """Whether the plan in force on one device is being validated, and until when."""

    def __init__(self, status: Status, state: DeviceState, recording: Recording) -> None:
        self._status, self._state, self._recording = status, state, recording
        self.is_on = False
        self.went_on = False  #: since its cycle seemed to be of a part

    def begin(self) -> None:
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
