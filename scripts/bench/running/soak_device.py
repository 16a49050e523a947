"""The whole runtime under threads that never stop, on a virtual GPU whose memory is the host's.

Contract: requests go through the entry points that CuPy calls, segments through CuPy's pool, events through CuPy;
plans are put in force, learnt and given up while threads run. Afterwards everything is freed, and what is
left anywhere is a problem that `Soak.run` reports.
"""

import math
import threading
import time
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from running import soak_threads as threads
from running.soak_cycles import MIB, Cycle, make_cycle, not_zero
from stalloc.core import arena, constants
from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.core.entry import cupy_entries
from stalloc.runtime.controller import MARK_STEP
from stalloc.runtime.process import Runtime, start
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.sizes import whole_pages

NUM_THREADS, NUM_SLOTS, RING_ENTRIES = 4, 2048, 256
CHUNK = 20_000  # operations between two looks at what is to be done
ROAM, MIXED, PLANNED, LEARN = range(4)  # what the threads are at
_PHASE_OPERATIONS = 1_000_000


@dataclass
class Result:
    operations: int
    seed: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _length(row: int, table: np.ndarray) -> int:
    """How many rows of a table a chain has that begins with one of them; row 0 is none."""
    count = 0
    while row:
        count, row = count + 1, int(table["next"][row])
    return count


class Soak:
    def __init__(self, seed: int, total_bytes: int = 3 << 30) -> None:
        from stalloc import device as devices
        from stalloc.device import VirtualGPU

        devices.activate("virtual", VirtualGPU(total_bytes=total_bytes, copy_limit_bytes=None))
        import cupy

        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.runtime: Runtime = start(Settings(plan_wait_seconds=0.0, planning_share=math.inf, max_plans=1 << 40))
        self.controller = self.runtime.controllers[0]
        self.state = self.controller.state
        self.allocate, self.free = cupy_entries(self.runtime.states.ctypes.data)
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self.streams = np.array([0, *(stream.ptr for stream in self._streams)], np.int64)
        self.slots = np.zeros((NUM_SLOTS, threads.SLOT_ROW), np.int64)
        self.own = np.zeros((NUM_THREADS, RING_ENTRIES, threads.SLOT_ROW), np.int64)
        self.counts = np.zeros((NUM_THREADS + 1, threads.COUNTS), np.int64)
        self.counts[:, threads.SEED] = self.rng.integers(1, 1 << 60, NUM_THREADS + 1)
        self.counts[:, threads.NEXT_TAG] = np.arange(NUM_THREADS + 1) + 0x5A << 52
        self.phase, self.cycle = ROAM, make_cycle(self.rng, 64, largest=MIB)
        self.happened: dict[str, int] = {}
        self._errors: list[str] = []

    # --- the threads

    def _work(self, index: int, operations: int) -> None:
        try:
            counts = self.counts[index]
            while counts[threads.OPERATIONS] < operations and not self._errors:
                cycle, phase = self.cycle, self.phase
                follows = index < {ROAM: 0, MIXED: 2, PLANNED: 1, LEARN: 1}[phase]
                if follows:
                    self._follow(index, cycle, phase)
                else:
                    self._roam(index, cycle, 512 if phase in (PLANNED, LEARN) else 1 << 40)
            for row in self.own[index]:
                if row[threads.ADDRESS]:
                    threads.empty_slot(row.ctypes.data, self.free, counts.ctypes.data)
        except BaseException as error:
            self._errors.append(repr(error))
            raise

    def _roam(self, index: int, cycle: Cycle, largest: int) -> None:
        arguments = self.slots.ctypes.data, NUM_SLOTS, self.streams, cycle.size, largest
        address = self.counts[index].ctypes.data
        threads.roam(self.state.address, self.allocate, self.free, *arguments, 200, CHUNK, address)

    def _follow(self, index: int, cycle: Cycle, phase: int) -> None:
        deviations = 0 if phase == LEARN else int(self.rng.choice([0, 0, 20, 200]))
        for _ in range(1 if phase == LEARN else 20):
            threads.follow(
                *(self.allocate, self.free, self.own[index].ctypes.data, self.slots.ctypes.data, NUM_SLOTS),
                *(self.streams, cycle.size, cycle.stream, cycle.dying, cycle.first_dying, deviations),
                self.counts[index].ctypes.data,
            )
            if phase == LEARN:
                self.controller.mark(MARK_STEP, "")

    # --- what happens to them

    def _note(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1

    def _put_in_force(self) -> None:
        cycle, controller = self.cycle, self.controller
        begins: tuple[int, ...] = ()
        columns = [cycle.size, cycle.stream, cycle.offset]
        peak_bytes = cycle.peak_bytes
        if self.rng.random() < 0.3 and not cycle.stream.any():  # two kinds of steps
            other = make_cycle(self.rng, int(self.rng.integers(16, RING_ENTRIES)), largest=MIB)
            columns = [np.append(*pair) for pair in zip(columns, (other.size, other.stream, other.offset), strict=True)]
            begins, peak_bytes = (0, len(cycle)), max(peak_bytes, other.peak_bytes)
        size, stream, offset = columns
        arena_bytes = whole_pages(peak_bytes)
        schedule = ArenaSchedule(arena_bytes=arena_bytes, size=size, stream=stream, offset=offset, begins=begins)
        with controller.lock:
            controller.steady.end()  # as whoever enters Python
            if controller.status.phase is not Phase.PLANNED:
                controller.note_observed()
            if controller.put_in_force(schedule):
                self._note("plans put in force")
            else:
                controller.rest("the arena does not fit")
                self._note("arenas refused")

    def _share(self) -> None:
        row = self.slots[int(self.rng.integers(NUM_SLOTS))].ctypes.data
        address = threads.hold(row)
        if address:
            self.state.share(address, int(self.streams[self.rng.integers(3)]))
            self._note("shares with events")
        threads.let_go(row)

    def _capture(self) -> None:
        graph = int(self.rng.integers(1, 4)), 0
        self.controller.captures.begin(graph)
        self._pause(0.002)
        self.controller.captures.end()
        self._note("captures")
        if self.rng.random() < 0.7:
            for _ in range(self.controller.captures.pools.get(graph, (0, 0))[1]):
                self.controller.captures.release(graph)

    def _limit(self) -> None:
        with self.controller.lock:
            self.controller.memory.source.limit_bytes = max(1, self.state.record.statistics.reserved_bytes)
        self._pause(0.01)
        self.controller.memory.source.limit_bytes = 0
        self._note("limits")

    def _look(self) -> None:
        from stalloc.core.snapshot import segments
        from stalloc.runtime.statistics import report

        found = segments(self.state)
        for segment in found:  # what is shown at one moment is consistent
            assert sum(block.size_bytes for block in segment.blocks) == segment.size_bytes
        report(self.controller)
        self.state.reset_peaks()
        self._note("looks at all blocks")

    def _give_up(self) -> None:
        with self.controller.lock:
            self.controller.rest("the soak")
        self._note("plans given up")

    def _watch_anew(self) -> None:
        with self.controller.lock:
            if self.controller.status.phase is Phase.RESTING:
                self.controller.observe()
                self._note("watches")

    def _empty_cache(self) -> None:
        self.controller.memory.release_unused()
        self._note("empty_cache")

    def _move(self) -> None:
        """Other addresses for the plan in force, and pages of the arena for the heap."""
        with self.controller.lock:
            if self.controller.status.phase is Phase.PLANNED and not self.state.record.hot.private_kind:
                self.controller.arenas.move()
                self._note("moves of the arena")

    @staticmethod
    def _pause(seconds: float) -> None:
        threading.Event().wait(seconds)

    def _next_phase(self) -> None:
        self.phase = int(self.rng.choice([ROAM, MIXED, MIXED, PLANNED, PLANNED, LEARN]))
        if self.rng.random() < 0.7:
            streams, length = int(self.rng.choice([1, 1, 2, 3])), int(self.rng.integers(16, RING_ENTRIES))
            num_sizes = int(self.rng.integers(3, 40))
            self.cycle = make_cycle(self.rng, length, streams=streams, num_sizes=num_sizes, largest=MIB)
        if self.phase in (MIXED, PLANNED):
            self._put_in_force()
        elif self.phase == LEARN:
            self._give_up()
            self._watch_anew()
        elif self.rng.random() < 0.5:
            self._give_up()
            if self.rng.random() < 0.5:
                self._watch_anew()

    # --- from the begin to the end

    def run(self, operations: int) -> Result:
        self._warm_up()
        began = time.perf_counter()
        each = -(-operations // NUM_THREADS)
        workers = [threading.Thread(target=self._work, args=(i, each), daemon=True) for i in range(NUM_THREADS)]
        for worker in workers:
            worker.start()
        changed = 0
        calm = [*[self._share] * 8, self._look, self._empty_cache]
        wild = [*calm * 4, *[self._capture] * 2, *[self._limit] * 2, *[self._put_in_force] * 3, *[self._give_up] * 2]
        wild += [self._watch_anew, self._move, self._move]
        while any(worker.is_alive() for worker in workers):
            done = int(self.counts[:, threads.OPERATIONS].sum())
            if done - changed > min(_PHASE_OPERATIONS, operations // 20):
                changed = done
                self._next_phase()
            actions = calm if self.phase == LEARN else wild
            actions[int(self.rng.integers(len(actions)))]()
            self._pause(0.001)
        for worker in workers:
            worker.join()
        problems = [*self._errors]
        live, counted = int((self.slots[:, threads.ADDRESS] != 0).sum()), self.state.record.total.num_live
        if live != counted:  # the latter without those that wait for other streams
            problems.append(f"{live} blocks live, {counted} are counted")
        threads.empty_all(self.free, self.slots.ctypes.data, NUM_SLOTS, self.counts[-1].ctypes.data)
        problems += self._left_over()
        seconds = time.perf_counter() - began
        return Result(int(self.counts[:, threads.OPERATIONS].sum()), self.seed, seconds, self._figures(), problems)

    def _warm_up(self) -> None:
        """Compile everything first: threads that need no Python would be done before anything happens to them."""
        self._roam(0, self.cycle, 512)
        for _ in range(8):
            self._follow(0, self.cycle, LEARN)
        for action in (self._put_in_force, self._share, self._look, self._give_up, self._empty_cache):
            action()
        self.counts[:, threads.OPERATIONS] = 0
        self.happened.clear()

    def _figures(self) -> dict[str, int]:
        names = {"allocations": threads.ALLOCATIONS, "frees": threads.FREES, "refused": threads.REFUSED}
        names |= {"wrong_words": threads.WRONG_WORDS, "bytes": threads.BYTES, "shares": threads.SHARED}
        totals = self.counts.sum(axis=0)
        counts = "num_segment_allocs", "num_segment_frees", "num_ooms", "num_retries"
        counters = [*(f"statistics.{name}" for name in counts), "iterations.iterations_ever"]
        figures = {name: int(totals[column]) for name, column in names.items()}
        figures["plans_learnt"] = self.controller.status.num_plans - self.happened.get("plans put in force", 0)
        figures |= {name: attrgetter(name)(self.state.record) for name in counters}
        return figures | {"plans": self.controller.status.num_plans} | self.happened

    def _left_over(self) -> list[str]:
        state, controller, problems = self.state, self.controller, []
        wrong = int(self.counts[:, threads.WRONG_WORDS].sum())
        if wrong:
            problems.append(f"{wrong} words were not as they had been written")
        controller.memory.deferred.wait()
        totals = self.counts.sum(axis=0)
        if totals[threads.ALLOCATIONS] != totals[threads.FREES]:
            problems.append("the soak itself lost blocks")
        if state.record.hot.mode == constants.MODE_PLANNED and state.record.plan.arena_bytes:
            arena.arena_is_idle(state.address)  # no lease is left
            schedule = state.arena.schedule
            if schedule is not None:
                leases = schedule.intervals["lease"][: state.record.plan.num_intervals]
                taken = int(np.bitwise_count(schedule.bits.view(np.uint64)).sum())
                if taken != int((leases == constants.UNMAPPED).sum()):
                    problems.append("intervals are taken though nothing lives")
        if state.record.hot.mode == constants.MODE_PLANNED:
            counted = "dynamic.num_leases", "dynamic.leased_bytes", "plan.arena_live"
            problems += [f"{said} though nothing lives" for said in not_zero(state.record, *counted)]
        for graph, (_, users) in list(controller.captures.pools.items()):
            for _ in range(users):
                controller.captures.release(graph)
        controller.drop_plan()
        controller.memory.release_unused()
        zero = ["total.allocated_bytes", "total.requested_bytes", "statistics.reserved_bytes", "total.num_live"]
        zero += ["hot.num_deferred", "shared.deferred_bytes", "lookup.live_count", "statistics.num_unknown_frees"]
        zero += ["lock", "hot.private_kind", "plan.arena_bytes", "plan.arena_live"]
        zero += ["dynamic.num_leases", "dynamic.leased_bytes"]
        problems += [f"{said} at the end" for said in not_zero(state.record, *zero)]
        live = state.tables.live
        in_use = (state.record.lookup.live - live.ctypes.data) // live.itemsize  # the last one
        if live["address"][in_use:].any():
            problems.append("the table of live blocks is not empty")
        if state.tables.segments["address"][1:].any():
            problems.append("segments are left")
        if state.tables.bins["summary"].any():
            problems.append("free blocks are left")
        heap, shared, tables = state.record.heap, state.record.shared, state.tables
        if lost := heap.blocks_used - 1 - _length(heap.free_block_row, tables.blocks):
            problems.append(f"{lost} rows of the table of blocks are lost")
        if lost := shared.stream_uses_used - 1 - _length(shared.free_stream_use, tables.stream_uses):
            problems.append(f"{lost} uses by other streams are lost")
        if controller.memory.segments or controller.arenas.arena is not None:
            problems.append("the controller holds memory")
        from stalloc.device import virtual

        if virtual.used_bytes():
            problems.append(f"the device has {virtual.used_bytes()} bytes in use")
        return problems


def soak(operations: int, seed: int) -> dict[str, Any]:
    return asdict(Soak(seed).run(operations))
