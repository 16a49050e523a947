"""Where the heap serves although there is a plan: for another step, or as the program fills the device.

Contract of the bypass: what matches the plan by chance would be scattered over the arena, and keep parts of pages from
everything else. So the plan is bypassed from there to the next mark, or to an iteration that begins as planned: its
arena moves to addresses without memory, and the heap has all that is free where it was. After many such steps in a row
there is one in which it serves what it can. A step that asks for all that is planned, and finds its places taken by
what another step left there, is not another one: the arena moves, and the plan goes on; if that does not help, the next
one is bypassed.

Contract of a full device: what a plan does not know is packed worse beside it than by the heap alone. Where that could
be the end of the program, and memory comes by pages, the heap serves until steps need no more than those before, a plan
has to know the steps that need most, and goes once the program does something else for which idle parts of the arena
are not enough.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from stalloc.core.constants import BYPASS
from stalloc.runtime import decisions
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Phase, Status, SteadySteps


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
        record = self._state.record
        lost = record.iterations.iteration_misses - record.iterations.iteration_unplanned
        return lost, record.follow.hits - record.iterations.hits_before

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
        ahead_bytes = int(schedule.ahead[record.follow.cursor])
        expected_bytes = self._allocated_bytes + int(schedule.ahead[began])
        needed_bytes = int(record.total.allocated_bytes) + ahead_bytes
        held_bytes = self._arenas.memory.paging.allowance.held_bytes(0)
        if not decisions.has_much_to_come(ahead_bytes, needed_bytes, held_bytes):
            return False
        if decisions.is_unexpected(needed_bytes, expected_bytes):
            return True
        own_bytes = int(record.total.allocated_bytes) - self._allocated_bytes  # of this step
        return decisions.is_third_lost(*self._lost_and_hit) and decisions.is_third_there(own_bytes, ahead_bytes)

    def end(self) -> None:
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

    def skip(self, steps: SteadySteps) -> None:
        self._place, self._allocated_bytes = steps.place, steps.allocated_bytes

    def _note_place(self) -> None:
        self._place = self._place_now
        self._state.write(left_out=0)
        self._allocated_bytes = int(self._state.record.total.allocated_bytes)
        self._num_plans = self._status.num_plans


class FullDevice:
    """What is asked about plans on one device, if its program fills it."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory, self._state = memory, memory.state
        self._moves = False
        self._highest_bytes = 0  # that a marked step had allocated, as long as it was not much more
        self._num_settled = 0  # steps since one that needed more
        # bytes allocated at most in the last marked steps
        self._peaks: deque[int] = deque(maxlen=decisions.num_recent_steps())

    def note_step(self) -> None:
        peak_bytes = self._state.take_peak_bytes()
        self._num_settled += 1
        if decisions.needs_more(peak_bytes, self._highest_bytes):
            self._highest_bytes, self._num_settled = peak_bytes, 0
            self._note_peak()
        self._peaks.append(peak_bytes)

    def skip(self, steps: SteadySteps) -> None:
        self._num_settled += steps.count
        self._peaks.extend(steps.count * [self._peaks[-1]])

    def may_begin(self, arena_bytes: int) -> bool:
        """Whether a plan is of the steps that need most, and fits beside what lives as its first step begins."""
        if not self.may_fill() or arena_bytes > self._memory.paging.device_bytes:
            return True  # what never fits is refused elsewhere, for another plan to be made
        held_bytes = self._state.record.total.allocated_bytes + arena_bytes
        fits = decisions.fits_beside(held_bytes, self._memory.paging.device_bytes)
        return fits and decisions.covers(held_bytes, self._peaks, self._num_settled)

    def begin_plan(self, most_misses: int) -> None:
        self._state.triggers.after_misses(self.most_misses(most_misses))
        self._note_peak()

    def _note_peak(self) -> None:
        """Have small blocks lie together if a step that needs more than those before may fill the device."""
        if self._memory.paging.peak_is(decisions.is_large_part):
            self._state.record.policy.small_apart = 1

    def most_misses(self, elsewhere: int) -> int:
        """By how many requests misses may outnumber hits before a plan is left, which is `elsewhere` where none fills.

        What a step has and the plan does not know lies scattered over its arena; as long as it is little that does not
        matter to the rest of the step.
        """
        return decisions.most_misses_where(elsewhere, may_fill=self.may_fill())

    def may_fill(self) -> bool:
        return self._memory.paging.peak_is(decisions.may_fill)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """What lives is moved meanwhile: requests for new places are none of the program's."""
        self._moves = True
        try:
            yield
        finally:
            self._moves = False
            self._state.write(misses_over_matches=0)

    def is_left(self, size_bytes: int) -> bool:
        """Whether the program does something else than the plan in force; to be asked when a request needs memory."""
        record = self._state.record
        if not decisions.is_left(max(record.follow.misses_over_matches, self._state.num_displaced)) or self._moves:
            return False
        if self._memory.is_capturing:
            return False
        return self._memory.paging.peak_is(decisions.fills_device) or self._goes_beyond(size_bytes)

    def _goes_beyond(self, size_bytes: int) -> bool:
        """Whether a step needs clearly more than those before, so that nobody knows how much it will be."""
        highest_bytes = max(self._highest_bytes, self._state.record.policy.expected_peak)
        needed_bytes = self._state.record.total.allocated_bytes + size_bytes
        if not decisions.needs_more(needed_bytes, highest_bytes) or not self._memory.source.paged:
            return False
        return decisions.is_large_part(needed_bytes, self._memory.paging.device_bytes)
