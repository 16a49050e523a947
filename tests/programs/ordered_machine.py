"""Streams as clocks, and a machine whose every block is checked against them."""

import ctypes
from collections.abc import Callable

import numpy as np
from programs.core_machine import Cycle, Machine

from stalloc.core.constants import NEED_EVENTS, NOT_READY
from stalloc.device.ordering import Ordering
from stalloc.planner import Plan
from stalloc.sizes import whole_pages

_HANDLE = 16  # handles of streams are addresses
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class Driver:
    """Streams as clocks: which work of every other stream each one comes after, by the calls that order them."""

    def __init__(self, num_streams: int) -> None:
        self.clock = np.zeros((num_streams, num_streams), np.int64)  # [s, t]: work of t that s comes after
        self.recorded: dict[int, np.ndarray] = {}
        self.done = np.zeros(num_streams, np.int64)  # work of each that the host knows to be over
        self.calls: list[tuple[str, int, int]] = []
        self.fails: set[str] = set()
        self.before_record: Callable[[], None] = lambda: None
        calls = self._record, self._wait, self._capturing, self._query, self._exchange
        self._callbacks = [_CALL(call) for call in calls]
        self.ordering = Ordering(*(ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in self._callbacks))

    def work(self, stream: int) -> int:
        """Give a stream something to do; its number."""
        self.clock[stream, stream] += 1
        return int(self.clock[stream, stream])

    def synchronize(self) -> None:
        """All work so far is over."""
        self.clock[:] = self.done = self.clock.max(axis=0)

    def finish(self, stream: int) -> None:
        """A stream is done with all that it was given so far, and with what that had to wait for."""
        self.done = np.maximum(self.done, self.clock[stream])

    def _record(self, event: int, handle: int, _: int) -> int:
        stream = handle // _HANDLE
        self.before_record()
        if "record" in self.fails:
            return 1
        self.recorded[event] = self.clock[stream].copy()
        self.calls.append(("record", stream, event))
        return 0

    def _wait(self, handle: int, event: int, _: int) -> int:
        stream = handle // _HANDLE
        if "wait" in self.fails:
            return 1
        self.clock[stream] = np.maximum(self.clock[stream], self.recorded[event])
        self.calls.append(("wait", stream, event))
        return 0

    def _capturing(self, stream: int, status: int, _: int) -> int:
        ctypes.c_int.from_address(status).value = int("capture" in self.fails)
        return 0

    def _exchange(self, *_: int) -> int:
        return 0

    def _query(self, event: int, *_: int) -> int:
        if "query" in self.fails:
            return 1
        self.calls.append(("query", -1, event))
        return 0 if (self.recorded[event] <= self.done).all() else NOT_READY


class Checked(Machine):
    """A machine whose every block must be safe to use on its stream when it is handed out."""

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        self.driver = Driver(num_streams)
        self.state.order_streams(self.driver.ordering)
        self._num_events = 0
        self.on_request[NEED_EVENTS] = self._add_events
        self._stream_of: dict[int, int] = {}
        self._sharers: dict[int, set[int]] = {}  # live block -> other streams that use it
        self._used: list[tuple[int, int, int, int]] = []  # bytes [low, high), the stream that used them last, its work

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate, check that the stream comes after all that used the memory before, and use it."""
        address = super().allocate(size, _HANDLE * stream)
        for low, high, other, work in self._used:
            if low < address + size and address < high:
                behind = max(self.driver.clock[stream, other], self.driver.done[other]) < work
                assert not behind, f"stream {stream} got [{low:#x}, {high:#x}) before stream {other} was done with it"
        self._stream_of[address] = stream
        self.driver.work(stream)
        return address

    def free(self, address: int) -> None:
        """Use the block once more and free it."""
        size = dict(self.live.items())[address]
        stream = self._stream_of.pop(address)
        kept = [(low, min(high, address), s, work) for low, high, s, work in self._used if low < address]
        kept += [(max(low, address + size), h, s, work) for low, h, s, work in self._used if h > address + size]
        users = [stream, *self._sharers.pop(address, ())]
        self._used = [use for use in kept if use[0] < use[1]] + [
            (address, address + size, user, self.driver.work(user)) for user in users
        ]
        super().free(address)

    def share(self, address: int, stream: int) -> None:
        """Let another stream use a block, as torch's record_stream."""
        self.state.share(address, _HANDLE * stream)
        self.driver.work(stream)
        self._sharers.setdefault(address, set()).add(stream)

    def stream_of(self, address: int) -> int:
        """The stream that a live block was asked for on."""
        return self._stream_of[address]

    def _add_events(self, _: int) -> int:
        begin, self._num_events = self._num_events, self._num_events + 4
        self.state.give_events([-1 - number for number in range(begin, begin + 4)])
        return 1

    def follow(self, cycle: Cycle, plan: Plan, *, has_memory: bool = True) -> None:
        """Serve a cycle from its plan, handovers secured; with `has_memory` from all of the arena, else from none."""
        cycle.offset, cycle.peak = plan.schedule_offset, plan.peak_bytes
        arena_bytes = whole_pages(cycle.peak)
        self.state.arena.install(cycle.schedule())
        gives = np.unique(plan.handover_earlier)
        self.state.arena.share_intervals(gives, list(range(1, cycle.length + 1)))
        base = self.take(arena_bytes)
        if not has_memory:
            self.state.arena.serve_pages(base, arena_bytes, anew=True)
            return
        self.state.arena.count(arena_bytes)
        self.state.arena.serve(base, arena_bytes)
