"""Arenas of mapped memory: they grow and shrink in place, and no byte of what lives there is lost."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs.core_machine import MIB, Machine

PROGRAM = Path(__file__).parent / "programs" / "drifting_loop.py"
CUPY = pytest.mark.usefixtures("cupy_installed")


def drift(*arguments: str) -> dict[str, Any]:
    """Run drifting_loop.py and return what it says."""
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@CUPY
def test_a_mapped_arena_grows_and_shrinks_in_place_where_a_pools_is_held_twice() -> None:
    mapped, pool = drift("mapped"), drift("pool")
    for result in (mapped, pool):
        assert [part["phase"] for part in result["parts"]] == ["running on the plan"] * 3
        assert result["left"] == {"allocated": 0, "reserved": 0, "device_used": 0}
        assert result["ooms"] == 0
    middling, large, small = mapped["parts"]
    assert small["base"] == large["base"] == middling["base"]
    assert large["arena"] > middling["arena"]
    assert small["arena"] < large["arena"]
    assert small["reserved"] < pool["parts"][2]["reserved"] / 2
    assert large["peak"] < pool["parts"][1]["peak"]
    assert large["reserved"] < pool["parts"][1]["reserved"]


@CUPY
@pytest.mark.parametrize("arguments", [("--mark",), ("--limit", str(230 * MIB))])
def test_mapped_memory_counts_and_is_given_back(arguments: tuple[str, ...]) -> None:
    result = drift("mapped", *arguments)
    assert result["left"] == {"allocated": 0, "reserved": 0, "device_used": 0}
    assert result["ooms"] == 0
    assert result["parts"][1]["phase"] == "running on the plan"
    assert max(part["peak"] for part in result["parts"]) <= 230 * MIB


@CUPY
def test_a_range_grows_and_shrinks_by_whole_pieces_and_keeps_its_bytes(run_checks: Any) -> None:
    result = run_checks(
        """
import ctypes, json
from stalloc import device
from stalloc.device import VirtualGPU, virtual
device.activate("virtual", VirtualGPU(total_bytes=1 << 30, num_devices=2))
MIB = 1 << 20
memory = device.devices()[1].new_range()
used = lambda: virtual.used_bytes(1) // MIB
said = {"empty": used(), "grown": memory.grow(100 * MIB)}
word = ctypes.c_int64.from_address(memory.ptr + 8 * MIB)
word.value = 7
said |= {"used": used(), "more": memory.grow(500 * MIB), "then": used(), "too_much": memory.grow(1200 * MIB)}
said |= {"still": used(), "size": memory.size_bytes // MIB}
memory.shrink(120 * MIB)
said |= {"shrunk": used(), "size_then": memory.size_bytes // MIB, "word": word.value, "other": virtual.used_bytes(0)}
del memory
said["gone"] = used()
print(json.dumps(said))
"""
    )
    assert result.pop("shrunk") == result.pop("size_then") == result.pop("least", 132)
    expected = {"empty": 0, "grown": True, "used": 100, "more": True, "then": 500, "too_much": False, "still": 500}
    assert result == expected | {"size": 500, "word": 7, "other": 0, "gone": 0}


@pytest.mark.parametrize("seed", range(6))
def test_a_segment_ends_elsewhere_only_where_nothing_lives(seed: int) -> None:
    print(f"seed {seed}")
    rng, machine = np.random.default_rng(seed), Machine(capacity=256 * MIB)
    machine.allocate(3 * MIB)
    (base, size), state, moved = machine.segments.items()[0], machine.state, [0, 0]
    machine.segments.remove(base)
    machine.segments.add(base, 200 * MIB)  # what the device would map there; the core knows of `size`
    machine._next = base + 200 * MIB
    for _ in range(400):
        if rng.random() < 0.5:
            machine.allocate(int(rng.integers(MIB + 1, 9 * MIB)))
        elif len(machine.live) > 1:
            machine.free(machine.live.addresses()[int(rng.integers(len(machine.live)))])
        if rng.random() < 0.2:
            wanted = int(rng.integers(1, 100)) * 2 * MIB
            ends = [address + held - base for address, held in machine.live.items() if address < base + 200 * MIB]
            reserved, needs = state.record.reserved_bytes, state.segment_needs(base)
            assert max(ends, default=0) <= needs <= max(ends, default=0) + MIB, "a block may keep a small remainder"
            done = state.resize_segment(base, wanted)
            assert done == (wanted >= needs)
            if done:
                moved[wanted > size] += 1
                assert state.record.reserved_bytes == reserved + wanted - size
                size = wanted
        held = [address + held - base for address, held in machine.live.items() if address < base + 200 * MIB]
        assert max(held, default=0) <= size
    assert min(moved) > 0
    for address in machine.live.addresses():
        machine.free(address)
    machine.give_back_segments()
    assert state.record.reserved_bytes == state.record.total.allocated_bytes == 0
