"""What is meant to last, told from what comes and goes before any of it has died.

Contract: such requests get segments that hold nothing else; among what is transient they would keep that memory from
going back to the device when a plan takes over. A program that begins is taken to make what lasts (a model).
"""

from stalloc.runtime import decisions
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.recording import Recording


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
