"""Plans where a program fills the device, and memory comes by pages: when one is put in force, and when it is left.

Contract: what a plan does not know is packed worse beside it than by the heap alone. Where that could be the end of the
program, the heap serves until steps need no more than those before, a plan has to know the steps that need most, and
goes once the program does something else for which idle parts of the arena are not enough. Anywhere else nothing of
this holds.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stalloc.runtime import decisions
from stalloc.runtime.memory import DeviceMemory

if TYPE_CHECKING:
    from stalloc.runtime.steady_marks import SteadySteps


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

    def skip(self, steps: "SteadySteps") -> None:
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
        if self._memory.source.paged and self._memory.paging.fills_part():
            self._state.record.policy.small_apart = 1

    def most_misses(self, elsewhere: int) -> int:
        """By how many requests misses may outnumber hits before a plan is left, which is `elsewhere` where none fills.

        What a step has and the plan does not know lies scattered over its arena; as long as it is little that does not
        matter to the rest of the step.
        """
        return decisions.most_misses_where(elsewhere, may_fill=self.may_fill())

    def _is_full(self) -> bool:
        return self._memory.source.paged and self._memory.paging.fills_device()

    def may_fill(self) -> bool:
        return self._memory.source.paged and self._memory.paging.fills_half()

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
        return self._is_full() or self._goes_beyond(size_bytes)

    def _goes_beyond(self, size_bytes: int) -> bool:
        """Whether a step needs clearly more than those before, so that nobody knows how much it will be."""
        highest_bytes = max(self._highest_bytes, self._state.record.policy.expected_peak)
        needed_bytes = self._state.record.total.allocated_bytes + size_bytes
        if not decisions.needs_more(needed_bytes, highest_bytes) or not self._memory.source.paged:
            return False
        return decisions.is_large_part(needed_bytes, self._memory.paging.device_bytes)
