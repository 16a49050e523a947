"""What a device's requests were, with the program's marks: the record in which repeating steps are looked for.

Contract: the core writes events while `recording` is set; marks are kept beside them by the number of events before.
"""

import dataclasses
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from stalloc.columns import Column
from stalloc.core import constants
from stalloc.core.snapshot import segments
from stalloc.core.state import DeviceState
from stalloc.device import Device
from stalloc.runtime import decisions
from stalloc.runtime.runtime_settings import Settings, SteadySteps
from stalloc.trace import MARK_STEP
from stalloc.trace.packing import KeptTrace
from stalloc.version import known_release

if TYPE_CHECKING:
    from stalloc.runtime.call_sites import CallSites
    from stalloc.trace import Trace

_MANY_MARKS = 1024


class Recording:
    """The record of one device."""

    def __init__(self, device: Device, state: DeviceState) -> None:
        self._device, self._state = device, state
        self.marks: list[tuple[int, int, str]] = []  #: event index, kind of mark, name
        self.step_events: list[int] = []  #: events before each mark of a step
        self.step_times_ns = array("q")  #: monotonic times of all marks of steps, recorded or not
        self.num_planned = 0  #: of those, while a plan was in force, whichever
        self.kept: KeptTrace | None = None  #: what was recorded when a plan was made
        self.longest_step = 0  #: requests between two marks of steps, at most
        self.leaves_out_noise = False  #: requests of any size are no part of the steps: recorded_steps.py
        self._before_marks: tuple[Column, Column] | None = None
        self._allocs_before = -1  # requests before the last mark of a step, -1: there was none
        self._reserved_start = 0
        self.call_sites: CallSites | None = None  #: where they are noted
        self.more_tables: list[Callable[[], dict[str, Column]]] = []  #: each gives what else a trace has in `extra`
        self._sited_from = 0, 0  # the event and the call from which on call sites are known
        self._refused: deque[tuple[int, int]] = deque()  # events before each request that was, bytes free then
        self._many_marks = _MANY_MARKS  # when these are looked through for what a ring has lost

    def begin(self, *, persistent: bool) -> None:
        """Begin anew. With `persistent`, what is requested first is meant to last."""
        self.begin_beside()
        self._state.write(allocating_persistent=int(persistent))
        self._state.triggers.at_recorded(decisions.first_scan_at())

    def begin_beside(self, *, at_step: bool = False) -> None:
        """Begin anew beside a plan, `at_step` where a step of the program begins."""
        self._forget(begins=at_step)
        if not at_step:
            self._reserved_start = self._state.record.statistics.reserved_bytes
        self._state.record_anew()

    def go_on(self, settings: Settings) -> None:
        """Record from here on, if nothing is recorded; marks of events that were forgotten are no part of it."""
        if self._state.record.hot.recording:
            return
        if not self._state.record.log.num_events:
            self._forget(begins=bool(self.marks))
            self._reserved_start = self._state.record.statistics.reserved_bytes
        self._state.keep_last(settings.keep_events, exact_times=settings.exact_times)
        self._state.write(recording=1)

    def end(self, settings: Settings, *, goes_on: bool = False) -> None:
        """Nobody looks for steps from here on; the record ends unless the program keeps one, or it `goes_on`."""
        self._state.write(allocating_persistent=0, recording=int(settings.keep_recording or goes_on))
        self._state.triggers.at_recorded(0)
        if settings.keep_recording:
            self._state.keep_last(settings.keep_events, exact_times=settings.exact_times)

    def _forget(self, *, begins: bool) -> None:
        self.marks[:] = [(0, MARK_STEP, "")] if begins else []
        self.step_events[:] = [0] if begins else []
        self._before_marks = None
        self._refused.clear()
        self._sited_from = 0, self.call_sites.num_calls if self.call_sites is not None else 0

    def note_refusal(self, free_bytes: int) -> None:
        if not self._state.record.hot.recording:
            return
        self._refused.append((int(self._state.record.log.num_events), free_bytes))
        while self._refused[0][0] < self._state.first_event:  # a ring has lost it
            self._refused.popleft()

    def name_call_sites(self, call_sites: "CallSites") -> None:
        self.call_sites = call_sites
        self._sited_from = int(self._state.record.log.num_events), call_sites.num_calls

    def note_mark(self, kind: int, name: str) -> None:
        if kind == MARK_STEP:
            self.step_times_ns.append(time.monotonic_ns())
            before, self._allocs_before = self._allocs_before, self._state.record.total.num_allocs
            self.longest_step = max(self.longest_step, self._allocs_before - before if before >= 0 else 0)
            self._state.triggers.after_requests(self.overdue_requests)
        if self._state.record.hot.recording or not self.marks:
            self.marks.append((self._state.record.log.num_events, kind, name))
            if kind == MARK_STEP:
                self.step_events.append(self.marks[-1][0])
                self._forget_lost_marks()

    def _forget_lost_marks(self) -> None:
        """Of a ring, forget the marks before its first event; not the last one of a step, which was just noted."""
        if len(self.marks) >= self._many_marks:
            first = self._state.first_event
            self.marks[:] = [mark for mark in self.marks if mark[0] >= first]
            self.step_events[:] = [event for event in self.step_events if event >= first]
            self._many_marks = 2 * len(self.marks) + _MANY_MARKS

    def skip(self, steps: SteadySteps) -> None:
        self._allocs_before = steps.num_requests
        if self._state.record.hot.recording:
            self.marks += [(at, MARK_STEP, name) for at, name in zip(steps.num_events, steps.names, strict=True)]
            self.step_events += steps.num_events
            self._forget_lost_marks()

    @property
    def overdue_requests(self) -> int:
        return decisions.overdue_requests(self.longest_step)

    @property
    def marks_are_overdue(self) -> bool:
        since = self._state.record.total.num_allocs - self._allocs_before
        return self._allocs_before >= 0 and since >= self.overdue_requests

    @property
    def is_full(self) -> bool:
        """Whether events are missing, at the end or, of a ring, at the beginning."""
        return not self._state.record.hot.recording or self._state.first_event > 0

    def _marks_from(self, begin: int) -> list[tuple[int, int, str]]:
        return [(event - begin, kind, name) for event, kind, name in self.marks if event >= begin]

    def requests(self, begin: int, end: int) -> tuple[Column, Column]:
        size, stream, is_noise = self._state.recorded_requests(begin, end)
        kept = is_noise == 0 if self.leaves_out_noise else slice(None)
        return size[kept], stream[kept]

    def requests_before_marks(self) -> tuple[Column, Column]:
        if self._before_marks is None:
            self._before_marks = self.requests(0, self.step_events[0])
        return self._before_marks

    def trace(self) -> "Trace":
        first, events = self._state.first_event, self._state.recorded()
        marks = self._marks_from(first)
        held = segments(self._state)
        bases = np.array([segment.address for segment in held], np.int64).view(np.uint64)
        sizes = np.array([segment.size_bytes for segment in held], np.int64)
        trace = self._trace(events, marks, (bases, sizes, np.zeros(len(held), np.int64)))
        trace = self._with_call_sites(dataclasses.replace(trace, address=self._with_free_bytes(events)), events)
        more = {name: column for table in self.more_tables for name, column in table().items()}
        return dataclasses.replace(trace, extra=trace.extra | more)

    def _with_free_bytes(self, events: np.ndarray) -> Column:
        """The addresses of events, where those of refused requests are what was free on the device."""
        address = events["address"].view(np.uint64)
        errors = np.flatnonzero(events["action"] & 0xFF == constants.ACTION_OOM)
        if not len(errors) or not self._refused:
            return address
        before, free_bytes = np.array(self._refused, np.int64).T
        last = np.searchsorted(before - self._state.first_event, errors, side="right") - 1
        address = address.copy()
        address[errors[last >= 0]] = free_bytes[last[last >= 0]]
        return address

    def regular_trace(self, first_step: int = 0) -> "Trace":
        """The record, or what follows from step `first_step` on, as a Trace without noise."""
        begin = self.step_events[first_step] if first_step else 0
        events, marks = self._state.recorded(begin), self._marks_from(begin)
        if not self.leaves_out_noise:
            return self._trace(events, marks)
        kept = _without_noise(events["action"] & 0xFF, events["address"], events["is_noise"])
        before = np.concatenate([[0], np.cumsum(kept)]).tolist()
        return self._trace(events[kept], [(before[event], kind, name) for event, kind, name in marks])

    def _trace(
        self,
        events: np.ndarray,
        marks: list[tuple[int, int, str]],
        held: tuple[Column, Column, Column] | None = None,
    ) -> "Trace":
        from stalloc.trace.recorder import from_recorded

        state, device, tags = self._state, self._device, events["action"]
        raw = state.tables.streams["value"][: state.record.lookup.num_streams].tolist()
        return from_recorded(
            device.index,
            tags & 0xFF,
            events["address"].view(np.uint64),
            events["requested_bytes"],
            tags >> 8,
            events["time_ns"],
            marks,
            raw,
            reserved_start_bytes=self._reserved_before(events),
            segments=held,
            info={
                "device_name": device.name,
                "total_bytes": device.total_bytes,
                "virtual": device.kind == "virtual",
                **known_release(),
                "notes": self._notes(),
            },
        )

    def _notes(self) -> list[str]:
        if not self._state.record.hot.recording:
            return ["the record's table filled up: later events are missing"]
        if self._state.first_event:
            return [f"only the last {self._state.record.log.events_capacity:,} events were kept"]
        return []

    def _reserved_before(self, events: np.ndarray) -> int:
        """Bytes that were reserved before the first of the events."""
        if not self._state.first_event:
            return self._reserved_start
        action, size = events["action"] & 0xFF, events["requested_bytes"]
        more = int(size[np.isin(action, (constants.ACTION_SEGMENT_ALLOC, constants.ACTION_SEGMENT_MAP))].sum())
        less = int(size[np.isin(action, (constants.ACTION_SEGMENT_FREE, constants.ACTION_SEGMENT_UNMAP))].sum())
        return max(0, int(self._state.record.statistics.reserved_bytes) - more + less)

    def _with_call_sites(self, trace: "Trace", events: np.ndarray) -> "Trace":
        if self.call_sites is None:
            return trace
        action, (first_event, first_call) = events["action"] & 0xFF, self._sited_from
        first_event -= self._state.first_event  # below 0: the ring has lost it
        columns = action, events["address"], events["requested_bytes"]
        stacks = self.call_sites.of_events(self._state.address, first_call, first_event, *columns)
        site = np.full(trace.num_requests, -1, np.int64)
        born = np.flatnonzero(action == constants.ACTION_ALLOC)
        site[trace.event_request[born]] = stacks[born]
        return dataclasses.replace(trace, extra=trace.extra | self.call_sites.columns(stacks, site))

    @property
    def observed_trace(self) -> "Trace | None":
        return self.kept.trace() if self.kept is not None else None


def _without_noise(action: Column, address: Column, is_noise: Column) -> Column:
    """(m,) bool: the events of a record that are no noise, nor the end of one, by their columns (m,)."""
    of_them = (action == constants.ACTION_ALLOC) & (is_noise != 0)
    if not of_them.any():
        return ~of_them
    order = np.argsort(address, kind="stable")
    place = np.arange(len(order))
    begins = (action[order] == constants.ACTION_ALLOC) | np.r_[True, np.diff(address[order]) != 0]
    born = np.maximum.accumulate(np.where(begins, place, 0))  # what lived at the address then began here
    kept = np.empty(len(order), bool)
    kept[order] = ~of_them[order][born]
    return kept
