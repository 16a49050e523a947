"""The state of one device as Python sees it: its heap, its counts and records, and what the core is to ask next."""

import ctypes
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from stalloc.core import arena, constants, counters, frees, heap, lookup, pages, segments
from stalloc.core.device_parts import MAX_RANGES, DeviceArena, DeviceSteps, DeviceTables, forget_pages
from stalloc.core.frees import share_entry
from stalloc.core.record_types import Words
from stalloc.core.requests import free_entry, malloc_entry
from stalloc.device.ordering import Ordering

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(malloc_entry.address)
_FREE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(free_entry.address)
_SHARE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(share_entry.address)
_MAX_MOVED = 256  # segments that begin elsewhere when pages go
_TEXT_BYTES = 4096  # room for what an out-of-memory error says


class Triggers:
    """When the core of one device enters Python; it clears a trigger before it asks, and may be told the same twice."""

    def __init__(self, tables: DeviceTables) -> None:
        self._record, self._write = tables.record, tables.write

    def at_boundary(self) -> None:
        """Ask where the cycle begins again."""
        self._record.triggers.ask_at_boundary = max(self._record.triggers.ask_at_boundary, 1)

    def at_any_request(self) -> None:
        """Ask at the next request that may be planned."""
        self._record.triggers.ask_at_boundary = constants.AT_ANY_REQUEST

    @property
    def boundary_is_asked(self) -> bool:
        """Whether either of these is set."""
        return bool(self._record.triggers.ask_at_boundary)

    def after_iterations(self, count: int) -> None:
        """Ask where the cycle has begun again so many times; 0: not for their number."""
        steps = self._record.iterations.iterations_ever
        self._write({"ask_at_boundary": int(count == 1), "ask_after_iterations": steps + count if count > 1 else 0})

    def after_misses(self, count: int) -> None:
        """Ask once misses outnumber hits by so many; 0: never."""
        self._record.triggers.ask_after_misses = count

    def after_requests(self, count: int) -> None:
        """Ask at a miss once so many more requests were served."""
        self._record.triggers.doubt_at = self._record.total.num_allocs + count

    def above(self, allocated_bytes: int) -> None:
        """Ask before each request with which more than so many bytes would be allocated; 0: never."""
        self._record.triggers.ask_above = allocated_bytes

    def at_recorded(self, num_requests: int) -> None:
        """Ask once the record has so many requests above TINY; 0: never."""
        self._record.triggers.check_at = num_requests


def _ranges(addresses: Words, sizes: Words, count: int) -> list[tuple[int, int]]:
    return list(zip(addresses[:count].tolist(), sizes[:count].tolist(), strict=True))


class DeviceHeap:
    """The heap's segments and pools. Addresses and sizes are in bytes; a pool and a stream are indices."""

    def __init__(self, tables: DeviceTables) -> None:
        self._tables = tables

    def pool_kind(self, pool: int) -> int:
        """The kind of a pool: SMALL_KIND and so on."""
        return int(self._tables.pools["kind"][pool])

    def unpin_pools(self, kind: int) -> None:
        """The graphs that a private kind of pool served are gone: its free segments may go back."""
        segments.unpin_pools(self._tables.address, kind)

    def let_pools_sleep(self, pages: Iterable[int]) -> None:
        """Serve nobody from the pools that have memory in any of the pages (addresses), until `wake_pools`."""
        segments.let_pools_sleep(self._tables.address, np.fromiter(pages, np.int64))

    def wake_pools(self) -> None:
        """Serve from all pools again."""
        segments.wake_pools(self._tables.address)

    def find_place(self, pool: int, size_bytes: int) -> int:
        """Where a pool has so many free bytes in one piece; 0: nowhere."""
        return int(heap.find_place(self._tables.address, pool, size_bytes))

    def find_range(self, pool: int, size_bytes: int) -> int:
        """Where a pool has addresses for so many bytes, with memory or without; 0: nowhere."""
        return int(heap.find_range(self._tables.address, pool, size_bytes))

    def is_idle(self, pool: int) -> bool:
        """Whether nothing lives in a pool."""
        return bool(heap.is_idle(self._tables.address, pool))

    def full_table(self) -> str:
        """The table whose being full keeps the heap from taking a segment; empty if there is room."""
        record = self._tables.record
        if not record.heap.free_block_row and record.heap.blocks_used >= record.heap.blocks_capacity:
            return "blocks"
        if not record.heap.free_segment_row and record.heap.segments_used >= record.heap.segments_capacity:
            return "segments"
        return ""

    def give_segment(self, pool: int, address: int, size_bytes: int) -> bool:
        """Add a segment; False if the tables are full."""
        return bool(segments.give_segment(self._tables.address, pool, address, size_bytes))

    def remove_free_segments(self, idle_iterations: int = 0) -> dict[int, int]:
        """Take every segment without live blocks, not used in the last `idle_iterations`, out: address -> bytes."""
        removed: dict[int, int] = {}
        addresses, sizes = np.zeros((2, MAX_RANGES), np.int64)  # not shared: a finaliser may come here in the middle
        count = MAX_RANGES
        while count == MAX_RANGES:
            count = segments.remove_free_segments(self._tables.address, addresses, sizes, idle_iterations)
            removed.update(_ranges(addresses, sizes, count))
        return removed

    def give_range(self, pool: int, address: int, size_bytes: int) -> bool:
        """Add a segment that is addresses without memory; False if the tables are full."""
        return bool(pages.give_range(self._tables.address, pool, address, size_bytes))

    def find_growth(self, pool: int, size_bytes: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Where pages are best mapped for a request of a pool: (address, bytes) of each range; none: nowhere.

        And the place of the request then, [begin, end), of which other parts have memory and are free.
        """
        addresses, sizes = np.empty((2, MAX_RANGES), np.int64)
        count, begin, end = pages.find_growth(self._tables.address, pool, size_bytes, addresses, sizes)
        return _ranges(addresses, sizes, count), (int(begin), int(end))

    def use_pages(self, address: int, size_bytes: int) -> bool:
        """Serve from pages of a segment that have memory now; False if the tables are full."""
        return bool(pages.use_pages(self._tables.address, address, size_bytes))

    def find_stitch(self, pool: int, size_bytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """What a segment stitched for a request best begins and ends with: address and bytes of each, 0 bytes: none."""
        tail_at, tail, head_at, head = pages.find_stitch(self._tables.address, pool, size_bytes)
        return (int(tail_at), int(tail)), (int(head_at), int(head))

    def begin_stitch(
        self, pool: int, address: int, own_bytes: int, tail: tuple[int, int], head: tuple[int, int]
    ) -> bool:
        """Serve from a stitched segment whose own pages begin at an address; False if it cannot be made any more."""
        return bool(pages.begin_stitch(self._tables.address, pool, address, own_bytes, *tail, *head))

    def end_stitched(self) -> list[int]:
        """Take stitched segments in which nothing lives out of the tables: where they began."""
        addresses = np.empty(MAX_RANGES, np.int64)
        return addresses[: pages.end_stitched(self._tables.address, addresses)].tolist()

    def remove_empty_ranges(self) -> list[int]:
        """Take segments without any memory out of the tables: where they began."""
        addresses = np.empty(MAX_RANGES, np.int64)
        return addresses[: pages.remove_empty_ranges(self._tables.address, addresses)].tolist()

    def keep_ranges(self) -> None:
        """Leave what has its memory by pages as it is for good: they are a parent's of this process."""
        pages.keep_ranges(self._tables.address)

    def segments(self) -> tuple[Words, Words]:
        """Where the heap's segments begin, and how many bytes of them have memory, by address."""
        rows: np.ndarray = self._tables.segments[1 : self._tables.record.heap.segments_used].copy()
        rows = rows[(rows["address"] != 0) & (rows["interval_high"] == 0)]  # without leases
        rows = rows[np.argsort(rows["address"])]
        return rows["address"].copy(), rows["mapped_bytes"].copy()

    def largest_free_bytes(self) -> int:
        """The largest free block of the heap."""
        return int(segments.largest_free(self._tables.address))


@dataclass(frozen=True)
class Step:
    """What one iteration over the cycle of a plan was like."""

    end_ns: int  # monotonic time at which the ring began again
    hits: int  # requests served from the plan
    misses: int  # requests above 512 bytes that were not
    allocated_peak_bytes: int
    reserved_peak_bytes: int


class DeviceState:
    """One device: `record` are its fields, `tables` its tables; `heap` and `arena` are where memory is served from.

    `expected` are the steps that a plan in force expects, `triggers` what Python is to be asked next.
    """

    def __init__(self, device: int, slow_function: int) -> None:
        self.device = device
        self.tables = DeviceTables()
        self.address, self.record = self.tables.address, self.tables.record
        self.heap = DeviceHeap(self.tables)
        self.arena = DeviceArena(self.tables)
        self.expected = DeviceSteps(self.tables, self.arena)
        self.triggers = Triggers(self.tables)
        self._texts: list[np.ndarray] = []
        self._earlier_peak = self._phase_peak = 0  # bytes: since the program's reset, and since `take_phase_peak`
        self.tables.write({"slow_function": slow_function, "device": device})
        self.write(**self._text_fields("CUDA out of memory. stalloc: out of memory"))

    def malloc(self, requested_bytes: int, stream: int = 0) -> int:
        """Serve a request on a raw stream, as C code would be; its address, 0 if there is no memory."""
        return int(_MALLOC(self.address, requested_bytes, stream))

    def free(self, address: int) -> None:
        """Free what lives at an address, as C code would."""
        _FREE(self.address, address)

    def share(self, address: int, stream: int) -> None:
        """Let the free of a block wait for a raw stream that uses it, as C code would."""
        _SHARE(self.address, address, stream)

    def order_streams(self, ordering: Ordering) -> None:
        """Have the functions that order streams; without them a block that streams share waits until these are idle."""
        self.write(**asdict(ordering))

    def give_events(self, events: list[int]) -> None:
        """Let as many more uses of blocks by other streams be known as these events (handles), which are for that only.

        Raises IndexError if there is no room for so many.
        """
        if self.record.shared.stream_uses_used + len(events) > len(self.tables.stream_uses):
            raise IndexError("more blocks are used by several streams at once than there is room for")
        frees.give_events(self.address, np.array(events, np.int64))

    def awaited(self) -> tuple[list[int], list[int]]:
        """What freed blocks wait for: events, and streams whose events are not recorded; both may change meanwhile."""
        uses: np.ndarray = self.tables.stream_uses[1 : self.record.shared.stream_uses_used].copy()
        events = uses["event"][uses["status"] == constants.USE_RECORDED].tolist()
        return events, np.unique(uses["stream"][uses["status"] == constants.USE_UNRECORDED]).tolist()

    def write(self, **fields: int) -> None:
        """Write several fields of the record at once, under the core's lock."""
        self.tables.write(fields)

    def leave_pages(
        self,
        wanted_bytes: int,
        *,
        between: tuple[int, int] = (0, 0),
        place: tuple[int, int] = (0, 0),
        spares_arena: bool = False,
        ahead_bytes: int = 0,
    ) -> tuple[list[tuple[int, int]], dict[int, int]]:
        """Serve no more from so many bytes of free pages of segments, and then of idle ones of the arena, if there are.

        With `spares_arena` none of the arena goes; `ahead_bytes` more go as far as nothing needs them soon. What is
        free `between` two addresses stays as it is, and bytes `place` of the arena: memory is to come there. Returns
        address and bytes of each range that is to be unmapped, and where segments begin now (0: gone), by where they
        began.
        """
        (addresses, sizes), (before, after) = np.empty((2, MAX_RANGES), np.int64), np.empty((2, _MAX_MOVED), np.int64)
        count, moved = arena.leave_pages(
            self.address, wanted_bytes, ahead_bytes, spares_arena, *between, *place, addresses, sizes, before, after
        )
        return _ranges(addresses, sizes, count), dict(_ranges(before, after, moved))

    def reset_peaks(self) -> None:
        """Let the peaks that the program asks for begin anew (torch.cuda.reset_peak_memory_stats)."""
        self._phase_peak, self._earlier_peak = max(self._phase_peak, self.record.total.allocated_peak), 0
        counters.reset_peaks(self.address)

    @property
    def told_peak_bytes(self) -> int:
        """The most that was allocated since the program reset its peaks."""
        return max(self._earlier_peak, self.record.total.allocated_peak)

    def take_phase_peak(self) -> int:
        """The most that was allocated since this was asked last; the program's own peak stays as it is."""
        peak = int(counters.restart_allocated_peak(self.address))
        self._earlier_peak = max(self._earlier_peak, peak)
        peak, self._phase_peak = max(self._phase_peak, peak), 0
        return peak

    def set_out_of_memory_text(self, text: str, driver_status: int = 0) -> None:
        """What the next out-of-memory error says; with a status of the driver it is no lack of memory."""
        self.write(**self._text_fields(text), driver_error=driver_status)

    def _text_fields(self, text: str) -> dict[str, int]:
        self.out_of_memory_text = text
        data = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
        # of one size, so that a thread which reads an old address and a new length stays inside
        buffer = np.full(_TEXT_BYTES, ord(" "), np.uint8)
        buffer[: len(data)] = data
        self._texts = [*self._texts[-7:], buffer]  # another thread may still be reading one of the last few
        return {"oom_text": buffer.ctypes.data, "oom_text_length": len(data)}

    def forget_streams(self) -> int:
        """Forget the streams that hold no memory and are on no schedule in force; how many."""
        kept, schedule = np.zeros(constants.MAX_STREAMS, np.int64), self.arena.schedule
        if schedule is not None and (self.record.hot.mode != constants.MODE_HEAP or self.record.plan.arena_bytes):
            kept[schedule.entries["key"] & (constants.MAX_STREAMS - 1)] = 1
        return int(lookup.forget_streams(self.address, kept))

    @property
    def requested_ever_bytes(self) -> int:
        """What was requested so far, whatever has become of it."""
        return self.record.small.requested_ever + self.record.large.requested_ever

    @property
    def num_unserved(self) -> int:
        """Requests that the plan did not serve since it was put in force: misses, and those that it has elsewhere."""
        return self.record.iterations.misses + self.record.iterations.conflicts

    @property
    def num_displaced(self) -> int:
        """Requests of this iteration over the plan that have a place and were served elsewhere."""
        iterations = self.record.iterations
        return iterations.conflicts - iterations.conflicts_before - iterations.iteration_unplanned

    def take_peak_bytes(self) -> int:
        """The most that was allocated since this was asked last; under a plan, in this iteration and the last."""
        return int(counters.take_peak(self.address))

    @property
    def allocated_peak_bytes(self) -> int:
        """The allocated peak in bytes since the plan was put in force, or ever if none is."""
        return max(self.record.iterations.span_allocated_peak, self.record.hot.iteration_allocated_peak)

    @property
    def reserved_peak_bytes(self) -> int:
        """The reserved peak in bytes since the plan was put in force, or ever if none is."""
        return max(self.record.iterations.span_reserved_peak, self.record.iterations.iteration_reserved_peak)

    def steps(self) -> list[Step]:
        """The planned steps that ended, oldest first, as far as the log reaches back.

        The log's first row only marks the start of the first planned step.
        """
        count = self.record.iterations.iteration_count
        order = np.arange(max(1, count - constants.ITERATION_LOG_ROWS), count)
        rows: np.ndarray = self.tables.iteration_log[order % constants.ITERATION_LOG_ROWS]
        return [Step(*row[:5]) for row in rows.tolist()]

    def recorded(self, begin: int = 0) -> np.ndarray:
        """A copy of the recorded events from `begin` on, those that a ring still has."""
        events = self._events(begin, self.record.log.num_events)
        times = np.maximum.accumulate(events["time_ns"])
        if len(times):
            times[times == 0] = times[times > 0].min(initial=times[-1])  # frees before the first request
        events["time_ns"] = times
        return events

    @property
    def first_event(self) -> int:
        """The first event that is still in the record."""
        return max(0, int(self.record.log.num_events) - int(self.record.log.events_capacity))

    def _events(self, begin: int, end: int) -> np.ndarray:
        """A copy of the events [begin, end), as far as they are there."""
        begin, capacity = max(begin, self.first_event), int(self.record.log.events_capacity)
        table: np.ndarray = self.tables.events.view(np.ndarray)
        return table[begin:end].copy() if end <= capacity else table[np.arange(begin, max(begin, end)) % capacity]

    def recorded_lives(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Action, address and bytes of the events [begin, end), as far as they are there: (m,) int64 each."""
        events = self._events(begin, end)
        return events["action"] & 0xFF, events["address"], events["requested_bytes"]

    def record_anew(self) -> None:
        """Forget what was recorded, and record from here on, as much as there is room for."""
        capacity = len(self.tables.events)
        self.write(
            recording=1, num_events=0, num_sizable=0, check_at=0, events_capacity=capacity, events_clock=constants.CLOCK
        )

    def forget_record(self) -> None:
        """Stop recording and give the memory of what was recorded back."""
        self.write(recording=0, num_events=0, check_at=0)
        forget_pages(self.tables.events)

    def keep_last(self, num_events: int, *, exact_times: bool) -> None:
        """Nobody looks for steps in the record: let it be a ring of the last so many events (0: all there is room for).

        Unless `exact_times`, they are those of a clock that ticks every few milliseconds.
        """
        events = self.tables.events
        capacity = 1 << max(num_events - 1, 1).bit_length() if num_events else len(events)
        if capacity < self.record.log.events_capacity:
            moved = np.empty(capacity, events.dtype)
            counters.narrow(self.address, capacity, moved.ctypes.data)
            forget_pages(events[capacity:])
        self.write(events_clock=constants.CLOCK if exact_times else constants.COARSE_CLOCK)

    def recorded_requests(self, begin: int, end: int) -> tuple[Words, Words, Words]:
        """Of the requests above TINY among events [begin, end): sizes in bytes, streams, and whether they are noise."""
        begin = max(begin, self.first_event)
        sizes, streams, is_noise = np.empty((3, max(0, end - begin)), np.int64)
        count = counters.copy_requests(self.address, begin, end, sizes, streams, is_noise)
        return sizes[:count], streams[:count], is_noise[:count]

    def note_noise(self, begin: int, end: int, chosen: np.ndarray) -> None:
        """Note that some of the requests above TINY among the recorded events [begin, end) are noise.

        `chosen` (m,) bool says which; with all of these events still in the record.
        """
        table: np.ndarray = self.tables.events.view(np.ndarray)
        rows = np.arange(begin, end) % int(self.record.log.events_capacity)
        is_request = ((table["action"][rows] & 0xFF) == constants.ACTION_ALLOC) & (
            table["requested_bytes"][rows] > constants.TINY
        )
        table["is_noise"][rows[is_request][chosen]] = 1
