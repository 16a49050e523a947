"""The arena of the plan in force, and those of plans before it: taken, taken over, shrunk, given up.

Contract: what lives in an arena keeps its place, whichever plan comes or goes, and no byte passes from one stream to
another. Where memory comes by pages, every plan gets addresses of its own, whose pages come as it is followed, from
what is free elsewhere first. docs/runtime.md, "Giving a plan up", says when two arenas are held otherwise.
"""

from typing import TYPE_CHECKING, Any

from stalloc.core import constants
from stalloc.core.arena_tape import ArenaTape
from stalloc.core.constants import GRANULE
from stalloc.core.regions import moved_into
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.paged_arena import serve_by_pages

if TYPE_CHECKING:
    from stalloc.core.regions import Region

_CLEARLY_LESS = 0.9  # of an arena: a plan that needs no more gets a smaller one


class Arenas:
    """The arena in force on one device, and what is left of those before it."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory, self.state = memory, memory.state
        memory.arenas = self
        self.arena: Any = None  #: the memory of the arena in place
        self.tape: ArenaTape | None = None  #: what is served by pages
        self.old_arena: list[int] = []  #: bases of the segments that were the arena of a plan before
        self._retired: list[int] = []  # such bases, when a new arena was taken beside: nothing is served from there
        self._lendable = 0  # State.cell_streams, while nothing is lent
        self._too_large: ArenaTape | None = None  # what an arena that was taken over serves, if it may be too large
        self._events: list[Any] = []  # of entries whose memory streams share, used again by the next plan
        self._inherited: Any = None  # the arena that a parent of this process held when it forked

    @property
    def retired(self) -> bool:
        """Whether an arena of a plan before holds live blocks, and serves nothing."""
        return bool(self._retired)

    @property
    def too_large(self) -> bool:
        """Whether the arena in place may be larger than its plan needs."""
        return self._too_large is not None

    def put_in_force(self, tape: ArenaTape) -> bool:
        """Serve a tape, or several, from now on; False if the device has no room for the arena.

        By pages there always is room: they come when they are needed. Else, while another plan is in force its arena
        is taken over if every stream's part of it is large enough; if not, and nothing lives in it, it goes back before
        the new one is taken; otherwise that is taken beside it, and if there is no room for both the old plan stays in
        force.
        """
        arena_bytes, shared = tape.arena_bytes, tape.cross_streams
        state, memory = self.state, None
        expected_bytes = max(state.record.expected_peak, state.allocated_peak_bytes, arena_bytes)
        if self.memory.source.paged:
            return serve_by_pages(self, tape, expected_bytes)
        self.lend_again()
        if self.holds_twice(tape):
            memory = self.memory.malloc(arena_bytes)
            if memory is None:
                return False
        elif self.arena is not None and (shared or not self._fits_arena(tape)):
            state.arena.drop_tape()
            self.memory.release_unused()
        self.drop_tape()
        if self.arena is not None:  # it could not be dissolved
            return False
        self._too_large = None
        self.use_retired()
        if memory is not None and self.old_arena:
            self._retire(self.old_arena)
        if memory is not None or shared or not self._take_over(tape):
            memory = memory if memory is not None else self.memory.malloc(arena_bytes)
            if memory is None:
                return False
            state.arena.install(tape)
            if shared:
                self.order_handovers(tape.gives)
            self.serve_from(memory, arena_bytes)
        state.write(ask_at_boundary=1, expected_peak=expected_bytes, memory_is_short=0)
        return True

    def serve_from(self, memory: Any, arena_bytes: int) -> None:
        """Serve the tape that was just installed from fresh memory."""
        self.arena = memory
        self.state.arena.count(arena_bytes)
        self.state.arena.serve(memory.ptr, arena_bytes)

    def holds_twice(self, tape: ArenaTape) -> bool:
        """Whether a tape could be put in force now only with a new arena beside the one in place."""
        fits = not tape.cross_streams and self._fits_arena(tape)
        if self.arena is None or fits or self.memory.source.paged:
            return False
        room = self.memory.source.free_bytes() + self.state.record.arena_bytes >= tape.arena_bytes
        return not (room and self.state.arena.is_idle())

    def takes_over_bytes(self, tape: ArenaTape) -> int:
        """Bytes of the last plan's arena if a tape can be served from there, else 0."""
        regions = self.old_regions()
        fits = moved_into(regions, tape.size, tape.stream, tape.offset) is not None
        return sum(region.size_bytes for region in regions) if fits else 0

    def _fits_arena(self, tape: ArenaTape) -> bool:
        """Whether the arena in place can become that of a tape."""
        return moved_into(self.state.arena.regions(), tape.size, tape.stream, tape.offset) is not None

    def _take_over(self, tape: ArenaTape) -> bool:
        """Make the arena of the last plan the arena again, around what still lives there; False if that cannot be."""
        bases, arena_bytes = self.old_arena, tape.arena_bytes
        regions, self.old_arena = self.old_regions(), []
        if not regions or not self.state.arena.take_over_segments(bases, tape):
            return False
        for base in bases:  # parts of one piece of memory
            self.arena = self.memory.segments.pop(base)
        if arena_bytes < _CLEARLY_LESS * self.state.record.arena_bytes:
            self._too_large = tape
        return True

    def order_handovers(self, gives: Any) -> None:
        """Get ready to secure the hand-overs of the tape that was just installed."""
        import cupy

        tables = self.state.arena.tape
        assert tables is not None
        with self.memory.source.at_device(capturing=False):
            while len(self._events) < len(tables.entries):
                self._events.append(cupy.cuda.Event(disable_timing=True))
        self.state.arena.share_cells(gives, [event.ptr for event in self._events])

    # --- giving up

    def drop_tape(self) -> None:
        """Serve nothing from the plan any more; its arena becomes an ordinary segment: what is free in it is usable."""
        self.state.arena.drop_tape()
        if self.arena is None or not self._end_sharing():
            return
        bases = self.state.arena.dissolve()
        for base in bases:
            self.memory.segments[base] = self.arena  # the memory goes back to the device with the last of them
        if bases:
            self.old_arena = [] if self.memory.source.paged else bases
            self.arena = None

    def _end_sharing(self) -> bool:
        """Let no two streams share memory of the arena any more; False if that cannot be now."""
        if not self.state.record.has_handovers:
            return True
        if self.memory.is_capturing:
            return False  # a capture must not wait for the device
        self.state.arena.end_sharing()
        self.memory.source.wait()
        return True

    def give_back(self) -> None:
        """Give back the arena of a plan that was dropped; it must be empty."""
        if self.arena is not None:
            self.memory.release_unused()
        assert self.arena is None

    def before_release(self) -> None:
        """Give back the arena if nothing is served from it and nothing lives in it."""
        arena_bytes = self.state.arena.forget() if self.arena is not None else 0
        if arena_bytes:
            memory, self.arena = self.arena, None
            if self.memory.poison is not None:
                whole = [(memory.ptr, arena_bytes)]
                held = [(page, GRANULE) for page in memory.mapped()] if self.memory.source.paged else whole
                for address, size_bytes in held:
                    self.memory.poison.returned(address, size_bytes)
            self.memory.let_go(memory)

    def match(self) -> None:
        """Make the memory that is held agree with the core's tables after an interrupted call."""
        state = self.state
        bases, sizes = (column.tolist() for column in state.heap.segments())
        for base in bases:
            state.heap.reuse_segment(base)  # nothing is being taken over any more
        if state.record.arena_bytes and self.arena is None:
            self.arena = self.memory.segments.get(state.record.arena)
        held = {base: self.memory.holder_of(base) for base in bases}
        self.memory.segments = held  # what is in neither goes back now
        if not state.record.arena_bytes:
            self.arena = None
        if self.memory.source.paged:
            self.memory.paging.match()
        state.arena.count(sum(sizes) + state.record.arena_mapped_bytes - state.record.reserved_bytes)

    def forked(self) -> None:
        """This process is a fork: the arena is used as long as anything lives in it, and never given back."""
        self._inherited, self.arena = self.arena, None

    # --- arenas of plans before

    def old_regions(self) -> "list[Region]":
        """The regions of the arena of the last plan, if it is still there to be taken over."""
        there = all(base in self.memory.segments for base in self.old_arena)
        return self.state.heap.segment_regions(self.old_arena) if there else []

    def add_old(self, pool: int, size_bytes: int) -> None:
        """Take one segment for a pool, to be taken over by a plan as an old arena is."""
        memory = self.memory.malloc(size_bytes)
        if memory is None:
            return
        self.memory.segments[memory.ptr] = memory
        self.old_arena = [memory.ptr]
        if not self.state.heap.give_segment(pool, memory.ptr, size_bytes):
            del self.memory.segments[memory.ptr]

    def _retire(self, bases: list[int]) -> None:
        """Serve nothing more from the segments of an old arena, so that they go back with the last block there."""
        self._retired = bases if self.state.heap.retire(bases) else []

    def use_retired(self) -> bool:
        """Serve from an old arena again; whether there is one."""
        bases, self._retired = self._retired, []
        for base in bases:
            self.state.heap.reuse_segment(base)
        return bool(bases)

    def remove_free_segments(self, idle_passes: int) -> dict[int, int]:
        """Take every segment without live blocks out of the core's tables: base -> bytes."""
        retired = self._retired
        self.use_retired()
        taken = self.state.heap.remove_free_segments(idle_passes)
        if retired and retired[0] not in taken:  # all of them go, or none
            self._retire(retired)
        return taken

    def stop_lending(self) -> None:
        """Lend nothing more of the arena, as long as there is memory elsewhere: it is to be empty soon."""
        self._lendable = self.state.record.cell_streams
        self.state.write(cell_streams=0)

    def lend_again(self) -> bool:
        """Lend from the arena again; whether that had stopped."""
        lendable, self._lendable = self._lendable, 0
        if lendable and self.state.record.arena_bytes:
            self.state.write(cell_streams=lendable)
        return lendable != 0

    # --- size

    def shrink(self) -> bool:
        """Change an arena that is larger than its plan needs for one that is not, if nothing lives in it now.

        False if there is none any more, since somebody else took its memory.
        """
        state, plan = self.state, self._too_large
        if plan is None or self.arena is None or not state.arena.is_idle():
            return True
        begin, end, cursor = state.record.ring_start, state.record.ring_end, state.record.cursor
        ask_after = state.record.ask_after_misses
        state.arena.drop_tape()
        self.memory.release_unused()
        if self.arena is not None:  # another thread was quicker: something lives there now
            state.write(mode=constants.MODE_REPLAY, ask_after_misses=ask_after)
            return True
        self._too_large = None
        memory = self.memory.malloc(plan.arena_bytes)
        if memory is None:
            return False
        state.arena.install(plan, cursor)
        state.arena.begin_step(begin, end, cursor)
        self.serve_from(memory, plan.arena_bytes)
        state.write(ask_after_misses=ask_after)
        return True
