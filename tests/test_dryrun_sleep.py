"""A dry run of a trainer and an engine that take turns on one card: what each phase takes, and which runs out."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc

pytestmark = pytest.mark.usefixtures("cupy_installed", "cuda_torch")

MIB = 1 << 20
#: weights of 40 MiB and a cache of 100; a trainer with a state of 96, which asks for 64 more in a step
COLOCATED = """
import sys, torch, stalloc

def block(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

order = sys.argv[1]
weights, cache = block(40), [block(50), block(50)]
stalloc.tag("weights", weights)
stalloc.tag("kv", *cache)
for _ in range(3):
    stalloc.sleep(tags="kv", to="drop")
    if order != "weights stay":
        stalloc.sleep(tags="weights")
    state = block(96)
    torch.cuda.reset_peak_memory_stats()
    step = block(64)
    del step
    stalloc.wake(tags="weights")
    if order == "cache last":
        del state  # the new weights are there
    stalloc.wake(tags="kv")
    state = None
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The trainer and the engine; its argument says in which order they sleep and wake."""
    file = tmp_path / "colocated.py"
    file.write_text(COLOCATED)
    return file


def told_of(verb: str, program: Path, memory_mib: int, order: str = "") -> tuple[dict[str, Any], str, int]:
    """What a verb tells of sleeping, what was printed on one line, and the exit code."""
    out = program.with_name("result.json")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    own = ("--headroom", "0") if verb == "dryrun" else ("--device", "virtual")
    options = ("--json", out, *own, "--memory", f"{memory_mib}MiB")
    done = run_stalloc(verb, *options, program, order, variables=variables | {"STALLOC_CACHE": "off"})
    return json.loads(out.read_text())["sleep"], " ".join((done.stdout + done.stderr).split()), done.returncode


def test_each_phase_has_its_peaks_and_what_sleeps(program: Path) -> None:
    told, shown, code = told_of("run", program, 200, "cache last")
    assert code == 0, shown
    assert [(one["begins"], one["num_times"]) for one in told["phases"]] == [
        ("start", 1),
        ("sleep kv", 3),
        ("sleep weights", 3),
        ("wake weights", 3),
        ("wake kv", 3),
    ]
    assert [one["asleep"] for one in told["phases"]] == [
        {},
        {"kv": 100 * MIB},
        {"kv": 100 * MIB, "weights": 40 * MIB},
        {"kv": 100 * MIB},
        {},
    ]
    assert [one["allocated_peak_bytes"] // MIB for one in told["phases"]] == [140, 40, 160, 136, 140]
    held = [one["held_peak_bytes"] // MIB for one in told["phases"]]
    assert held[:3] == [140, 40, 160]
    assert all(136 <= one <= 200 for one in held[3:])
    assert told["ran_out"] is None


NO_ROOM = {
    "phase": "wake weights",
    "waking": "kv",
    "at": "colocated.py:22 <module>",
    "wanted_bytes": 100 * MIB,
    "free_bytes": 64 * MIB,
    "could_sleep": {"weights": 40 * MIB},
    "cached_bytes": 0,
}


def test_the_phase_that_runs_out_is_named_with_how_much_and_who_could_sleep(program: Path) -> None:
    told, _, code = told_of("run", program, 200, "cache first")
    assert code == 1
    assert told["ran_out"] == NO_ROOM
    told, _, code = told_of("run", program, 180, "weights stay")
    assert code == 1
    asked = {"phase": "sleep kv", "waking": None, "at": "colocated.py:5 block", "wanted_bytes": 64 * MIB}
    assert told["ran_out"] == NO_ROOM | asked | {"free_bytes": 44 * MIB}


@pytest.mark.slow
def test_a_dry_run_shows_the_phases_on_the_card_and_confirms_what_they_need(program: Path) -> None:
    told, shown, code = told_of("dryrun", program, 200, "cache last")
    assert code == 0, shown
    assert not told["is_given_plenty"]
    assert "sleep weights 3 160.00 MiB 160.00 MiB kv 100.00 MiB, weights 40.00 MiB" in shown
    assert "stalloc yes 160.00 MiB 300.00 MiB" in shown


@pytest.mark.slow
def test_a_dry_run_shows_all_phases_and_the_one_that_runs_out(program: Path) -> None:
    told, shown, code = told_of("dryrun", program, 200, "cache first")
    assert code == 1
    assert told["is_given_plenty"]
    assert [one["begins"] for one in told["phases"]][-1] == "wake kv"
    assert told["ran_out"] == NO_ROOM
    assert "stalloc no 236.00 MiB 300.00 MiB" in shown
    assert (
        "with 200.00 MiB memory runs out after `wake weights`: waking kv (colocated.py:22 <module>) needs 100.00 MiB "
        "when 64.00 MiB are free, 36.00 MiB too few; stalloc.sleep(tags=…) of weights (40.00 MiB) would make room"
    ) in shown


def test_what_a_program_reads_of_its_own_peaks_is_as_without_phases(tmp_path: Path) -> None:
    program = tmp_path / "reads.py"
    program.write_text(
        "import torch, stalloc\n"
        "big = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'); del big\n"
        "kept = torch.empty(8 << 20, dtype=torch.uint8, device='cuda')\n"
        "stalloc.tag('kept', kept); stalloc.sleep(tags='kept'); stalloc.wake()\n"
        "assert torch.cuda.max_memory_allocated() == 64 << 20\n"
        "torch.cuda.reset_peak_memory_stats()\n"
        "assert torch.cuda.max_memory_allocated() == 8 << 20\n"
    )
    told, shown, code = told_of("run", program, 100)
    assert code == 0, shown
    assert [one["allocated_peak_bytes"] >> 20 for one in told["phases"]] == [64, 0, 8]


#: the allocator of vLLM as far as it is looked at, with memory of the device that it gives back and takes again
ENGINE = """
import torch
from types import SimpleNamespace

class CuMemAllocator:
    def __init__(self):
        self.pointer_to_data = {}

    def make(self, tag, mib):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            one = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
        self.pointer_to_data[one.data_ptr()] = SimpleNamespace(tag=tag, handle=(0, mib << 20), held=(one, pool))

    def sleep(self, offload_tags=None):
        for one in self.pointer_to_data.values():
            one.held = None
        torch.cuda.empty_cache()

    def wake_up(self, tags=None):
        for one in self.pointer_to_data.values():
            if tags is None or one.tag in tags:
                if torch.cuda.mem_get_info()[0] < one.handle[1]:
                    raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp")
                pool = torch.cuda.MemPool()
                with torch.cuda.use_mem_pool(pool):
                    one.held = (torch.empty(one.handle[1], dtype=torch.uint8, device="cuda"), pool)
"""
TRAINER = """
import sys, torch
from vllm.device_allocator.cumem import CuMemAllocator
engine = CuMemAllocator()
engine.make("weights", 40)
engine.make("kv_cache", 100)
engine.sleep(offload_tags=("weights",))
state = torch.empty((320 if sys.argv[1:] == ["large"] else 160) << 20, dtype=torch.uint8, device="cuda")
engine.wake_up(["weights"])
del state
if sys.argv[1:] == ["empty"]:
    torch.cuda.empty_cache()
engine.wake_up(["kv_cache"])
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A trainer beside that engine."""
    module = tmp_path / "vllm" / "device_allocator" / "cumem.py"
    module.parent.mkdir(parents=True)
    module.write_text(ENGINE)
    program = tmp_path / "rl.py"
    program.write_text(TRAINER)
    return program


@pytest.mark.parametrize("order", ["", pytest.param("empty", marks=pytest.mark.slow)])
def test_what_pytorch_caches_is_named_where_vllm_finds_no_room_to_wake(engine: Path, order: str) -> None:
    out = engine.with_name("result.json")
    words = [order] if order else []
    done = run_stalloc("dryrun", "--serve", "--json", out, "--headroom", "0", "--memory", "256MiB", engine, *words)
    told = json.loads(out.read_text())["sleep"]
    begins = ["start", "sleep, weights kept", "wake weights"]
    assert [one["begins"] for one in told["phases"]] == [*begins, "wake kv_cache" + ", in vain" * (not order)]
    assert [one["held_peak_bytes"] // MIB for one in told["phases"]][:3] == [140, 160, 200]
    assert [one["asleep"] for one in told["phases"]][1:3] == [
        {"weights": 40 * MIB, "kv_cache": 100 * MIB},
        {"kv_cache": 100 * MIB},
    ]
    assert done.returncode == (not order)
    if not order:
        assert told["ran_out"]["phase"] == "wake weights"
        assert "44.00 MiB too few; PyTorch caches 160.00 MiB: call torch.cuda.empty_cache() before" in " ".join(
            done.stdout.split()
        )


def test_the_phase_in_which_a_request_finds_no_room_is_named_under_pytorch(engine: Path) -> None:
    done = run_stalloc("dryrun", "--serve", "--headroom", "0", "--memory", "256MiB", engine, "large")
    assert done.returncode == 1
    assert "it runs out of memory after `sleep, weights kept`: rl.py:8 <module> asks for 320.00 MiB" in " ".join(
        done.stdout.split()
    )
