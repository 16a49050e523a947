"""Nanoseconds for one allocation and its free, from compiled code as from torch's own.

Contract: the device is made of numbers, so nothing but the allocator is timed; each figure is the best of several runs,
the one least disturbed. Compared figures come from one run with the same load.
"""

import ctypes
import threading
import time
from typing import Any

import numpy as np
from numba import njit

from running.soak_cycles import from_requests
from stalloc.core import constants
from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.core.entry import core_entries, cupy_entries, slow_entry
from stalloc.core.intrinsics import call3
from stalloc.core.state import DeviceState
from stalloc.runtime.shortage import segment_bytes
from stalloc.sizes import whole_pages

KIB, MIB = 1 << 10, 1 << 20
LENGTH, NUM_SIZES, PASSES = 2_000, 64, 200


class Device:
    def __init__(self) -> None:
        self._next = 0x7000_0000_0000
        self.state = DeviceState(0, slow_entry(self._help))
        self._states = np.array([self.state.address], np.int64)
        self.entries = cupy_entries(self._states.ctypes.data, core_entries())

    def _help(self, device: int, request: int, argument: int) -> int:
        pool = request >> constants.REASON_BITS
        size = segment_bytes(self.state.heap.pool_kind(pool), argument)
        return int(self.state.heap.give_segment(pool, self.take(size), size))

    def take(self, size: int) -> int:
        base, self._next = self._next, self._next + size
        return base


class Cycle:
    def __init__(self, seed: int, largest: int = 8 * MIB) -> None:
        rng = np.random.default_rng(seed)
        sizes = (2 ** rng.uniform(10, np.log2(largest), NUM_SIZES)).astype(np.int64) // 512 * 512 + 1024
        size, lifespan = rng.choice(sizes, LENGTH), np.minimum(rng.geometric(0.03, LENGTH), LENGTH)
        made = from_requests(size, np.zeros(LENGTH, np.int64), lifespan, np.arange(LENGTH))
        self.size, self.offset, self.peak = made.size, made.offset, made.peak_bytes
        self.dying, self.first = made.dying, made.first_dying

    def serve(self, device: Device, room: int = 0) -> None:
        """Serve this cycle on a device, from an arena with `room` bytes beyond the plan."""
        arena, arena_bytes = device.state.arena, whole_pages(self.peak + room)
        columns = {"size": self.size, "stream": np.zeros(LENGTH, np.int64), "offset": self.offset}
        arena.install(ArenaSchedule(arena_bytes=arena_bytes, **columns))
        arena.count(arena_bytes)
        arena.serve(device.take(arena_bytes), arena_bytes)


@njit(nogil=True)
def _run_cycle(allocate, free, stream, size, dying, first, passes, address):
    for _ in range(passes):
        for i in range(len(size)):
            for k in range(first[i], first[i + 1]):
                call3(free, stream, address[dying[k]], 0)
                address[dying[k]] = 0
            address[i] = call3(allocate, stream, size[i], 0)


@njit(nogil=True)
def _run_shuffled(allocate, free, stream, size, seed, operations, address):
    """Replace one of the live blocks by one of another size, both at random."""
    x = seed
    for _ in range(operations):
        x ^= x << 13
        x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
        x ^= x << 17
        i = (x & 0x7FFFFFFF) % len(address)
        call3(free, stream, address[i], 0)
        address[i] = call3(allocate, stream, size[((x >> 31) & 0x7FFFFFFF) % len(size)], 0)


@njit(nogil=True)
def _run_libc(malloc, free, size, dying, first, passes, address):
    for _ in range(passes):
        for i in range(len(size)):
            for k in range(first[i], first[i + 1]):
                call3(free, address[dying[k]], 0, 0)
                address[dying[k]] = 0
            address[i] = call3(malloc, size[i], 0, 0)


def timed(work: list[Any], repeats: int, pairs: int) -> float:
    """Nanoseconds of wall time a pair of one thread, all threads working at once; best of `repeats`."""
    best = float("inf")
    for _ in range(repeats):
        threads = [threading.Thread(target=function) for function in work]
        began = time.perf_counter_ns()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, (time.perf_counter_ns() - began) / pairs)
    return round(best, 1)


def planned_pair(repeats: int) -> float:
    device, cycle = Device(), Cycle(1)
    cycle.serve(device)
    address = np.zeros(LENGTH, np.int64)
    arguments = *device.entries, 0, cycle.size, cycle.dying, cycle.first
    _run_cycle(*arguments, 2, address)
    device.state.write(**{"follow.hits": 0, "iterations.misses": 0, "iterations.conflicts": 0})
    figure = timed([lambda: _run_cycle(*arguments, PASSES, address)], repeats, LENGTH * PASSES)
    record = device.state.record
    assert record.iterations.misses == record.iterations.conflicts == 0 < record.follow.hits
    return figure


def heap_pair(repeats: int) -> float:
    device, cycle, address = Device(), Cycle(1), np.zeros(LENGTH, np.int64)
    arguments = *device.entries, 0, cycle.size, cycle.dying, cycle.first
    _run_cycle(*arguments, 2, address)
    return timed([lambda: _run_cycle(*arguments, PASSES, address)], repeats, LENGTH * PASSES)


def borrowed_pair(repeats: int, live: int = 5_000) -> float:
    """Requests that are not on the schedule, from idle parts of the arena, with `live` blocks of theirs."""
    device, cycle = Device(), Cycle(1, 64 * MIB)
    cycle.serve(device, room=live * 256 * KIB)
    # smaller ones have pages of their own
    sizes = np.random.default_rng(3).integers(constants.LITTLE, 256 * KIB, 64) // 512 * 512 + 1
    address = np.zeros(live, np.int64)
    for i in range(live):
        address[i] = device.state.malloc(int(sizes[i % len(sizes)]), 0)
    arguments = *device.entries, 0, sizes
    _run_shuffled(*arguments, 7, 1000, address)
    lent, operations = device.state.record.dynamic.num_lent, LENGTH * PASSES // 4
    figure = timed([lambda: _run_shuffled(*arguments, 11, operations, address)], repeats, operations)
    assert device.state.record.dynamic.num_lent - lent > 0.95 * repeats * operations, "served from the arena"
    return figure


def contended(repeats: int, num_threads: int = 4) -> tuple[float, float]:
    """Nanoseconds a pair with several threads at once, each on a step of its own: ours, and the C library's malloc."""
    libc = ctypes.CDLL(None)
    malloc, free = (ctypes.cast(function, ctypes.c_void_p).value for function in (libc.malloc, libc.free))
    device, ours, theirs = Device(), [], []
    for index in range(num_threads):
        cycle = Cycle(index + 1, 64 * KIB)  # sizes that malloc serves without asking the kernel
        if index == 0:
            cycle.serve(device)
        address, other = np.zeros((2, LENGTH), np.int64)
        rest = cycle.size, cycle.dying, cycle.first
        ours.append(lambda a=address, r=rest, s=index: _run_cycle(*device.entries, 0x100 * s, *r, PASSES, a))
        theirs.append(lambda a=other, r=rest: _run_libc(malloc, free, *r, PASSES, a))
    ours[0]()
    theirs[0]()
    return timed(ours, repeats, LENGTH * PASSES), timed(theirs, repeats, LENGTH * PASSES)
