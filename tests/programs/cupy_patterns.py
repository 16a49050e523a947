"""CuPy arrays that are all written to and checked: observed, under a plan, after the plan is dropped, uninstalled.

    python cupy_patterns.py OPERATIONS SEED [ARENA]

Every byte of an array holds its number from its allocation to its free, where it is checked; the address ranges of
live arrays are checked against each other at every allocation. Half of the operations of every part are done by two
threads. Prints one JSON object; an overwritten byte or an overlap is an error.
"""

import ctypes
import itertools
import json
import sys
import threading
from operator import attrgetter

import numpy as np
from core_machine import Intervals

import stalloc
from stalloc.device import VirtualGPU, virtual

RUNTIME = stalloc.install(
    device="virtual",
    gpu=VirtualGPU(name="host memory", total_bytes=12 << 30, copy_limit_bytes=None),
    settings=stalloc.integrations.Settings(max_plans=20, arena=sys.argv[3] if len(sys.argv) > 3 else "pool"),
)
import cupy as cp  # noqa: E402  (its allocator is in place)

CONTROLLER = RUNTIME.controllers[0]
RING_LENGTH = 60


class Heap:
    """All live arrays of the process, by address range; an overlap raises."""

    def __init__(self) -> None:
        self._live = Intervals()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.operations = 0
        self.bytes_checked = 0

    def allocate(self, num_bytes: int) -> "Array":
        """A new array, filled with its number."""
        array = cp.empty(num_bytes, dtype=cp.uint8)
        with self._lock:
            self._live.add(array.data.ptr, num_bytes)
            self.operations += 1
            number = next(self._numbers)
        return Array(self, array, number)

    def free(self, array: "Array") -> None:
        """Check an array and let go of it."""
        array.check()
        with self._lock:
            self._live.remove(array.data.data.ptr)
            self.operations += 1
            self.bytes_checked += array.data.nbytes
        array.data = None


class Array:
    """One array and what it has to hold."""

    def __init__(self, heap: Heap, data, number: int) -> None:
        self.heap, self.data, self.number = heap, data, number * 0x9E3779B97F4A7C15 % (1 << 63)
        words, rest = self._views()
        words[:] = self.number
        rest[:] = self.number & 0xFF

    def _views(self) -> tuple[np.ndarray, np.ndarray]:
        size, address = self.data.nbytes, self.data.data.ptr
        whole = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        return whole[: size // 8 * 8].view(np.int64), whole[size // 8 * 8 :]

    def check(self) -> None:
        """Every byte is as it was written."""
        words, rest = self._views()
        good = bool((words == self.number).all() and (rest == self.number & 0xFF).all())
        assert good, f"{self.data.nbytes} bytes at {self.data.data.ptr:#x} were overwritten"


def random_size(rng: np.random.Generator) -> int:
    """1 byte to 64 MiB, most of them small."""
    return int(2 ** rng.uniform(0, 26)) if rng.random() < 0.01 else int(2 ** rng.uniform(0, 18))


def at_random(heap: Heap, rng: np.random.Generator, streams: list, operations: int, kept: list[Array]) -> None:
    """Allocate and free at random, on random streams."""
    for i in range(operations):
        growing = (i // 300) % 2 == 0
        if kept and (len(kept) > 200 or rng.random() > (0.65 if growing else 0.35)):
            heap.free(kept.pop(int(rng.integers(len(kept)))))
        else:
            with streams[int(rng.integers(len(streams)))]:
                kept.append(heap.allocate(random_size(rng)))


class Loop:
    """A step that repeats, with its own sizes, streams and lifespans; deviations happen at a rate."""

    def __init__(self, rng: np.random.Generator, streams: list) -> None:
        self.rng = rng
        self.size = [int(2 ** rng.uniform(10, 19)) for _ in range(RING_LENGTH)]
        self.stream = [streams[int(rng.integers(len(streams)))] for _ in range(RING_LENGTH)]
        self.lifespan = [min(int(n), RING_LENGTH) for n in rng.geometric(0.12, RING_LENGTH)]
        self.due: dict[int, list[Array]] = {}
        self.position = 0

    def step(self, heap: Heap, rate: float = 0.0) -> None:
        """One step; at each request another is put in before it, it is left out, resized or kept longer."""
        for size, stream, lifespan in zip(self.size, self.stream, self.lifespan, strict=True):
            for array in self.due.pop(self.position, ()):
                heap.free(array)
            deviation = int(self.rng.integers(4)) if self.rng.random() < rate else -1
            wanted, lives = size, lifespan
            if deviation == 0:
                kept = heap.allocate(random_size(self.rng))
                self.due.setdefault(self.position + int(self.rng.integers(1, 200)), []).append(kept)
            elif deviation == 1:
                wanted += 512 * int(self.rng.integers(1, 50))
            elif deviation == 2:
                lives += int(self.rng.integers(1, 150))
            if deviation != 3:
                with stream:
                    self.due.setdefault(self.position + lives, []).append(heap.allocate(wanted))
            self.position += 1
        stalloc.step()

    def end(self, heap: Heap) -> None:
        """Free all."""
        for array in itertools.chain(*self.due.values()):
            heap.free(array)
        self.due.clear()


def in_threads(*work) -> None:
    """Run all at once; an error in any of them is raised."""
    errors: list[BaseException] = []

    def guarded(function) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def random_part(heap: Heap, rngs: list, streams: list, operations: int, kept: list[list[Array]]) -> None:
    """Half of the operations here, half in two threads."""
    at_random(heap, rngs[0], streams, operations // 2, kept[0])
    in_threads(*(lambda i=i: at_random(heap, rngs[i], streams, operations // 4, kept[i]) for i in (1, 2)))


def _met() -> dict[str, int]:
    report = stalloc.statistics()[0]
    return {"hits": report.hits, "misses": report.misses, "conflicts": report.conflicts}


def main(operations: int, seed: int) -> None:
    print(f"seed {seed}", file=sys.stderr)
    rngs = [np.random.default_rng([seed, i]) for i in range(4)]
    streams = [cp.cuda.Stream.null, cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)]
    heap, kept = Heap(), [[], [], []]
    quarter = operations // 4
    result = {"observing": CONTROLLER.status.phase.value}

    random_part(heap, rngs, streams, quarter, kept)
    result["while_observing"] = CONTROLLER.status.phase.value

    loop, steps = Loop(rngs[3], streams), 0
    while CONTROLLER.status.phase.value != "running on the plan" and steps < 60:
        loop.step(heap)
        steps += 1
    result |= {"planned": CONTROLLER.status.phase.value, "steps_until_planned": steps, "note": CONTROLLER.status.note}
    begin, met = heap.operations, _met()
    # how many steps come before the plan, and between plans, depends on how long these take
    while heap.operations < begin + quarter // 2 or (not all(met.values()) and heap.operations < begin + 8 * quarter):
        loop.step(heap, rate=0.02)
        met = _met()
    result["alone"] = met

    def loop_on() -> None:
        begin = heap.operations
        while heap.operations < begin + quarter:
            loop.step(heap, rate=0.05)

    before = stalloc.statistics()[0]
    in_threads(loop_on, lambda: at_random(heap, rngs[1], streams, quarter // 2, kept[1]))
    after = stalloc.statistics()[0]
    result["in_threads"] = {name: getattr(after, name) - getattr(before, name) for name in ("run_hits", "run_misses")}
    result["plans_made"] = stalloc.statistics()[0].plans_made

    CONTROLLER.drop_plan()
    for _ in range(5):
        loop.step(heap)
    random_part(heap, rngs, streams, quarter, kept)
    result["dropped"] = CONTROLLER.status.phase.value
    stalloc.uninstall()
    loop.step(heap)
    random_part(heap, rngs, streams, quarter, kept)

    for array in itertools.chain(*kept):
        heap.free(array)
    loop.end(heap)
    state = CONTROLLER.state
    counters = (
        "total.allocated_bytes",
        "total.requested_bytes",
        "total.num_live",
        "statistics.num_unknown_frees",
        "statistics.num_ooms",
        "plan.arena_live",
    )
    CONTROLLER.memory.release_unused()
    cp.get_default_memory_pool().free_all_blocks()
    result |= {name.rpartition(".")[2]: attrgetter(name)(state.record) for name in counters}
    result |= {"reserved": state.record.statistics.reserved_bytes, "device_used": virtual.used_bytes()}
    result |= {"operations": heap.operations, "bytes_checked": heap.bytes_checked}
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
