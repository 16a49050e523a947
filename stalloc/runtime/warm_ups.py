"""What is known of a capture before it begins, from the warm-up: engines run a step once before they capture it.

Contract: a wrong guess costs memory, never correctness. The warm-up's requests are planned, and the capture's get
these places, by size and order. What outlives a capture is apart: a size of which nothing was ever freed is taken to
last, as the workspace that a library makes once does. All of it is known as far as requests are recorded, which they
are while stalloc looks for steps; without a record a capture is served best fit.
"""

import bisect
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.core.constants import ACTION_ALLOC, ACTION_FREE_COMPLETED, ALIGNMENT
from stalloc.core.records import CaptureEntry, table
from stalloc.core.state import DeviceState
from stalloc.runtime.decisions import is_planned_for_capture
from stalloc.sizes import aligned


class Requests(NamedTuple):
    """Requests in order: bytes (rounded), and the events [start, end) between which each lived; (n,) each."""

    size: Column
    start: Column
    end: Column


def last_run(action: Column, address: Column, size: Column) -> Requests:
    """The run in the events (m,) that has most requests, the last of equals: some of its requests live all along.

    What was not freed is no part of it.
    """
    events = np.flatnonzero((action == ACTION_ALLOC) | (action == ACTION_FREE_COMPLETED))
    events = events[np.argsort(address[events], kind="stable")]
    begins, ends = events[:-1], events[1:]
    pairs = (address[begins] == address[ends]) & (action[begins] == ACTION_ALLOC) & (action[ends] != ACTION_ALLOC)
    start, end = begins[pairs], ends[pairs]
    order = np.argsort(start)
    start, end = start[order], end[order]
    if len(start) == 0:
        return Requests(start, start, start)
    is_first = np.append(True, start[1:] > np.maximum.accumulate(end)[:-1])
    first = np.flatnonzero(is_first)
    length = np.diff(np.append(first, len(start)))
    chosen = len(length) - 1 - int(np.argmax(length[::-1]))
    part = slice(first[chosen], first[chosen] + length[chosen])
    return Requests(size[start[part]], start[part], end[part])


def _lowest_gap(used: list[tuple[int, int]], size_bytes: int) -> int:
    """The lowest offset of so many bytes beside ascending ranges [low, high)."""
    offset = 0
    for low, high in used:
        if low - offset >= size_bytes:
            break
        offset = max(offset, high)
    return offset


class WarmUps:
    """Reads what one device was asked for before a capture, and tells the core what to expect of it."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._requested: set[int] = set()  # sizes, bytes rounded as the core does it
        self._freed: set[int] = set()
        self._begin = 0  # the first event that was not looked at
        self._sizes = np.empty(0, np.int64)  # which the core reads
        self._run = last_run(*np.empty((3, 0), np.int64))  # what the next capture is expected to request
        self._entries = table(CaptureEntry, 1)  # which the core reads
        self._offset = np.empty(0, np.int64)  # of each of them, once it is planned
        self._places: list[tuple[int, int]] = []  # they had in the capture before this one: address and bytes

    def look(self) -> None:
        """Look at what was recorded since the last capture, and tell the core what to expect of the next."""
        action, address, size = self._take_unseen()
        sizes = np.array(sorted(self._requested - self._freed), np.int64)
        self._state.write(persistent_sizes=sizes.ctypes.data, num_persistent_sizes=len(sizes))
        self._sizes = sizes
        address_before = self._state.record.capture.capture_plan_base + self._offset
        self._places = list(zip(address_before.tolist(), self._run.size.tolist(), strict=False))
        self._offset = self._offset[:0]
        self._run = last_run(action, address, size)
        is_planned = is_planned_for_capture(len(self._run.size))
        self._state.write(
            capture_plan_length=len(self._run.size) if is_planned else 0,
            capture_plan_first=0,
            capture_plan_base=0,
            capture_plan_lacks=0,
        )

    def plan(self, base: int, live: Iterable[tuple[int, int]]) -> int:
        """Plan the capture's requests from an address on, around what is `live`; how many bytes the plan reaches.

        `live` are addresses and bytes. Requests at the positions of those that outlived the capture before are
        expected to do so too, and lie as low as they can: a later, larger capture then works above them in one piece.
        """
        from stalloc.planner.planning import plan_arrays

        run, live = self._run, sorted(live)
        taken = [(address - base, address - base + size_bytes) for address, size_bytes in live]
        used, fixed, end = list(taken), {}, run.end.copy()
        for number in self._outliving(live) if len(self._places) == len(run.size) else ():
            size_bytes = int(run.size[number])
            offset = _lowest_gap(used, size_bytes)
            bisect.insort(used, (offset, offset + size_bytes))
            fixed[number], end[number] = offset, run.end.max()
        layout = plan_arrays(run.start, end, run.size, alignment=ALIGNMENT, fixed=fixed, forbidden=taken)
        entries = table(CaptureEntry, len(run.size))
        entries["size_bytes"], entries["offset"] = run.size, layout.offset
        self._offset, self._entries = layout.offset, entries
        self._state.write(capture_plan=entries.ctypes.data)
        return layout.peak_bytes

    def _outliving(self, live: Iterable[tuple[int, int]]) -> list[int]:
        """Which requests of the capture before are still live; of several that had one place, the last."""
        last = {place: number for number, place in enumerate(self._places)}
        return [last[place] for place in live if place in last]

    def skip(self) -> None:
        """A capture is over: what it requested is no warm-up of the next one."""
        self._state.write(capture_plan_length=0, num_persistent_sizes=0)
        self._take_unseen()

    def _take_unseen(self) -> tuple[Column, Column, Column]:
        """Action, address and rounded bytes of the events that were not looked at, and note their sizes."""
        end = int(self._state.record.log.num_events)
        begin = self._begin if self._begin <= end else 0  # it began anew
        action, address, size = self._state.recorded_lives(begin, end)
        self._begin = end
        size = aligned(size)
        self._requested.update(np.unique(size[action == ACTION_ALLOC]).tolist())
        self._freed.update(np.unique(size[action == ACTION_FREE_COMPLETED]).tolist())
        return action, address, size
