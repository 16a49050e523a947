"""The arena of the plan in force, what goes back to the device beside it, and what is to last.

Contract: what lives in an arena keeps its place, whichever plan comes or goes, and no byte passes from one stream to
another. Where memory comes by pages, every plan gets addresses of its own, whose pages come as it is followed, from
what is free elsewhere first. Where it comes in blocks, an arena is one of them, which goes back before the next is
taken. Nothing is given back in the middle of an iteration, and nothing that iterations still use. What is meant to last
gets segments that hold nothing else: among what is transient it would keep that memory from going back when a plan
takes over. A program that begins is taken to make what lasts (a model).
"""

from typing import Any

from stalloc.core import constants
from stalloc.core.arena_schedule import ArenaSchedule, on_pages
from stalloc.core.constants import GRANULE
from stalloc.runtime import decisions
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import CpuBudget


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
        self.arena = memory
        self.state.arena.count(arena_bytes)
        self.state.arena.serve(memory.ptr, arena_bytes)

    def _install(self, schedule: ArenaSchedule, cursor: int) -> None:
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
        fits = schedule.arena_bytes <= most_bytes
        memory = self.memory.paging.reserve_arena(schedule.arena_bytes) if fits else None
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
        """Serve the plan in force from other addresses, which pages follow to; False if there are none."""
        state, record, schedule = self.state, self.state.record, self.schedule
        memory = self.memory.paging.reserve_arena(self.arena.size_bytes) if schedule is not None else None
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
        if not self.state.record.hot.has_handovers:
            return True
        if self.memory.is_capturing:
            return False  # a capture must not wait for the device
        self.state.arena.end_sharing()
        self.memory.source.wait()
        return True

    def give_back(self) -> None:
        if self.arena is not None:
            self.memory.release_unused()
        assert self.arena is None

    def before_release(self) -> None:
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
        if planned and self._memory.source.paged and not self._memory.paging.peak_is(decisions.fills_device):
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
        """Whether a program that only made what lasts goes on: has an optimizer, marks steps, or frees memory."""
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
        self._moves_seen = self._boundary_at = 0  # of pages, and iterations ever, at the last boundary
        self.begin_plan()

    def begin_plan(self) -> None:
        self._iterations = 0  # over the plan
        self._segments_kept = 0  # of the heap, when the plan had settled
        # iterations ever before the arena moves again, and from the last move on
        self._move_after, self._move_wait = 0, 1
        self._moving_iterations = 0  # in a row with moves of pages
        self._growths_seen = 0  # of the paging, at the last boundary
        self._quiet_iterations = 0  # without a growth that are to come before what one needed goes; 0: it has gone
        self._patience = decisions.quiet_iterations()  # so many after the next growth

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
        ever = record.iterations.iterations_ever
        iterations, self._boundary_at = ever - self._boundary_at, ever
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
            self._patience = decisions.next_patience(self._patience)
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
        """Move the arena if what lives there displaced requests, more rarely if that is no help; whether it moved."""
        record = self._state.record
        length, has_kinds = record.follow.cycle_end - record.follow.cycle_start, record.follow.num_schedules > 1
        if (
            not decisions.may_move_arena(self._state.num_displaced, length, has_kinds=has_kinds)
            or (ever := record.iterations.iterations_ever) < self._move_after
            # where steps have other numbers of requests these take one another's places: moving does not help
            or record.tables.gaps
            or self._arenas.memory.is_capturing
            or self._cpu_budget.is_spent
        ):
            return False
        self._move_wait = decisions.next_move_wait(ever - self._move_after, self._move_wait)
        self._move_after = ever + self._move_wait
        with self._cpu_budget.counted():
            return self._arenas.move()
