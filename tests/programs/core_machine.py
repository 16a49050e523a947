"""The compiled core with a device made of numbers: its entry points, an oracle for overlaps, compiled threads.

Contract: every address that `Machine.allocate` returns is checked against all live ones and against the segments and
the arena that the device has handed out; a block that overlaps another or lies outside raises AssertionError.
"""

import bisect
import ctypes
import mmap
import threading
from collections.abc import Iterator

import numpy as np
from numba import njit

from stalloc.core import constants
from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.core.entry import core_entries, cupy_entries, slow_entry
from stalloc.core.intrinsics import call3
from stalloc.core.records import word_at
from stalloc.core.state import DeviceState
from stalloc.runtime.shortage import segment_bytes
from stalloc.sizes import whole_pages

KIB, MIB = 1 << 10, 1 << 20
FIRST_ADDRESS = 0x7000_0000_0000
_PAGE_ROWS = 4096


class Intervals:
    """Disjoint half-open intervals of addresses; adding one that overlaps another is an error."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._size: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, size: int) -> None:
        """Add [start, start + size)."""
        place = bisect.bisect_left(self._starts, start)
        for other in self._starts[max(0, place - 1) : place + 1]:
            overlap = start < other + self._size[other] and other < start + size
            assert not overlap, f"[{start:#x}, +{size}) overlaps [{other:#x}, +{self._size[other]})"
        self._starts.insert(place, start)
        self._size[start] = size

    def remove(self, start: int) -> int:
        """Remove the interval that begins at `start`; its size."""
        del self._starts[bisect.bisect_left(self._starts, start)]
        return self._size.pop(start)

    def around(self, start: int, size: int) -> bool:
        """Whether one interval holds all of [start, start + size)."""
        place = bisect.bisect_right(self._starts, start)
        holder = self._starts[place - 1] if place else None
        return holder is not None and start + size <= holder + self._size[holder]

    def addresses(self) -> list[int]:
        """Where they all begin."""
        return [*self._starts]

    def items(self) -> list[tuple[int, int]]:
        """(start, size) of all."""
        return [(start, self._size[start]) for start in self._starts]


class Owners:
    """Which stream had which bytes last, by 512 bytes; none may pass from one to another."""

    def __init__(self) -> None:
        self._owner: dict[int, np.ndarray] = {}  # by page of 2 MiB

    def _parts(self, address: int, size_bytes: int) -> Iterator[np.ndarray]:
        begin, end = address // 512, -(-(address + size_bytes) // 512)
        while begin < end:
            page, row = divmod(begin, _PAGE_ROWS)
            rows = self._owner.setdefault(page, np.full(_PAGE_ROWS, -1, np.int8))
            yield rows[row : row + end - begin]
            begin += _PAGE_ROWS - row

    def note(self, address: int, size_bytes: int, stream: int) -> None:
        """A stream gets these bytes; an error if another one had any of them."""
        for rows in self._parts(address, size_bytes):
            assert ((rows == -1) | (rows == stream)).all(), f"stream {stream} gets what was {np.unique(rows)}'s"
            rows[:] = stream

    def forget(self, address: int, size_bytes: int) -> None:
        """The device has these bytes again, which waits for all streams."""
        for rows in self._parts(address, size_bytes):
            rows[:] = -1


class Machine:
    """One device of `capacity` bytes under the core, driven through the entry points that CuPy calls."""

    def __init__(
        self,
        capacity: int = 1 << 40,
        *,
        lasting: bool = False,
        memory: mmap.mmap | None = None,
        owners: Owners | None = None,
    ) -> None:
        self.capacity = capacity
        self.memory = memory
        self._start = self._next = FIRST_ADDRESS if memory is None else _address_of(memory)
        self.taken = 0
        self.segments = Intervals()
        self.live = Intervals()
        self.owners = owners  # streams never share memory: each address is checked for that too
        self.asked: list[int] = []
        self._returned: list[tuple[int, int]] = []  # (base, size), by address, never side by side
        self._end = self._next + (1 << 60 if memory is None else len(memory))
        self._lock = threading.Lock()
        self.on_request: dict[int, object] = {}
        self.state = DeviceState(0, slow_entry(self._help))
        self.states = np.array([self.state.address], np.int64)
        self.entries = cupy_entries(self.states.ctypes.data, core_entries())
        self.request = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)(self.entries[0])
        self._free = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)(self.entries[1])
        self.state.write(allocating_persistent=int(lasting))

    def _help(self, device: int, request: int, argument: int) -> int:
        reason = request & ((1 << constants.REASON_BITS) - 1)
        self.asked.append(reason)
        if reason != constants.NEED_SEGMENT:
            action = self.on_request.get(reason)
            return int(action(argument)) if callable(action) else 1
        pool = request >> constants.REASON_BITS
        size = segment_bytes(self.state.heap.pool_kind(pool), argument)
        for segment in (size, whole_pages(argument)):
            base = self.take(segment)
            if base:
                assert self.state.heap.give_segment(pool, base, segment)
                return 1
        return 0

    def take(self, size: int) -> int:
        """Addresses from the device, 0 if it has no room."""
        with self._lock:
            if self.taken + size > self.capacity:
                return 0
            base = self._from_returned(size)
            if not base:
                assert self._next + size <= self._end, "the test needs more address space"
                base, self._next = self._next, self._next + size
            self.segments.add(base, size)
            self.taken += size
            return base

    def give_back(self, base: int) -> None:
        """Give addresses back to the device, which hands them out again."""
        with self._lock:
            size = self.segments.remove(base)
            if self.owners is not None:
                self.owners.forget(base, size)
            self.taken -= size
            place = bisect.bisect(self._returned, (base, size))
            if place < len(self._returned) and self._returned[place][0] == base + size:
                size += self._returned.pop(place)[1]
            if place and sum(self._returned[place - 1]) == base:
                base, before = self._returned.pop(place - 1)
                size, place = size + before, place - 1
            self._returned.insert(place, (base, size))

    def _from_returned(self, size: int) -> int:
        """The lowest whole granules that came back and hold `size` bytes; 0 if there are none."""
        for place, (start, length) in enumerate(self._returned):
            base = whole_pages(start - self._start) + self._start
            if base + size <= start + length:
                rest = [(start, base - start), (base + size, start + length - base - size)]
                self._returned[place : place + 1] = [piece for piece in rest if piece[1]]
                return base
        return 0

    def give_back_segments(self) -> int:
        """Take free segments from the core, as when memory is released; how many."""
        bases = self.state.heap.remove_free_segments()
        for base in bases:
            self.give_back(base)
        return len(bases)

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate and check the address; 0 if there is no memory."""
        address = self.request(stream, size, 0)
        if address:
            rounded = -(-size // constants.ALIGNMENT) * constants.ALIGNMENT
            assert address % constants.ALIGNMENT == 0
            assert self.segments.around(address, rounded), f"[{address:#x}, +{rounded}) is not the device's"
            self.live.add(address, rounded)
            if self.owners is not None:
                self.owners.note(address, rounded, stream)
        return address

    def free(self, address: int) -> None:
        """Free a live block."""
        self.live.remove(address)
        self._free(0, address, 0)

    def free_unchecked(self, address: int) -> None:
        """Free whatever address, live or not, without the oracle."""
        self._free(0, address, 0)

    def install(self, program: "Cycle | ArenaSchedule", *, serve: bool = True) -> int:
        """Follow a schedule from its first request and serve it from an arena; the arena's base."""
        schedule = program.schedule() if isinstance(program, Cycle) else program
        arena_bytes = whole_pages(schedule.arena_bytes)
        self.state.arena.install(schedule)
        if not serve:
            return 0
        base = self.take(arena_bytes)
        self.state.arena.count(arena_bytes)
        self.state.arena.serve(base, arena_bytes)
        return base

    def dissolve(self) -> list[int]:
        """Give the plan up and make ordinary segments of its arena; their bases."""
        base = self.state.record.plan.arena
        self.state.arena.drop_schedule()
        bases = self.state.arena.dissolve()
        if bases:
            end = base + self.segments.remove(base)
            for part, following in zip(bases, [*bases[1:], end], strict=True):
                self.segments.add(part, following - part)
        return bases

    def check_counts(self) -> None:
        """The counters agree with the oracle."""
        state = self.state
        assert state.record.total.num_live == len(self.live)
        assert state.record.total.allocated_bytes == sum(size for _, size in self.live.items())
        assert state.record.statistics.reserved_bytes == self.taken


class Cycle:
    """A made-up step that repeats: sizes, streams, lifespans in requests, and first-fit offsets by stream."""

    def __init__(self, rng: np.random.Generator, length: int, *, streams: int = 1, num_sizes: int = 12) -> None:
        sizes = (rng.integers(513, 3 * MIB, num_sizes)).astype(np.int64)
        self.size = rng.choice(sizes, length)
        self.stream = rng.integers(0, streams, length)
        self.length = length
        self.num_prologue = 0
        self.lifespan = np.minimum(rng.geometric(0.15, length), length)
        rounded = -(-self.size // constants.ALIGNMENT) * constants.ALIGNMENT
        offset = np.zeros(length, np.int64)
        base = 0
        for stream in range(streams):
            top = base
            placed: list[int] = []
            for i in np.flatnonzero(self.stream == stream):
                at = base
                taken = [(int(offset[j]), int(offset[j] + rounded[j])) for j in placed if self._meet(i, j)]
                for low, high in sorted(taken):
                    if at + rounded[i] <= low:
                        break
                    at = max(at, high)
                offset[i] = at
                placed.append(int(i))
                top = max(top, int(at + rounded[i]))
            base = top
        self.offset, self.peak = offset, base

    def schedule(self) -> ArenaSchedule:
        """What is served of it."""
        columns = {"size": self.size, "stream": self.stream, "offset": self.offset}
        return ArenaSchedule(arena_bytes=whole_pages(self.peak), num_prologue=self.num_prologue, **columns)

    def _meet(self, i: int, j: int) -> bool:
        """Whether two requests of the cycle are ever live together; it turns for ever."""
        return (j - i) % self.length < self.lifespan[i] or (i - j) % self.length < self.lifespan[j]


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@njit(nogil=True)
def _xorshift(word):
    x = word[0]
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    word[0] = x
    return x & 0x7FFFFFFFFFFFFFFF


@njit(nogil=True)
def hammer(allocate, free, stream, sizes, order, operations, slots, seed, tag):
    """Allocate and free in random order from compiled code, owning every block's granules; how many words were foreign.

    `sizes` (n,) bytes are asked for in turn if `order`, else at random. Each 512-byte granule of a block holds
    tag, slot and size while it lives; a word that changed meanwhile was written by another owner.
    """
    address, held, word = np.zeros(slots, np.int64), np.zeros(slots, np.int64), np.array([seed], np.int64)
    foreign = failed = 0
    for i in range(operations):
        slot = _xorshift(word) % slots
        if address[slot] != 0:
            mark = tag << 48 | slot << 32 | held[slot] >> 9
            for granule in range((held[slot] + 511) >> 9):
                if word_at(address[slot], granule * 64).value != mark:
                    foreign += 1
                word_at(address[slot], granule * 64).value = 0
            call3(free, stream, address[slot], 0)
            address[slot] = 0
        else:
            size = sizes[i % len(sizes)] if order else sizes[_xorshift(word) % len(sizes)]
            at = call3(allocate, stream, size, 0)
            if at == 0:
                failed += 1
                continue
            address[slot], held[slot] = at, size
            mark = tag << 48 | slot << 32 | size >> 9
            for granule in range((size + 511) >> 9):
                word_at(at, granule * 64).value = mark
    for slot in range(slots):
        if address[slot] != 0:
            mark = tag << 48 | slot << 32 | held[slot] >> 9
            for granule in range((held[slot] + 511) >> 9):
                if word_at(address[slot], granule * 64).value != mark:
                    foreign += 1
            call3(free, stream, address[slot], 0)
    return foreign, failed
