"""What is meant to last, told from what comes and goes before any of it has died.

Contract: such requests get segments that hold nothing else; among what is transient they would keep that memory from
going back to the device when a plan takes over. A program that begins is taken to make what lasts (a model). Where many
and ever more small blocks live on although nothing told that they would, each in a page of an arena that is gone, small
requests get places no more in which that could go on.
"""

from typing import TYPE_CHECKING

from stalloc.core.constants import APART_FOR_LONG
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.recording import Recording

if TYPE_CHECKING:
    from stalloc.runtime.steady_marks import SteadySteps

_LOOK_STEPS = 8  # from one look at small blocks to the next: those that are there at both live on
_FEW_SMALL, _GROWTHS = 16, 3  # and looks at which they have become more
_STATE_SHARE = 2  # times what a model and its gradients hold that an optimizer may ask for


class Lasting:
    """Whether requests of one device are meant to last."""

    def __init__(self, memory: DeviceMemory, recording: Recording) -> None:
        self._memory, self._state, self._recording = memory, memory.state, recording
        self._building = False
        self._num_steps = 0  # since the last look at small blocks
        self._small: set[int] = set()  # addresses of small blocks among large ones, at the last look
        self._num_small = self._num_growths = 0  # of them that lived on then; looks at which they were more than before

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
        if watching and not self._state.record.allocating_persistent:
            self._make_free()
            if self._memory.source.free_bytes() < _STATE_SHARE * self._state.record.total.allocated_bytes:
                self._memory.save()
            self._state.write(allocating_persistent=1)

    def end_step(self) -> None:
        """The program marks a step."""
        if self._state.record.allocating_persistent:
            self._state.write(allocating_persistent=0)
            self._make_free()  # what did not last, for the next step
        elif self._memory.source.paged:
            self._memory.paging.end_gathering()
        self._num_steps += 1
        if (
            self._num_steps >= _LOOK_STEPS
            and self._state.record.small_apart != APART_FOR_LONG
            and self._memory.source.paged
        ):
            self._num_steps = 0
            before, self._small = self._small, self._state.heap.scattered()
            last, self._num_small = self._num_small, len(before & self._small)
            self._num_growths += self._num_small > last
            if self._num_small > _FEW_SMALL and self._num_growths >= _GROWTHS:
                self._state.record.small_apart = APART_FOR_LONG

    def pass_over(self, steps: "SteadySteps") -> None:
        """Steps went by in which nothing was said to last."""
        self._num_steps += steps.count

    def end(self) -> None:
        """What comes now is not meant to last."""
        if self._state.record.allocating_persistent:
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
