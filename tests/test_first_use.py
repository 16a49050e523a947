"""`stalloc run` and `record` leave the environment and forked processes to the program until it uses CUDA."""

import json
from pathlib import Path

import pytest
from warm_programs import run_warm

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

CHOOSES = """
import os
from stalloc.device import virtual
assert not virtual.is_initialised()
os.environ["CUDA_VISIBLE_DEVICES"] = "2"
LIBRARY
assert virtual.contexts() == [2], virtual.contexts()
"""
USES_TORCH = """
import torch
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
held = torch.empty(1 << 20, device="cuda")
"""
USES_CUPY = """
import cupy
held = cupy.empty(1 << 20)
"""
FORKS = """
import multiprocessing
import torch
import stalloc
from stalloc.device import virtual

def work(number, answers):
    held = torch.empty(number << 20, dtype=torch.uint8, device=f"cuda:{number}")
    served = [(one.device, one.run_allocated_peak_bytes) for one in stalloc.statistics()]
    answers.put((virtual.contexts(), served))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    for number in (1, 2):
        child = context.Process(target=work, args=(number, answers))
        child.start()
        found = answers.get()
        child.join()
        assert found == ([number], [(number, number << 20)]), found
    assert not virtual.is_initialised()
"""


# the command line on a machine of four
ON_FOUR = """
import sys
from stalloc import device
device.activate("virtual", device.VirtualGPU(num_devices=4))
from stalloc.cli import main
sys.exit(main())
"""


def ended_well(folder: Path, source: str, *verb: object) -> str:
    (folder / "program.py").write_text(source)
    done = run_warm(ON_FOUR, *verb, "program.py", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("library", [USES_TORCH, USES_CUPY], ids=["torch", "CuPy"])
def test_a_run_heeds_the_devices_that_the_script_hides(tmp_path, library):
    ended_well(tmp_path, CHOOSES.replace("LIBRARY", library), "run", "--json", "told.json")
    told = json.loads((tmp_path / "told.json").read_text())
    assert [one["device"] for one in told["devices"]] == [0]


@pytest.mark.parametrize("how", [(), ("--stacks",), ("--ops",)], ids=["plain", "stacks", "operations"])
def test_a_recording_heeds_the_devices_that_the_script_hides(tmp_path, how):
    printed = ended_well(tmp_path, CHOOSES.replace("LIBRARY", USES_TORCH), "record", "-o", "x.trace.npz", *how)
    assert "1 request" in printed


def test_children_may_use_cuda_if_their_parent_has_not(tmp_path):
    assert "the program allocated no GPU memory" in ended_well(tmp_path, FORKS, "run")


def test_calls_that_need_stalloc_before_cuda_is_used_have_what_the_run_chose(tmp_path):
    program = """
import torch
import stalloc
assert stalloc.statistics() == []
model = torch.nn.Linear(8, 8)
allowed = stalloc.allow_compaction(model)
with stalloc.scope() as runtime:
    assert runtime is stalloc.install()
    model.cuda()
assert runtime.controllers[0].status.settings.streams == "share"
assert [one.run_allocated_peak_bytes for one in stalloc.statistics()] == [1024]
"""
    ended_well(tmp_path, program, "run", "--streams", "share")


def test_a_plan_that_does_not_fit_ends_the_run_with_a_sentence(tmp_path):
    steps = """
import cupy, stalloc
for _ in range(12):
    blocks = [cupy.empty(size << 20, dtype=cupy.uint8) for size in (300, 20, 5)]
    del blocks
    stalloc.step()
"""
    ended_well(tmp_path, steps, "run", "--save-plan", "step.plan.npz")
    small = ON_FOUR.replace("num_devices=4", "total_bytes=64 << 20")
    done = run_warm(small, "run", "--plan", "step.plan.npz", "program.py", folder=tmp_path)
    assert done.returncode == 125
    assert done.stderr.startswith("stalloc: the plan needs an arena of ")
