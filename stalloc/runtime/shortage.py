"""What happens when a request finds no memory: a segment from the device, or the reason why there is none.

Contract: memory is refused only after everything that holds no live block was given back, cycles of garbage were
collected, and what the program can do without for now was evicted, if anything may be.
"""

import gc

from stalloc.core import constants
from stalloc.figures import human_bytes
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.interruptions import driver_status
from stalloc.runtime.out_of_memory_text import FULL_TABLES, full_table_text
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Phase
from stalloc.runtime.segment_sizes import segment_bytes, tight_segment_bytes
from stalloc.runtime.status import Status
from stalloc.sizes import whole_pages

#: after these "the process must be terminated and relaunched" (CUDA driver API, CUresult); and an error of the memory
_CONTEXT_LOST = frozenset((214, 700, 702, 714, 715, 716, 717, 718, 719))


class Shortage:
    """The segments that requests lack, on one device."""

    def __init__(self, arenas: Arenas, recording: Recording, status: Status) -> None:
        self._arenas, self._memory, self._state = arenas, arenas.memory, arenas.state
        self._recording, self._status = recording, status
        self._lacks_arena = False

    def add_segment(self, pool: int, size_bytes: int, *, planned: bool) -> bool:
        """Take a segment for a request of a pool; False if there is none, and why is set as the error's text.

        What a plan does not serve is the exception: it gets no more than it needs.
        """
        state, memory = self._state, self._memory
        kind = state.heap.pool_kind(pool)
        if memory.source.paged:
            if self._grow(pool, size_bytes):
                return True
            if not memory.source.refusal:
                return self._refuse(state.heap.full_table(), size_bytes)
        wanted, least = segment_bytes(kind, size_bytes), whole_pages(size_bytes)
        if state.record.policy.memory_is_short and kind == constants.GENERAL_KIND:
            wanted = tight_segment_bytes(size_bytes)
        if planned and kind == constants.GENERAL_KIND:
            wanted = least
        if memory.take_segment(pool, wanted) or memory.take_segment(pool, least):
            return True
        while self._evicts(size_bytes):
            if memory.take_segment(pool, least):
                return True
        if self._collects(size_bytes) and memory.take_segment(pool, least):
            return True
        full = state.heap.full_table()
        if full:
            memory.release_unused()  # segments without blocks take rows too
            if memory.take_segment(pool, least):
                return True
        return self._refuse(full, size_bytes)

    def _refuse(self, full: str, size_bytes: int) -> bool:
        """Say why a request is not served: a table is `full`, or (empty) there is no memory. False."""
        if full:
            self._state.set_out_of_memory_text(full_table_text(self._state, full, size_bytes))
        else:
            self._memory.lacking_bytes = max(self._memory.lacking_bytes, size_bytes)
            self._explain(size_bytes)
        return False

    def _grow(self, pool: int, size_bytes: int) -> bool:
        paging = self._memory.paging
        if paging.grow(pool, size_bytes):
            return True
        while self._evicts(size_bytes):  # before garbage is collected, which takes longer
            if paging.grow(pool, size_bytes):
                return True
        return self._collects(size_bytes) and paging.grow(pool, size_bytes)

    def is_enough_in_pieces(self, size_bytes: int) -> bool:
        """Whether a request would be served if all that is free were in one piece, and may be made so."""
        record = self._state.record
        unused_bytes = record.statistics.reserved_bytes - record.total.allocated_bytes - record.shared.deferred_bytes
        return not self._memory.is_capturing and self._memory.source.free_bytes() + unused_bytes >= size_bytes

    def _collects(self, size_bytes: int) -> bool:
        """Collect arrays in reference cycles, as CuPy's own pool does it; False if that cannot help."""
        if self._state.heap.largest_free_bytes() >= size_bytes:
            return False  # the core finds that block
        if self._memory.source.free_bytes() + self._state.record.statistics.reserved_bytes < size_bytes:
            return False  # were all of it free
        gc.collect()
        return True

    def _evicts(self, size_bytes: int) -> bool:
        """Have so much let go of that the program can do without; False if there is nothing, or no use in it."""
        if self._memory.is_capturing or self._state.heap.full_table():
            return False
        return self._memory.eviction.makes_room(size_bytes)

    def explain_refusal(self, table: int, size_bytes: int) -> None:
        if table:
            self._state.set_out_of_memory_text(full_table_text(self._state, FULL_TABLES[table], size_bytes))
        else:
            self._explain(size_bytes)

    def _explain(self, size_bytes: int) -> None:
        from stalloc.runtime.out_of_memory_text import out_of_memory_text

        device, source = self._memory.device, self._memory.source
        free = max(0, source.free_bytes())
        self._recording.refusals.note(free)
        text = out_of_memory_text(
            device,
            self._state,
            size_bytes,
            free,
            limit_bytes=source.limit_bytes,
            by_pages=source.paged,
            call_sites=self._recording.call_sites,
        )
        text += self._memory.eviction.told(size_bytes)
        if self._memory.asleep_bytes:
            text += f" Of what is reserved, {human_bytes(self._memory.asleep_bytes)} are asleep, and not on the device."
        self._state.set_out_of_memory_text(text)

    def explain_failure(self, size_bytes: int, error: BaseException) -> None:
        status, advice = driver_status(error), "try it again"
        if status in _CONTEXT_LOST:
            advice = (
                "the GPU does nothing more for this process, and what it was given before may be the reason: run the "
                "program anew with CUDA_LAUNCH_BLOCKING=1, which stops at the call that fails"
            )
        elif status:
            advice = f"see with nvidia-smi whether device {self._memory.device.index} is in use, and in which mode"
        text = (
            f"stalloc: a request of {size_bytes} bytes was not served, since the way to memory failed "
            f"({type(error).__name__}: {error}): {advice}."
        )
        self._state.set_out_of_memory_text(text, status)

    # --- room for an arena, made by moving what lives

    def forget_arena(self) -> None:
        self._lacks_arena = False

    def ask_for_arena(self, arena_bytes: int, *, may_move: bool) -> bool:
        """Whether an arena finds no room now, but may after a mark at which what lives is moved; asked for once."""
        if self._lacks_arena or not may_move:
            self._lacks_arena = False
            return False
        if self._memory.has_room(arena_bytes):
            return False
        self._memory.lacking_bytes, self._lacks_arena = max(self._memory.lacking_bytes, arena_bytes), True
        return True

    def take_lacking(self) -> tuple[int, bool]:
        """The bytes there was hardly room for since this was asked, and whether for an arena, which is tried again."""
        with self._memory.lock:
            lacking, self._memory.lacking_bytes = self._memory.lacking_bytes, 0
            if self._lacks_arena and self._status.phase is Phase.PLANNING:
                self._state.triggers.at_boundary()
            return lacking, self._lacks_arena
