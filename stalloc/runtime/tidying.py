"""What goes back to the device while a plan is in force, and what is held in one piece while there is none.

Contract: nothing is given back in the middle of an iteration, and nothing that iterations still use.
"""

from stalloc.runtime import decisions
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.cpu_budget import CpuBudget


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
