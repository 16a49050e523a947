"""Optimizer state in host memory: the program's own numbers, and the bytes that were foreseen."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_programs import run_stalloc, told_by_file

from stalloc.fitting.fit_record import load_fit
from stalloc.fitting.foreseen_host import UpdateRecorded, paged, peak_bytes
from stalloc.techniques.tier_settings import TierSettings

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAM = Path(__file__).parent / "programs" / "paging.py"
BLOCK = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.two(torch.relu(self.one(x)))
"""
TRAINS = f"""
import sys, torch
from torch import nn
torch.manual_seed(0)
{BLOCK}
MODEL = nn.Sequential(*[Block() for _ in range(6)]).cuda()
OPTIMIZER = getattr(torch.optim, sys.argv[2])(MODEL.parameters())
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 2)
for step in range(int(sys.argv[1])):
    OPTIMIZER.zero_grad()
    MODEL(torch.ones(32, 256, device="cuda")).sum().backward()
    nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0)
    OPTIMIZER.step(*([] if sys.argv[2] != "LBFGS" else [lambda: MODEL(torch.ones(8, 256, device="cuda")).sum()]))
    SCHEDULER.step()
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(PROGRAM)
    return found


def test_parameters_and_state_are_the_optimizers_own_to_the_last_bit(found: dict[str, Any]) -> None:
    assert found["equal"] == dict.fromkeys(found["equal"], True)
    assert len(found["equal"]) >= 15
    assert {name for name, size in found["host"].items() if size == 0} == {"Adafactor"}, "its state is small"


def test_what_has_no_room_in_the_host_stays_on_the_device(found: dict[str, Any]) -> None:
    assert found["bounded"]["equal"]
    assert 0 < found["bounded"]["bytes"] <= 40_000 < found["host"]["AdamW"]


def test_optimizers_that_are_not_known_are_refused_in_a_sentence(found: dict[str, Any]) -> None:
    told = found["refused"]
    assert told["LBFGS"].startswith("LBFGS is not known to update each parameter by its own gradient and state alone")
    assert told["own"].startswith("Strange is not known")
    assert told["capturable"] == "Adam was made with capturable=True: its state stays on the device."
    assert told["several precisions"].startswith("Adafactor takes the precision of one of its parameters for a whole")
    assert told["model"] == "Sequential is no torch optimizer: give page_optimizer() one."


def test_bytes_go_to_the_host_and_come_back(found: dict[str, Any]) -> None:
    told = found["device"]
    assert told["as_loaded"]
    assert told["copied"]
    assert told["undone"]
    assert told["loaded_bytes"] == told["left_bytes"] == 0
    assert told["host_bytes"] == told["state_bytes"]
    assert told["host_bytes_undone"] == 0
    window_and_one_result = 5 << 20
    assert told["peaks"] == [window_and_one_result] * 3, "every step lets go at the same places"


def test_state_on_disk_is_the_optimizers_own_to_the_last_bit(found: dict[str, Any]) -> None:
    told = found["elsewhere"]["on disk"]
    assert told == dict.fromkeys(found["equal"], True)


def test_the_processors_updates_differ_by_rounding_and_fused_ones_not_at_all(found: dict[str, Any]) -> None:
    told = found["elsewhere"]
    assert len(told["by the processor"]) == 5
    assert max(told["by the processor"].values()) < 1e-6, "of the largest value, after six steps"
    assert told["in other layouts"] < 1e-6
    assert told["fused is fused"]
    assert told["bounded"], "what has no room in the host is updated on the device"


def test_the_processor_updates_what_lies_on_a_device_and_takes_no_memory_of_it(found: dict[str, Any]) -> None:
    assert found["processor"] == {"equal": True, "state": True, "more": 0, "undone": True}


def test_what_an_optimizer_had_goes_back_when_the_program_drops_it(found: dict[str, Any]) -> None:
    for used in found["remade"].values():
        before, after = used[: len(used) // 2], used[len(used) // 2 :]
        assert min(before) > 0
        assert max(after) == 0


def test_a_program_that_makes_another_optimizer_has_room_for_it_and_its_own_numbers(found: dict[str, Any]) -> None:
    told = found["made again"]
    assert told["equal"]
    assert told["said"] == []
    assert told["num_paged"] == 2
    assert 0 < told["host_bytes"] <= 48 << 10
    assert told["disk_bytes"] > 0


def test_what_was_committed_comes_back_and_what_goes_wrong_on_disk_is_a_sentence(found: dict[str, Any]) -> None:
    told = found["commits"]
    assert told["committed"]
    assert told["loaded"]
    assert told["locked"] == "FOLDER is used by another optimizer or model meanwhile: name another."
    assert told["no room for two"].endswith("than is allowed: nothing was committed.")
    assert told["nothing on disk"].startswith("this optimizer keeps no state on a disk")
    assert told["nothing committed"].startswith("FOLDER holds no committed state")
    assert told["no size"].startswith("'FOLDER' names no folder and size")
    assert told["damaged"].startswith("the state in FOLDER is damaged (a checksum does not agree)")
    assert "FOLDER (what was read is not what was written): go on from what was committed last" in told["misread"]
    assert "FOLDER/lost (No such file or directory)" in told["lost"]
    assert told["full"] == 2, "with no room on the disk state stays on the device"


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_after_any_kill_state_on_disk_is_that_of_the_last_commit(kills: int) -> None:
    told = told_by_file(PROGRAM.with_name("killed_commits.py"), kills)
    assert told["whole"] == told["kills"] == kills
    assert told["commits"] > 0


def test_bytes_of_a_device_go_to_the_disk_and_come_back_within_the_host_memory_that_is_allowed(
    found: dict[str, Any],
) -> None:
    told, in_host = found["device and disk"], found["device"]
    assert told["disk_state_bytes"] == 11 << 20
    assert in_host["disk_state_bytes"] == 0
    assert told["host_bytes"] <= 4 << 20
    for name in ("as_loaded", "copied", "undone", "loaded_bytes", "left_bytes", "peaks", "paged_bytes"):
        assert told[name] == in_host[name]


def test_layers_of_a_device_lie_on_disk_and_come_with_whatever_the_program_put_there(found: dict[str, Any]) -> None:
    told = found["layers on disk"]
    assert told["away"]
    assert told["host"] <= 300 << 10
    assert told["on disk"] >= 3
    assert told["read"]
    assert told["undone"]
    one_layer, results = 4 * 256 * 257, 4 * 1024
    assert told["most"] <= one_layer + results


def fit(folder: Path, *words: Any, code: int = 0) -> tuple[dict[str, Any], str]:
    program = folder / "trains.py"
    program.write_text(TRAINS)
    done = run_stalloc("fit", "--json", "found.json", *words[:-2], program, *words[-2:], folder=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text()), done.stdout


@pytest.mark.slow
def test_a_fit_pages_what_recomputation_cannot_save_and_the_run_keeps_the_budget(tmp_path: Path) -> None:
    found, shown = fit(tmp_path, "--budget", "104MiB", "--host", "64MiB", "--policy", "page", 6, "AdamW")
    as_it_is, paged, best = *found["candidates"][:2], found["candidates"][found["best"]]
    state_bytes = 2 * 4 * 6 * (2 * 256 * 1024)  # of the weights; biases are small
    assert as_it_is["needed_bytes"] > found["budget_bytes"] >= best["needed_bytes"] > paged["needed_bytes"] > 0
    assert paged["what"] == "page optimizer state"
    assert state_bytes <= paged["host_bytes"] <= 64 << 20
    assert best["what"] == "page 56 % of optimizer state", "what the budget has room for stays on the device"
    assert 0 < best["host_bytes"] < 0.7 * state_bytes
    assert paged["added_seconds"] > best["added_seconds"] > 0
    for one in (paged, best):
        assert one["expected_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.002)
    assert "host memory" in shown
    assert set(found["pareto"]) == {0, 1, found["best"]}
    assert shown.count("\n  +  ") == 2
    assert "next: stalloc run --budget 104MiB --host 64MiB" in shown
    assert load_fit(tmp_path / "trains.fit.npz").settings.tiers == TierSettings(
        host_bytes=64 << 20, paged_window_bytes=1, device_share=0.4375
    )
    words = ("--device", "virtual", "--budget", "104MiB", "--json", "run.json")
    done = run_stalloc("run", *words, "--host", "64MiB", tmp_path / "trains.py", 6, "AdamW", folder=tmp_path)
    assert "fitted anew" not in done.stderr
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["budget_kept"]
    assert told["run_reserved_peak_bytes"] <= 104 << 20
    assert told["hit_rate"] >= 0.999


@pytest.mark.slow
def test_a_fit_with_the_processor_and_the_disk_stays_within_what_it_may_use(tmp_path: Path) -> None:
    words = ("--budget", "104MiB", "--policy", "zero-offload")
    found, shown = fit(tmp_path, *words, "--host", "64MiB", 6, "AdamW")
    best = found["candidates"][found["best"]]
    assert best["what"] == "update 100 % on the processor"
    assert best["expected_bytes"] == pytest.approx(best["allocated_bytes"], rel=0.002)
    assert best["host_bytes"] <= 64 << 20
    assert "updates on the processor round otherwise" in shown
    found, _ = fit(tmp_path, *words, "--host", "1MiB", 6, "AdamW", code=1)
    assert found["candidates"][-1]["refused"] == "there is no room in host memory for what the processor needs"
    words = ("--budget", "104MiB", "--host", "8MiB", "--disk", f"{tmp_path}/disk:64MiB")
    found, shown = fit(tmp_path, *words, "--policy", "zero-infinity", 6, "AdamW")
    assert f"--disk {tmp_path}/disk:64MiB" in shown, "the folder that was given"
    assert "differ between two trials" not in shown
    best = found["candidates"][found["best"]]
    assert best["host_bytes"] <= 8 << 20 < best["disk_bytes"] <= 64 << 20
    assert best["expected_bytes"] == pytest.approx(best["allocated_bytes"], rel=0.002)
    run = ("run", "--device", "virtual", "--json", "run.json")
    done = run_stalloc(*run, *words, tmp_path / "trains.py", 6, "AdamW", folder=tmp_path)
    assert "fitted anew" not in done.stderr
    assert json.loads((tmp_path / "run.json").read_text())["budget_kept"]
    done = run_stalloc(*run, *words[:4], tmp_path / "trains.py", 6, "AdamW", folder=tmp_path)
    assert "on disk, for which --disk has to be given. The program is fitted anew." in done.stderr


@pytest.mark.slow
def test_a_fit_that_needs_host_memory_is_not_used_without_it(tmp_path: Path) -> None:
    fit(tmp_path, "--budget", "104MiB", "--host", "64MiB", "--policy", "page", 6, "AdamW")
    words = ("--device", "virtual", "--budget", "104MiB", tmp_path / "trains.py", 6, "AdamW")
    done = run_stalloc("run", *words, folder=tmp_path)
    assert done.returncode == 125
    assert "of host memory, for which --host has to be given. The program is fitted anew." in done.stderr


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_paged_is_a_row_with_a_sentence(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "20MiB", "--host", "64MiB", "--policy", "page", 6, "LBFGS", code=1)
    assert found["candidates"][-1]["refused"].startswith("LBFGS is not known to update each parameter")


def test_a_step_in_parts_is_foreseen() -> None:
    spans = {"weight": (0, 99, 512), "gradient": (1, 99, 512), "state": (3, 99, 1024), "temporary": (4, 5, 512)}
    rows = [span for _ in range(2) for span in spans.values()]
    run = tuple(map(np.array, zip(*rows, strict=True)))
    update = UpdateRecorded(3, 6, [512, 512], [True, True], [[2], [6]], [0, 4])
    assert peak_bytes(run) == 2 * (512 + 512 + 1024 + 512)
    narrow = paged(run, [update], TierSettings(host_bytes=1 << 20, paged_window_bytes=1))
    assert peak_bytes(narrow.lifespans) == 2 * (512 + 512) + 1024 + 512
    assert narrow.host_bytes == 2048
    later = UpdateRecorded(10, 11, [512, 512], [True, True], [[2], [6]], [0, 4])
    half = paged(run, [update, later], TierSettings(host_bytes=1024, paged_window_bytes=1))
    assert half.host_bytes == 1024
    assert peak_bytes(half.lifespans) == 2 * (512 + 512) + 1024 + 1024, "one is kept on the device"
    wide = paged(run, [update, later], TierSettings(host_bytes=1 << 20, paged_window_bytes=6 * 512))
    assert peak_bytes(wide.lifespans) == 2 * (512 + 512) + 2 * 1024 + 512, (
        "the second part comes while the first is there"
    )
