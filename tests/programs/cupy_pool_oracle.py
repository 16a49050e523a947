"""The real CuPy pool under random programs, with a device made of numbers: what it did, event by event.

`run_programs(path, seed, num_programs, num_events)` writes for each program the columns of what was asked (an
allocation that the pool refused has `refused` 1 and its request stays without a block) and of what the pool said.
The device hands out addresses that were never used before, as the models do, and has a capacity; each program draws
its number of streams, its sizes, a limit of the pool and a capacity.
"""

import gc
import sys

import numpy as np

from stalloc.device import VirtualGPU, activate
from stalloc.replay.blocks import FIRST_ADDRESS, GRANULE

activate("virtual", VirtualGPU(name="Test GPU", total_bytes=4 << 30, compute_capability=(8, 0), num_devices=1))

import cupy  # noqa: E402  (the devices are chosen before it is imported)

KIB, MIB = 1 << 10, 1 << 20
ALLOC, FREE_COMPLETED, EMPTY_CACHE = 0, 2, 3
COLUMNS = ("kind", "request", "size", "stream", "address", "refused", "total", "used", "cached", "free_blocks")
COMMON_SIZES = [512, 1024, 1536, 4 * KIB, 64 * KIB, MIB, 2 * MIB, 5 * MIB]


class Device:
    """Memory of `capacity` bytes, 0 for no end of it, at addresses that are only numbers."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.taken, self._next = capacity, 0, FIRST_ADDRESS

    def malloc(self, size: int) -> "cupy.cuda.MemoryPointer":
        """What the pool calls when it has nothing cached."""
        if self.capacity and self.taken + size > self.capacity:
            raise cupy.cuda.runtime.CUDARuntimeError(2)
        address, self._next = self._next, self._next + (size + 3 * GRANULE - 1) // GRANULE * GRANULE
        self.taken += size
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, _Held(self, size), 0), 0)


class _Held:
    """What a chunk of the device keeps alive; its end gives the bytes back."""

    def __init__(self, device: Device, size: int) -> None:
        self._device, self._size = device, size

    def __del__(self) -> None:
        self._device.taken -= self._size


def one_program(seed: int, num_events: int) -> dict[str, np.ndarray]:
    """One random program; its columns, each (num_events,), and the settings."""
    rng = np.random.default_rng(seed)
    num_streams, most_live = int(rng.integers(1, 4)), int(rng.choice([20, 100, 400]))
    few = rng.integers(1, 3 * MIB, int(rng.integers(3, 40)))
    shape = int(rng.integers(3))
    limit = int(rng.choice([0, 0, 64, 256])) * MIB
    capacity = int(rng.choice([0, 0, 48, 200])) * MIB
    device = Device(capacity)
    pool = cupy.cuda.MemoryPool(device.malloc)
    if limit:
        pool.set_limit(size=limit)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(num_streams)]
    rows = np.zeros((num_events, len(COLUMNS)), np.int64)
    live: dict[int, cupy.cuda.MemoryPointer] = {}
    growing = 0.6
    for i in range(num_events):
        if rng.random() < 0.01:
            growing = float(rng.uniform(0.3, 0.7))
        draw = rng.random()
        if draw < 0.002:
            pool.free_all_blocks()
            rows[i, :2] = EMPTY_CACHE, -1
        elif live and (draw > growing or len(live) >= most_live):
            request = list(live)[int(rng.integers(len(live)))]
            del live[request]
            rows[i, :2] = FREE_COMPLETED, request
        else:
            size = [
                int(rng.choice(few)),
                int(rng.choice(COMMON_SIZES)),
                int(np.exp(rng.uniform(0, np.log(6 * MIB)))),
            ][shape]
            stream = int(rng.integers(num_streams))
            rows[i, :4] = ALLOC, i, size, stream
            try:
                with streams[stream]:
                    block = pool.malloc(size)
                rows[i, 4] = block.ptr
                live[i] = block
                del block
            except cupy.cuda.memory.OutOfMemoryError:
                rows[i, 5] = 1
        rows[i, 6:] = pool.total_bytes(), pool.used_bytes(), pool.free_bytes(), pool.n_free_blocks()
        assert rows[i, 6] == device.taken
    columns = {name: rows[:, column] for column, name in enumerate(COLUMNS)}
    return columns | {"seed": np.array(seed), "limit": np.array(limit), "capacity": np.array(capacity)}


def run_programs(path: str, seed: int, num_programs: int, num_events: int) -> None:
    """Write `num_programs` programs, the first of them with `seed`, to an .npz file."""
    found = {}
    for number in range(num_programs):
        for name, column in one_program(seed + number, num_events).items():
            found[f"{number}/{name}"] = column
    np.savez(path, **found)


if __name__ == "__main__":
    gc.freeze()  # a pool that runs out of memory collects garbage: what was imported is none
    run_programs(sys.argv[1], *(int(word) for word in sys.argv[2:5]))
