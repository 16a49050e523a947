"""A CuPy loop whose arrays grow and shrink, each of them written to and checked, on host memory.

    python drifting_loop.py ARENA [--mark] [--limit BYTES]

It runs many steps each of a middling, a large and a small width; one array of each part lives on to the end. Prints one
JSON object: for each part whether it was planned in the end, what was reserved, and the most that the device ever gave.
"""

import ctypes
import json
import sys

import numpy as np

import stalloc
from stalloc.device import VirtualGPU, virtual

arena, arguments = sys.argv[1], sys.argv[2:]
RUNTIME = stalloc.install(
    device="virtual",
    gpu=VirtualGPU(name="host memory", total_bytes=8 << 30, copy_limit_bytes=None),
    settings=stalloc.integrations.Settings(arena=arena, plan_wait_seconds=60.0),
)
import cupy as cp  # noqa: E402  (its allocator is in place)

if "--limit" in arguments:
    cp.get_default_memory_pool().set_limit(size=int(arguments[-1]))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
numbers = iter(range(1, 1 << 40))
LAYERS = 14
PARTS = ((40, 60), (100, 60), (10, 300))  # widths and steps


class Array:
    """One array that holds its number at the begin of every page, and at its end."""

    def __init__(self, num_bytes: int) -> None:
        self.data, self.number = cp.empty(num_bytes, dtype=cp.uint8), next(numbers)
        words = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(self.data.data.ptr), np.uint8)
        words = words[: num_bytes // 8 * 8].view(np.int64)
        self.pages, self.end = words[::512], words[-1:]
        self.pages[:] = self.end[:] = self.number

    def check(self) -> None:
        """Nobody else has written there."""
        assert (self.pages == self.number).all(), f"the array at {self.data.data.ptr:#x} was overwritten"
        assert self.end[0] == self.number, f"the end of the array at {self.data.data.ptr:#x} was overwritten"


def step(width: int, handed_on: list[Array]) -> tuple[Array, list[Array]]:
    """Forward and backward: an activation of it, and what the next step takes over."""
    activations = [Array(width * (90_000 + 700 * i)) for i in range(LAYERS)]
    one, following = activations[3], []
    for i, array in enumerate(handed_on):
        array.check()
        del array
        handed_on[i] = None
    for i in reversed(range(LAYERS)):
        workspace = Array(width * (50_000 + 300 * i))
        if i % 4 == 0:
            following.append(Array(700_000 + 512 * i))
        workspace.check()
        activations.pop().check()
    if "--mark" in arguments:
        stalloc.step()
    return one, following


def main() -> None:
    weights = [Array(1_000_000 + 4096 * i) for i in range(8)]
    kept, handed_on, parts = [], [], []
    for width, steps in PARTS:
        for number in range(steps):
            one, handed_on = step(width, handed_on)
            if number == steps - 10:
                kept.append(one)
            del one
        parts.append(
            {
                "phase": CONTROLLER.status.phase.value,
                "reserved": STATE.record.statistics.reserved_bytes,
                "arena": STATE.record.plan.arena_bytes,
                "base": STATE.record.plan.arena,
                "peak": virtual.peak_bytes(),
                "plans": CONTROLLER.status.num_plans,
            }
        )
        for array in [*weights, *kept]:
            array.check()
    del array
    kept.clear()
    weights.clear()
    handed_on.clear()
    CONTROLLER.drop_plan()
    CONTROLLER.memory.release_unused()
    cp.get_default_memory_pool().free_all_blocks()
    left = {
        "allocated": STATE.record.total.allocated_bytes,
        "reserved": STATE.record.statistics.reserved_bytes,
        "device_used": virtual.used_bytes(),
    }
    print(json.dumps({"parts": parts, "left": left, "ooms": STATE.record.statistics.num_ooms}))


main()
