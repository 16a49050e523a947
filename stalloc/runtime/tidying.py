"""What goes back to the device while a plan is in force, and what is held in one piece while there is none.

Contract: nothing is given back in the middle of a pass, and nothing that passes still use.
"""

from stalloc.runtime import decisions
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.effort import Effort


class Tidying:
    """The segments of one device beside its plans."""

    def __init__(self, arenas: Arenas, effort: Effort) -> None:
        self._arenas, self._state, self._effort = arenas, arenas.state, effort
        self._passes = 0  # over the plan
        self._segments_kept = 0  # of the heap, when the plan had settled
        self._move_after, self._move_wait = 0, 1  # passes ever before the arena moves again, and from the last move on
        self._moves_seen = self._moving_passes = 0  # of pages, at the last boundary; passes in a row with any
        self._growths_seen = self._boundary_at = 0  # of the paging, and passes ever, at the last boundary
        self._quiet_passes = 0  # without a growth that are to come before what one needed goes; 0: it has gone
        self._patience = decisions.quiet_passes()  # so many after the next growth
        self.settled = False  #: no plan is expected soon

    def begin_plan(self) -> None:
        """A plan is put in force."""
        if self._arenas.memory.source.paged:
            self._arenas.memory.paging.allowance.begin_plan()
        self._passes = self._segments_kept = self._moving_passes = self._growths_seen = self._quiet_passes = 0
        self._move_after, self._move_wait, self._patience = 0, 1, decisions.quiet_passes()

    def at_boundary(self) -> int:
        """Give back what the switch left behind, then what deviations needed; passes until it is to be done again."""
        arenas = self._arenas
        if arenas.memory.source.paged:
            return self._unmap_unused()
        was_settling = decisions.is_settling(self._passes)
        self._passes += 1
        settles = decisions.is_settling(self._passes)
        arenas.memory.release_unused(decisions.idle_passes(self._passes))
        num_segments, kept = len(arenas.memory.segments), self._segments_kept
        if was_settling and not settles:
            self._segments_kept = num_segments
        return settles or num_segments > kept

    def _unmap_unused(self) -> int:
        """The same by pages: what a deviation needed goes after passes without any, ever more if they come again."""
        paging, record = self._arenas.memory.paging, self._state.record
        passes, self._boundary_at = record.steps_ever - self._boundary_at, record.steps_ever
        self._moving_passes = self._moving_passes + 1 if paging.num_moves != self._moves_seen else 0
        self._moves_seen = paging.num_moves
        if self._moves_out_of_the_way():
            return 1  # a pass takes its pages from where the arena was
        self._passes += 1
        if self._passes == 1:
            paging.end_gathering()
            return 1  # the plan's first pass does
        if decisions.is_settling(self._passes):
            paging.release()
            return 1
        if paging.num_growths != self._growths_seen:
            self._growths_seen, self._quiet_passes = paging.num_growths, self._patience
            self._patience *= 2
        elif self._quiet_passes > 0:
            self._quiet_passes = max(0, self._quiet_passes - passes)
            if self._quiet_passes == 0:
                paging.release()
        return 1 if self._moving_passes > 0 else self._quiet_passes

    @property
    def moves_pages(self) -> bool:
        """Whether pages move in pass after pass, which waits for the whole device each time."""
        return decisions.moves_in_each_pass(self._moving_passes)

    def _moves_out_of_the_way(self) -> bool:
        """Move the arena if what lives there displaced requests in a pass; if that does not help, ever more rarely.

        Whether it moved.
        """
        record = self._state.record
        length, has_kinds = record.ring_end - record.ring_start, record.num_tapes > 1
        if (
            not decisions.may_move_arena(self._state.num_displaced, length, has_kinds=has_kinds)
            or record.steps_ever < self._move_after
            or record.gaps  # there, requests that come in other numbers take one another's places: moving does not help
            or self._arenas.memory.is_capturing
            or self._effort.is_spent
        ):
            return False
        self._move_wait = decisions.next_move_wait(record.steps_ever - self._move_after, self._move_wait)
        self._move_after = record.steps_ever + self._move_wait
        with self._effort.counted():
            return self._arenas.move()

    def settle(self) -> None:
        """No step repeats so far: pages move no more for the last few percent, which would cost it at every step."""
        state, arenas = self._state, self._arenas
        if self.settled or state.record.memory_is_short:
            return
        self.settled = True
        if arenas.memory.source.paged:
            arenas.memory.paging.allowance.loosen()
            return
        state.write(allocating_persistent=0)
