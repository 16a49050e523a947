"""A step that leaves out what is planned, and needs more than any before it, is served by the heap to its end.

Contract: what matches the plan by chance would be scattered over the arena, and keep parts of pages from everything
else. So the plan stands aside from there to the next mark: its arena moves to addresses without memory, and the heap
has all that is free where it was. A plan that never fits well does so so many times in a row, and then serves what it
can.
"""

from stalloc.runtime.arenas import Arenas
from stalloc.runtime.paged_arena import move
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Phase
from stalloc.runtime.status import Status

_LEFT_OUT, _RING_SHARE = 16, 32  # requests, and of the ring one in so many, that a step has to leave out
_MORE_BYTES, _MORE_SHIFT = 8 << 20, 5  # more than was expected, and 1 / 2 ** shift of that
_AHEAD_SHIFT = 3  # 1 / 2 ** shift of what it will need is still to come
_MOST_IN_A_ROW = 64  # steps in which it stood aside, with none in between that it served


class StandingAside:
    """Of the plans of one device."""

    def __init__(self, status: Status, arenas: Arenas, recording: Recording) -> None:
        self._status, self._arenas, self._state, self._recording = status, arenas, arenas.state, recording
        self._in_a_row = 0
        self._place = self._followed = 0  # at the last mark: entries from where the ring begins, and of tapes ever
        self._allocated_bytes = 0  # then
        self._num_plans = 0  # put in force by then

    def begins(self) -> bool:
        """A request needs pages: whether the plan stands aside from now on, so that there may be some."""
        record = self._state.record
        if record.stands_aside or self._in_a_row >= _MOST_IN_A_ROW or self._status.phase is not Phase.PLANNED:
            return False
        if record.has_handovers or record.num_strands or record.private_kind or not self._recording.step_times_ns:
            return False
        if self._num_plans != self._status.num_plans or not (self._is_another() and self._matters()):
            return False
        with self._status.effort.counted():
            if not move(self._arenas):
                return False
        self._in_a_row += 1
        self._state.write(stands_aside=1)
        return True

    def _is_another(self) -> bool:
        """Whether much of what is planned for this step was not asked for, or others are where it was to be."""
        record = self._state.record
        length = record.ring_end - record.ring_start
        left_out = (self._place_now - self._place - (self._followed_ever - self._followed)) % length
        least = max(_LEFT_OUT, length // _RING_SHARE)
        return record.step_count > 0 and (least <= left_out <= length - least or self._state.num_displaced >= least)

    @property
    def _place_now(self) -> int:
        return int(self._state.record.cursor - self._state.record.ring_start)

    @property
    def _followed_ever(self) -> int:
        return int(self._state.record.hits + self._state.record.conflicts)

    @property
    def _is_lost(self) -> bool:
        """Whether most requests of this pass are not as planned."""
        record = self._state.record
        lost = record.step_misses - record.step_unplanned
        return bool(lost >= _LEFT_OUT and lost > record.hits - record.hits_before)

    def _matters(self) -> bool:
        """Whether the step will need much more than now, should the rest of it be as planned, and more than expected.

        Where most of it is not as planned, it is enough that half of what is held is allocated.
        """
        record, tape = self._state.record, self._arenas.tape
        allocated_bytes = int(record.total.allocated_bytes)
        if self._is_lost and 2 * allocated_bytes > record.reserved_bytes:
            return True
        began = record.ring_start + self._place
        if tape is None or tape.ahead is None or max(began, record.cursor) >= len(tape.ahead):
            return False
        ahead_bytes, expected_bytes = int(tape.ahead[record.cursor]), self._allocated_bytes + int(tape.ahead[began])
        is_more = allocated_bytes + ahead_bytes > expected_bytes + max(_MORE_BYTES, expected_bytes >> _MORE_SHIFT)
        return is_more and ahead_bytes << _AHEAD_SHIFT > allocated_bytes + ahead_bytes

    def end(self) -> None:
        """The program marks a step, and where it is on its tape is known."""
        if self._state.record.stands_aside:
            self._state.write(stands_aside=0)
        else:
            self._in_a_row = 0
        self._place, self._followed = self._place_now, self._followed_ever
        self._allocated_bytes = int(self._state.record.total.allocated_bytes)
        self._num_plans = self._status.num_plans
