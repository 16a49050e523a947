"""A step that leaves out what is planned, and is about to need much memory, is served by the heap to its end.

Contract: what matches the plan by chance would be scattered over the arena, and keep parts of pages from everything
else. So the plan is bypassed from there to the next mark, or to an iteration that begins as planned: its arena moves to
addresses without memory, and the heap has all that is free where it was. After many such steps in a row there is one in
which it serves what it can. A step that asks for all that is planned, and finds its places taken by what another step
left there, is not another one: the arena moves, and the plan goes on; if that does not help, the next one is bypassed.
"""

from typing import TYPE_CHECKING

from stalloc.core.constants import BYPASS
from stalloc.runtime import decisions
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Phase
from stalloc.runtime.status import Status

if TYPE_CHECKING:
    from stalloc.runtime.steady_marks import SteadySteps


class Bypass:
    """Whether the plan in force on one device is bypassed, and until when."""

    def __init__(self, status: Status, arenas: Arenas, recording: Recording) -> None:
        self._status, self._arenas, self._state, self._recording = status, arenas, arenas.state, recording
        self._in_a_row = 0
        # since the last mark: the arena moved, so that this is not asked again; another plan came into force
        self._has_moved = self._came_late = False
        # at the last mark, or when another plan came into force after it:
        self._place = 0  # entries from where the cycle begins
        self._allocated_bytes = self._num_plans = 0  # plans that had been put in force

    def begins(self) -> bool:
        """A request needs pages: whether the arena moves out of the way, so that there may be some."""
        record = self._state.record
        if self._has_moved or not decisions.may_bypass(self._in_a_row) or self._status.phase is not Phase.PLANNED:
            return False
        if record.hot.has_handovers or self._arenas.memory.is_capturing or not self._recording.step_times_ns:
            return False
        if record.tables.gaps:
            return False  # what such steps leave out does not make them others
        if self._num_plans != self._status.num_plans:
            self._note_place()
            self._came_late = True
        if not (self._is_another() and self._matters()):
            return False
        still_serves = self._in_a_row == 0 and not self._leaves_out
        with self._status.cpu_budget.counted():
            if not self._arenas.move():
                return False
        self._in_a_row += 1
        self._has_moved = True
        if not still_serves:
            self._state.write(bypassed=BYPASS)
        return True

    def _is_another(self) -> bool:
        """Whether much of what is planned for this step was not asked for, or others are where it was to be.

        A plan that comes in the middle of a step may begin at another place of it, and go on from the right one.
        """
        record = self._state.record
        length = record.follow.cycle_end - record.follow.cycle_start
        goes_on = self._came_late and record.follow.miss_run == 0 and not decisions.is_third_lost(*self._lost_and_hit)
        is_another = (self._leaves_out and not goes_on) or decisions.leaves_out_much(self._state.num_displaced, length)
        return bool(record.iterations.iteration_count > 0 and is_another)

    @property
    def _leaves_out(self) -> bool:
        follow = self._state.record.follow
        return decisions.leaves_out_much(follow.left_out, follow.cycle_end - follow.cycle_start)

    @property
    def _place_now(self) -> int:
        return int(self._state.record.follow.cursor - self._state.record.follow.cycle_start)

    @property
    def _lost_and_hit(self) -> tuple[int, int]:
        """Requests of this iteration that are not as planned, and those that are."""
        record = self._state.record
        return (
            record.iterations.iteration_misses - record.iterations.iteration_unplanned,
            record.follow.hits - record.iterations.hits_before,
        )

    def _matters(self) -> bool:
        """Whether little of what is held is left and most of the iteration not as planned, or the step needs much."""
        record = self._state.record
        little_is_left = decisions.is_little_left(record.total.allocated_bytes, record.statistics.reserved_bytes)
        if little_is_left and decisions.is_half_lost(*self._lost_and_hit):
            return True
        return (little_is_left or decisions.has_begun(self._place_now)) and self._needs_much()

    def _needs_much(self) -> bool:
        """Whether the step will need much more than now, and nearly as much as any before, if it goes on as planned.

        More than was expected when it began, too; or a third of it is not as planned, and a third of what it needs is
        there.
        """
        record, schedule = self._state.record, self._arenas.schedule
        began = record.follow.cycle_start + self._place
        if schedule is None or schedule.ahead is None or max(began, record.follow.cursor) >= len(schedule.ahead):
            return False  # nobody knows
        ahead_bytes, expected_bytes = (
            int(schedule.ahead[record.follow.cursor]),
            self._allocated_bytes + int(schedule.ahead[began]),
        )
        needed_bytes = int(record.total.allocated_bytes) + ahead_bytes
        held_bytes = self._arenas.memory.paging.allowance.held_bytes(0)
        if not decisions.has_much_to_come(ahead_bytes, needed_bytes, held_bytes):
            return False
        if decisions.is_unexpected(needed_bytes, expected_bytes):
            return True
        own_bytes = int(record.total.allocated_bytes) - self._allocated_bytes  # of this step
        return decisions.is_third_lost(*self._lost_and_hit) and decisions.is_third_there(own_bytes, ahead_bytes)

    def end(self) -> None:
        """The program marks a step, and where it is on its schedule is known."""
        if self._has_moved:
            self._has_moved = False
            self._state.write(bypassed=0)
        else:
            self._in_a_row = 0
        self._came_late = False
        self._note_place()

    @property
    def is_far(self) -> bool:
        return not (self._has_moved or self._in_a_row)

    def skip(self, steps: "SteadySteps") -> None:
        self._place, self._allocated_bytes = steps.place, steps.allocated_bytes

    def _note_place(self) -> None:
        self._place = self._place_now
        self._state.write(left_out=0)
        self._allocated_bytes = int(self._state.record.total.allocated_bytes)
        self._num_plans = self._status.num_plans
