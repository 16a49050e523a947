"""The arena of the plan in force: taken, served from, given up.

Contract: what lives in an arena keeps its place, whichever plan comes or goes, and no byte passes from one stream to
another. Where memory comes by pages, every plan gets addresses of its own, whose pages come as it is followed, from
what is free elsewhere first. Where it comes in blocks, an arena is one of them, which goes back before the
next is taken.
"""

from typing import Any

from stalloc.core import constants
from stalloc.core.arena_schedule import ArenaSchedule, on_pages
from stalloc.core.constants import GRANULE
from stalloc.runtime import decisions
from stalloc.runtime.memory import DeviceMemory


class Arenas:
    """The arena in force on one device, and what is left of those before it."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory, self.state = memory, memory.state
        memory.arenas = self
        self.arena: Any = None  #: the memory of the arena in place
        self.schedule: ArenaSchedule | None = None  #: what is served by pages
        self._events: list[Any] = []  # of entries whose memory streams share, used again by the next plan
        self._inherited: Any = None  # the arena that a parent of this process held when it forked

    def put_in_force(self, schedule: ArenaSchedule) -> bool:
        """Serve a schedule, or several, from now on; False if the device has no room for the arena.

        By pages there always is room: they come when they are needed. In blocks, a plan stays in force as long as
        anything lives in its arena: two would be held.
        """
        state, record = self.state, self.state.record
        expected_bytes = max(record.policy.expected_peak, state.allocated_peak_bytes, schedule.arena_bytes)
        if self.memory.source.paged:
            return self._serve_by_pages(schedule, expected_bytes)
        if self.arena is not None and not state.arena.is_idle():
            return False
        self.drop_schedule()
        if self.arena is not None:  # it could not be dissolved
            return False
        self.memory.release_unused()
        memory = self.memory.malloc(schedule.arena_bytes)
        if memory is None:
            return False
        self._install(schedule, 0)
        self.serve_from(memory, schedule.arena_bytes)
        state.write(expected_peak=expected_bytes, memory_is_short=0)
        state.triggers.at_boundary()
        return True

    def serve_from(self, memory: Any, arena_bytes: int) -> None:
        """Serve the schedule that was just installed from fresh memory."""
        self.arena = memory
        self.state.arena.count(arena_bytes)
        self.state.arena.serve(memory.ptr, arena_bytes)

    def _install(self, schedule: ArenaSchedule, cursor: int) -> None:
        """Follow a schedule from an entry on, ready to secure its handovers, without serving it yet."""
        self.state.arena.install(schedule, cursor)
        if schedule.cross_streams:
            self._order_handovers(schedule.gives)

    def _order_handovers(self, gives: Any) -> None:
        import cupy

        tables = self.state.arena.schedule
        assert tables is not None
        with self.memory.source.at_device(capturing=False):
            while len(self._events) < len(tables.entries):
                self._events.append(cupy.cuda.Event(disable_timing=True))
        self.state.arena.share_intervals(gives, [event.ptr for event in self._events])

    # --- by pages: a plan never waits for memory, and what lives in its way costs its own pages and no more

    def _serve_by_pages(self, schedule: ArenaSchedule, expected_bytes: int) -> bool:
        """Serve a schedule from addresses without memory; False if the device could never hold it.

        `expected_bytes`: what the program is taken to need at most.
        """
        fills = decisions.is_large_part(expected_bytes, self.memory.paging.device_bytes)
        schedule, source = on_pages(schedule, apart=not fills), self.memory.source
        most_bytes = source.free_bytes() + self.state.record.statistics.reserved_bytes
        memory = source.reserve(schedule.arena_bytes) if schedule.arena_bytes <= most_bytes else None
        if memory is None:
            return False
        self.drop_schedule()
        if self.arena is not None:  # it could not be dissolved
            return False
        self._serve_on(memory, schedule, 0, anew=True)
        self.memory.paging.gather()
        self.state.write(expected_peak=expected_bytes, memory_is_short=0)
        self.state.triggers.at_boundary()
        return True

    def _serve_on(self, memory: Any, schedule: ArenaSchedule, cursor: int, *, anew: bool) -> None:
        self._install(schedule, cursor)
        self.arena, self.schedule = memory, schedule
        self.state.arena.serve_pages(memory.ptr, memory.size_bytes, anew=anew)

    def move(self) -> bool:
        """Serve the plan in force from other addresses: what is in its way keeps its place, and pages follow.

        False if there are no others.
        """
        state, record, schedule = self.state, self.state.record, self.schedule
        memory = self.memory.source.reserve(self.arena.size_bytes) if schedule is not None else None
        if schedule is None or memory is None or state.arena.schedule is None:
            return False
        follow, ask_after = record.follow, record.triggers.ask_after_misses
        begin, end, cursor = follow.cycle_start, follow.cycle_end, follow.cursor
        learnt = state.arena.schedule.lifespans
        followed = {  # where it is remains as sure
            "history_count": follow.history_count,
            "miss_run": follow.miss_run,
            "misses_over_matches": follow.misses_over_matches,
            "last_miss": record.iterations.last_miss,
            "bad_iterations": record.iterations.bad_iterations,
            "conflicts_before": record.iterations.conflicts - record.iterations.iteration_unplanned,  # none any more
        }
        self.drop_schedule()
        if self.arena is not None:  # it could not be dissolved
            state.write(mode=constants.MODE_PLANNED)
            state.triggers.after_misses(ask_after)
            return False
        self._serve_on(memory, schedule, cursor, anew=False)
        state.arena.schedule.lifespans[:] = learnt
        state.arena.begin_step(begin, end, cursor)
        state.write(**followed)
        state.triggers.after_misses(ask_after)
        return True

    def back(self, position: int) -> None:
        """Map what the place of a schedule's entry lacks, if there is memory for it."""
        if self.arena is not None and self.memory.source.paged:
            self.memory.paging.back(position)
        if self.state.record.triggers.ask_after_iterations:  # iterations are counted in which pages move
            self.state.triggers.at_boundary()

    # --- giving up

    def drop_schedule(self) -> None:
        """Serve nothing from the plan any more; its arena becomes an ordinary segment: what is free in it is usable."""
        self.state.arena.drop_schedule()
        if self.arena is None or not self._end_sharing():
            return
        bases = self.state.arena.dissolve()
        for base in bases:
            self.memory.segments[base] = self.arena  # the memory goes back to the device with the last of them
        if bases:
            self.arena = None

    def _end_sharing(self) -> bool:
        """Let no two streams share memory of the arena any more; False if that cannot be now."""
        if not self.state.record.hot.has_handovers:
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
        if state.record.plan.arena_bytes and self.arena is None:
            self.arena = self.memory.segments.get(state.record.plan.arena)
        held = {base: self.memory.holder_of(base) for base in bases}
        self.memory.segments = held  # what is in neither goes back now
        if not state.record.plan.arena_bytes:
            self.arena = None
        if self.memory.source.paged:
            self.memory.paging.match()
        state.arena.count(sum(sizes) + state.record.plan.arena_mapped_bytes - state.record.statistics.reserved_bytes)

    def forked(self) -> None:
        """This process is a fork: the arena is used as long as anything lives in it, and never given back."""
        self._inherited, self.arena = self.arena, None
