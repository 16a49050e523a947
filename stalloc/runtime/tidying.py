"""What goes back to the device while a plan is in force, what is held in one piece without one, and what is to last.

Contract: nothing is given back in the middle of an iteration, and nothing that iterations still use. What is meant to
last gets segments that hold nothing else: among what is transient it would keep that memory from going back when a plan
takes over. A program that begins is taken to make what lasts (a model).
"""

from stalloc.runtime import decisions
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import CpuBudget


class PersistentPhase:
    """Whether the program is making what lasts: a model, or the state of an optimizer."""

    def __init__(self, memory: DeviceMemory, recording: Recording) -> None:
        self._memory, self._state, self._recording = memory, memory.state, recording
        self._building = False

    def begin(self, *, watching: bool) -> bool:
        """The record begins; whether what comes first is meant to last: the program has requested nothing yet."""
        self._building = watching and self._state.record.total.num_allocs == 0
        return self._building

    def expect(self, *, watching: bool, planned: bool) -> None:
        """What is allocated up to the next mark of a step is meant to last (an optimizer makes its state).

        While a plan is in force its arena lends nothing to that, where pages of the arena can move instead.
        """
        self._building = False
        if planned and self._memory.source.paged and not self._memory.paging.fills_device():
            self._state.write(allocating_persistent=1)
        if watching and not self._state.record.policy.allocating_persistent:
            self._make_free()
            if decisions.is_memory_short(self._memory.source.free_bytes(), self._state.record.total.allocated_bytes):
                self._memory.save()
            self._state.write(allocating_persistent=1)

    def end_step(self) -> None:
        if self._state.record.policy.allocating_persistent:
            self._state.write(allocating_persistent=0)
            self._make_free()  # what did not last, for the next step
        elif self._memory.source.paged:
            self._memory.paging.end_gathering()

    def end(self) -> None:
        if self._state.record.policy.allocating_persistent:
            self._state.write(allocating_persistent=0)
            self._memory.release_unused()  # what did not last

    def _make_free(self) -> None:
        """Have what is free be free for whatever comes next, up to the next mark, which is sure to come."""
        if self._memory.source.paged:
            self._memory.paging.gather()
        else:
            self._memory.release_unused()

    def ends_here(self, *, expects_marks: bool) -> bool:
        """Whether a program that has only made what lasts goes on with something else, and this is noticed now.

        It does so once it has an optimizer, marks steps, or frees what it allocates.
        """
        if not self._building:
            return False
        state = self._state
        served = state.record.total.num_allocs - state.record.small.num_allocs
        freed = served - (state.record.total.num_live - state.record.small.num_live)
        if not (expects_marks or self._recording.marks or freed > max(4, served // 8)):
            return False
        self._building = False
        self.end()
        return True


class Tidying:
    """The segments of one device beside its plans."""

    def __init__(self, arenas: Arenas, cpu_budget: CpuBudget) -> None:
        self._arenas, self._state, self._cpu_budget = arenas, arenas.state, cpu_budget
        self._iterations = 0  # over the plan
        self._segments_kept = 0  # of the heap, when the plan had settled
        # iterations ever before the arena moves again, and from the last move on
        self._move_after, self._move_wait = 0, 1
        self._moves_seen = self._moving_iterations = 0  # of pages, at the last boundary; iterations in a row with any
        self._growths_seen = self._boundary_at = 0  # of the paging, and iterations ever, at the last boundary
        self._quiet_iterations = 0  # without a growth that are to come before what one needed goes; 0: it has gone
        self._patience = decisions.quiet_iterations()  # so many after the next growth
        self.settled = False  #: no plan is expected soon

    def begin_plan(self) -> None:
        if self._arenas.memory.source.paged:
            self._arenas.memory.paging.allowance.begin_plan()
        self._iterations = self._segments_kept = self._growths_seen = 0
        self._moving_iterations = self._quiet_iterations = 0
        self._move_after, self._move_wait, self._patience = 0, 1, decisions.quiet_iterations()

    def at_boundary(self) -> int:
        """Give back what the switch left behind, then what deviations needed; iterations until the next time."""
        arenas = self._arenas
        if arenas.memory.source.paged:
            return self._unmap_unused()
        was_settling = decisions.is_settling(self._iterations)
        self._iterations += 1
        settles = decisions.is_settling(self._iterations)
        arenas.memory.release_unused(decisions.idle_iterations(self._iterations))
        num_segments, kept = len(arenas.memory.segments), self._segments_kept
        if was_settling and not settles:
            self._segments_kept = num_segments
        return settles or num_segments > kept

    def _unmap_unused(self) -> int:
        """Unmap what deviations needed, after iterations without any: twice as many each time that they come again."""
        paging, record = self._arenas.memory.paging, self._state.record
        iterations, self._boundary_at = (
            record.iterations.iterations_ever - self._boundary_at,
            record.iterations.iterations_ever,
        )
        self._moving_iterations = self._moving_iterations + 1 if paging.num_moves != self._moves_seen else 0
        self._moves_seen = paging.num_moves
        if self._moves_out_of_the_way():
            return 1  # an iteration takes its pages from where the arena was
        self._iterations += 1
        if self._iterations == 1:
            paging.end_gathering()
            return 1  # the plan's first iteration does
        if decisions.is_settling(self._iterations):
            paging.release()
            return 1
        if paging.num_growths != self._growths_seen:
            self._growths_seen, self._quiet_iterations = paging.num_growths, self._patience
            self._patience *= 2
        elif self._quiet_iterations > 0:
            self._quiet_iterations = max(0, self._quiet_iterations - iterations)
            if self._quiet_iterations == 0:
                paging.release()
        return 1 if self._moving_iterations > 0 else self._quiet_iterations

    @property
    def moves_pages(self) -> bool:
        """Whether pages move in iteration after iteration, which waits for the whole device each time."""
        return decisions.moves_in_each_iteration(self._moving_iterations)

    def _moves_out_of_the_way(self) -> bool:
        """Move the arena if what lives there displaced requests; if that does not help, ever more rarely.

        Whether it moved.
        """
        record = self._state.record
        length, has_kinds = record.follow.cycle_end - record.follow.cycle_start, record.follow.num_schedules > 1
        if (
            not decisions.may_move_arena(self._state.num_displaced, length, has_kinds=has_kinds)
            or record.iterations.iterations_ever < self._move_after
            # where steps have other numbers of requests these take one another's places: moving does not help
            or record.tables.gaps
            or self._arenas.memory.is_capturing
            or self._cpu_budget.is_spent
        ):
            return False
        self._move_wait = decisions.next_move_wait(
            record.iterations.iterations_ever - self._move_after, self._move_wait
        )
        self._move_after = record.iterations.iterations_ever + self._move_wait
        with self._cpu_budget.counted():
            return self._arenas.move()

    def settle(self) -> None:
        """No step repeats so far: pages move no more for the last few percent, which would cost it at every step."""
        state, arenas = self._state, self._arenas
        if self.settled or state.record.policy.memory_is_short:
            return
        self.settled = True
        if arenas.memory.source.paged:
            arenas.memory.paging.allowance.loosen()
            return
        state.write(allocating_persistent=0)
