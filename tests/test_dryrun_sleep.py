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


def dryrun(program: Path, memory_mib: int, order: str) -> tuple[dict[str, Any], str, int]:
    """What is told of sleeping, what was printed on one line, and the exit code."""
    out = program.with_name("result.json")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    options = ("--json", out, "--headroom", "0", "--memory", f"{memory_mib}MiB")
    done = run_stalloc("dryrun", *options, program, order, variables=variables)
    return json.loads(out.read_text())["sleep"], " ".join((done.stdout + done.stderr).split()), done.returncode


def test_each_phase_has_its_peaks_and_what_sleeps(program: Path) -> None:
    told, shown, code = dryrun(program, 200, "cache last")
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
    assert not told["is_given_plenty"]
    assert "sleep weights 3 160.00 MiB 160.00 MiB kv 100.00 MiB, weights 40.00 MiB" in shown


def test_the_phase_that_runs_out_is_named_with_how_much_and_who_could_sleep(program: Path) -> None:
    told, shown, code = dryrun(program, 200, "cache first")
    assert code == 1
    assert told["is_given_plenty"]
    assert told["ran_out"] == {
        "phase": "wake weights",
        "waking": "kv",
        "at": "colocated.py:23 <module>",
        "wanted_bytes": 100 * MIB,
        "free_bytes": 64 * MIB,
        "could_sleep": {"weights": 40 * MIB},
    }
    assert (
        "with 200.00 MiB memory runs out after `wake weights`: waking kv (colocated.py:23 <module>) needs 100.00 MiB "
        "when 64.00 MiB are free, 36.00 MiB too few; stalloc.sleep(tags=…) of weights (40.00 MiB) would make room"
    ) in shown


@pytest.mark.slow
def test_a_request_that_finds_no_room_is_told_alike(program: Path) -> None:
    told, shown, code = dryrun(program, 180, "weights stay")
    assert code == 1
    assert told["ran_out"]["phase"] == "sleep kv"
    assert told["ran_out"]["waking"] is None
    assert told["ran_out"]["at"].startswith("colocated.py:5 block")
    assert told["ran_out"]["wanted_bytes"] == 64 * MIB
    assert told["ran_out"]["could_sleep"] == {"weights": 40 * MIB}
    assert "asks for 64.00 MiB when 44.00 MiB are free, 20.00 MiB too few" in shown
    told, shown, _ = dryrun(program, 130, "weights stay")
    assert told["ran_out"]["phase"] == "start"
    assert told["ran_out"]["could_sleep"] == {}
    assert "nothing that is awake has a tag" in shown


@pytest.mark.slow
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
    told, shown, code = dryrun(program, 100, "")
    assert code == 0, shown
    assert [one["allocated_peak_bytes"] >> 20 for one in told["phases"]] == [64, 0, 8]
