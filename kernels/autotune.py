"""Measure configurations on this machine's GPU and keep the best one: `python -m stalloc.kernels.autotune`.

Contract: the file of configurations is written only where a GPU was measured; every candidate's result is compared
with the reference before its time counts.
"""

import datetime
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from stalloc.errors import BadInputError
from stalloc.sizes import GIB

from .configs import FILE, Config, known, write
from .launch import batched_copy

TILES, WARPS, PROGRAMS, GROUPS = (8192, 16384, 32768), (4, 8), (2, 4, 8), (4, 8, 16)
REPEATS = 5


def candidates() -> list[Config]:
    """Every configuration that is tried."""
    shapes = product(TILES, WARPS, PROGRAMS, GROUPS)
    return [
        Config(tile_bytes=tile, num_warps=warps, programs_per_sm=programs, group_rows=rows)
        for tile, warps, programs, rows in shapes
    ]


def milliseconds(torch: Any, action: Callable[[], None]) -> float:
    """The fastest of a few runs, by the device's own clock, after one that compiles."""
    action()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def main() -> int:
    """Measure, write the file, say what was found. Exit code 2 where no GPU answers."""
    try:
        import torch

        there = torch.cuda.is_available()
    except ImportError:
        there = False
    if not there:
        print("stalloc.kernels.autotune: no GPU that torch can use is here: run it on the machine to tune for.")
        return 2
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    total = min(8 * GIB, properties.total_memory // 4)
    memory = torch.randint(0, 256, (2 * total,), dtype=torch.uint8, device="cuda")
    rng = np.random.default_rng(0)
    large = np.full(total >> 24, 1 << 24, np.int64)
    small = rng.integers(512, 65536, 10_000) // 512 * 512
    tables = [(np.cumsum(size) - size + memory.data_ptr(), size) for size in (large, small)]
    best, least = None, float("inf")
    for config in candidates():
        times = []
        for start, size in tables:
            memory[total:].fill_(0xA5)
            copy = partial(batched_copy, start, start + total, size, config=config, check=False)
            times.append(milliseconds(torch, copy))
            count = int(size.sum())
            if not torch.equal(memory[:count], memory[total : total + count]):
                print(f"stalloc.kernels.autotune: {config} copied wrongly on {properties.name}: please report it.")
                return 1
        score = float(np.prod(times))
        print(f"{times[0]:8.3f} ms large  {times[1]:8.3f} ms small  {config}")
        if score < least:
            best, least = config, score
    assert best is not None
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    configs = known() | {properties.major * 10 + properties.minor: replace(best, source=f"{properties.name} {day}")}
    try:
        write(configs)
    except BadInputError as error:
        print(f"stalloc.kernels.autotune: {error}")
        return 2
    print(f"Wrote {FILE.name}: {best}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
