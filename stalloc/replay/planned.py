"""stalloc itself: the runtime's own compiled matching, plan and heap, on a device that is only numbers.

Contract: every address comes from stalloc.core, the code that serves torch and CuPy, and what it asks of
Python is answered by the runtime's Controller; only the memory below is made up. Two ways of use:
- "observe" (the default): the runtime watches from the first event, looks for a step that repeats, plans it and
  switches, as `stalloc run` does with a program that it does not know. Steps are marked where the events say so. Unlike
  in a program the boundary of a step waits for the planner however long it takes, so that equal input gives equal
  figures.
- "plan": everything that will be fed is known and planned beforehand, as with a plan from a file. The
  first feed is what is planned, unless `plan_for` was called before; then feeding in pieces changes nothing. The
  reserved peak is that of the plan, in granules of the device, and what tiny requests need, which are never planned.
  Streams share addresses: a plan of a recording says where requests could have lived.
"""

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from stalloc.columns import Column, read_only
from stalloc.compiled import BORROWING, njit
from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.core.constants import ALIGNMENT, BLOCK_FREE, TINY
from stalloc.core.entry import core_entries
from stalloc.core.intrinsics import call3
from stalloc.core.records import state_at
from stalloc.core.snapshot import segments
from stalloc.replay.model import check_capacity, check_rows
from stalloc.replay.offline import NumbersDevice, let_go, make_controller
from stalloc.replay.protocol import BlockMap, Counters, Events, Fed, Kind
from stalloc.replay.settings import as_one_of, setting
from stalloc.runtime.runtime_settings import Settings
from stalloc.sizes import whole_pages
from stalloc.trace import MARK_STEP

_ALLOC, _FREE_COMPLETED = int(Kind.ALLOC), int(Kind.FREE_COMPLETED)
_ALLOCATED, _PEAK_ALLOCATED, _PEAK_RESERVED = range(3)  # words of the model
_HELD, _GIVEN_UP = 1, 2  # in Planned._held
_PATIENT_SECONDS = 1e6


@njit(nogil=True, **BORROWING)
def _run(allocate, release, device, words, held, address, kind, request, size, stream, reserved, allocated):
    """Feed events that are no EMPTY_CACHE; the position of the first that ran out of memory, or their number.

    `allocate` and `release` are the addresses of `core_entries`: the core is not compiled once more for this loop.
    """
    state = state_at(device)
    for i in range(len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            place = call3(allocate, device, size[row], stream[row])
            if place == 0 and size[row] > 0:
                words[_PEAK_RESERVED] = max(words[_PEAK_RESERVED], state.statistics.reserved_bytes)
                return i
            address[row] = place
            if place != 0:
                held[row] = _HELD
                words[_ALLOCATED] += size[row]
                words[_PEAK_ALLOCATED] = max(words[_PEAK_ALLOCATED], words[_ALLOCATED])
        elif held[row] != 0:
            if held[row] == _HELD:
                words[_ALLOCATED] -= size[row]
                held[row] = _GIVEN_UP
            if kind[i] == _FREE_COMPLETED:
                held[row] = 0
                call3(release, device, address[row], 0)
        reserved[i] = state.statistics.reserved_bytes
        words[_PEAK_RESERVED] = max(words[_PEAK_RESERVED], reserved[i])
        allocated[i] = words[_ALLOCATED]
    return len(kind)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings of the model: how the runtime gets its plan."""

    mode: str = setting("observe", as_one_of("plan", "observe"))
    """Whether the runtime watches the program from the first event on, instead of planning all of it beforehand."""


class Planned:
    """The runtime over a device of numbers."""

    name = "stalloc"
    settings_type = ModelSettings

    def __init__(self, settings: ModelSettings | None = None, capacity_bytes: int = 0) -> None:
        check_capacity(capacity_bytes)
        observing = self._observes = (settings or ModelSettings()).mode == "observe"
        patient = Settings(plan=observing, plan_wait_seconds=_PATIENT_SECONDS, planning_share=math.inf)
        self._controller = make_controller(capacity_bytes, patient)
        self._planned = observing
        self._plan_bytes = 0
        self._words = np.zeros(3, np.int64)
        self._held = np.zeros(0, np.int8)
        self._address = np.zeros(0, np.int64)
        self._num_marks = 0  # step marks that the runtime has been told of

    def __del__(self) -> None:
        controller = getattr(self, "_controller", None)
        if controller is not None:
            let_go(controller)

    def plan_for(self, events: Events) -> None:
        """Plan a whole program and take its arena, for the events fed next; does nothing when observing."""
        if self._planned:
            return
        from stalloc.planner import plan

        self._planned = True
        allocs = events.kind == Kind.ALLOC
        rows, start = events.request[allocs], np.flatnonzero(allocs)
        ends = np.full(len(events.size), len(events.kind))
        frees = np.flatnonzero(events.kind == Kind.FREE_COMPLETED)
        ends[events.request[frees]] = frees
        size, stream = events.size[rows], events.stream[rows]
        kept = size > 0
        first_use = np.array(list(dict.fromkeys([0, *stream[kept].tolist()])), np.int64)
        index = np.zeros(int(first_use.max()) + 1, np.int64)  # the core numbers streams as they come, the first is 0
        index[first_use] = np.arange(len(first_use))
        kept &= size > TINY
        size, stream, start, ends = size[kept], index[stream[kept]], start[kept], ends[rows[kept]]
        if not len(size):
            return
        made = plan((start, ends, size), alignment=ALIGNMENT)
        arena_bytes = whole_pages(made.peak_bytes)
        schedule = ArenaSchedule(arena_bytes=arena_bytes, size=size, stream=stream, offset=made.offset)
        if self._controller.serve_recording(schedule):
            self._plan_bytes = made.peak_bytes
            self._words[_PEAK_RESERVED] = self._controller.state.record.statistics.reserved_bytes

    def feed(self, events: Events) -> Fed:
        check_rows(events)
        self.plan_for(events)
        num_events, num_requests = len(events.kind), len(events.size)
        if (new := num_requests - len(self._held)) > 0:
            self._held = np.append(self._held, np.zeros(new, np.int8))
            self._address = np.append(self._address, np.zeros(new, np.int64))
        reserved, allocated = np.zeros((2, num_events), np.int64)
        state, words = self._controller.state, self._words
        size, stream = read_only(events.size, np.int64), read_only(events.stream, np.int64)
        kind, request = read_only(events.kind, np.int8), read_only(events.request, np.int64)
        start, failed = 0, -1
        for stop, is_mark in self._stops(events):
            piece = slice(start, stop)
            columns = kind[piece], request[piece], size, stream, reserved[piece], allocated[piece]
            done = int(_run(*core_entries(), state.address, words, self._held, self._address, *columns))
            if done < stop - start:
                failed = start + done
                break
            if is_mark:
                self._controller.mark(MARK_STEP, "")
                start = stop
                continue
            if stop < num_events:
                self._controller.memory.release_unused()
                reserved[stop], allocated[stop] = state.record.statistics.reserved_bytes, words[_ALLOCATED]
            start = stop + 1
        if failed >= 0:
            reserved[failed:], allocated[failed:] = state.record.statistics.reserved_bytes, words[_ALLOCATED]
        return Fed(reserved, allocated, failed)

    def _stops(self, events: Events) -> list[tuple[int, bool]]:
        """Positions at which feeding pauses, the end last, and whether it does for the mark of a step."""
        stops = [(at, False) for at in np.flatnonzero(events.kind == Kind.EMPTY_CACHE).tolist()]
        if self._observes and events.step_marks is not None and len(events.event):
            self._controller.expects_marks = True
            due = events.step_marks[events.step_marks <= int(events.event[-1])][self._num_marks :]
            self._num_marks += len(due)
            stops += [(at, True) for at in np.searchsorted(events.event, due).tolist()]
        return [*sorted(stops, key=lambda stop: (stop[0], not stop[1])), (len(events.kind), False)]

    def counters(self) -> Counters:
        state, device = self._controller.state, cast(NumbersDevice, self._controller.device)
        return Counters(
            reserved_bytes=state.record.statistics.reserved_bytes,
            peak_reserved_bytes=int(self._words[_PEAK_RESERVED]),
            allocated_bytes=int(self._words[_ALLOCATED]),
            peak_allocated_bytes=int(self._words[_PEAK_ALLOCATED]),
            device_allocs=device.num_allocs,
            device_frees=device.num_frees,
            retries=state.record.statistics.num_retries,
            more={
                "planned_hits": state.record.follow.hits,
                "unplanned": state.record.iterations.misses,
                "conflicts": state.record.iterations.conflicts,
                "arena_bytes": state.record.plan.arena_bytes,
                "plan_bytes": self._plan_bytes,
                "plans": self._controller.status.num_plans,
                "peak_reserved_since_plan_bytes": state.reserved_peak_bytes
                if state.record.iterations.iteration_count
                else 0,
            },
        )

    @property
    def note(self) -> str:
        """The phase of the runtime, and why it rests, if it does."""
        controller = self._controller
        return f"{controller.status.phase.value}{f': {controller.status.note}' if controller.status.note else ''}"

    def addresses(self) -> Column:
        """(n,) where each request was placed last; 0 for a request that never was, or that had no bytes."""
        return self._address.copy()

    def blocks(self) -> BlockMap:
        """All blocks with their places. Unused space of the arena counts as free, whatever the plan has there."""
        held = sorted(segments(self._controller.state), key=lambda segment: segment.address)
        blocks = {block.address: block for segment in held for block in segment.blocks if block.state != BLOCK_FREE}
        rows = np.flatnonzero(self._held).tolist()
        taken = []
        for row, address in sorted(zip(rows, self._address[rows].tolist(), strict=True), key=lambda pair: pair[1]):
            block = blocks[address]
            taken.append((address, block.size_bytes, row, int(self._held[row] == _GIVEN_UP), block.stream))
        return BlockMap.covering([(segment.address, segment.size_bytes, -1) for segment in held], taken)
