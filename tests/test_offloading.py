"""Saved activations in host memory: the program's own numbers, and the bytes that were foreseen."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_programs import run_stalloc, told_by_file

import stalloc
from stalloc.fitting.fit_record import load_fit
from stalloc.fitting.foreseen_host import ActivationsRecorded, added_seconds, offloaded, peak_bytes
from stalloc.techniques.activation_settings import ActivationSettings, activations_from_json

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAM = Path(__file__).parent / "programs" / "offloading.py"
MIB = 1 << 20


#: the cases that always run
FEW = (
    "straight", "half", "little host", "gpt, everything", "attention recomputed", "checkpoint", "nested hooks", "views",
    "changed in place, not needed", "changed in place",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(PROGRAM, *FEW)
    return found


def test_losses_gradients_and_parameters_are_the_programs_own_to_the_last_bit(found: dict[str, Any]) -> None:
    check_equal(found, len(FEW) - 1)


@pytest.mark.slow
def test_they_are_so_whatever_a_program_does() -> None:
    check_equal(told_by_file(PROGRAM), 26)


def check_equal(found: dict[str, Any], num_cases: int) -> None:
    cases = {name: one for name, one in found["cases"].items() if not one["as_it_is"]}
    assert len(cases) == num_cases
    assert {name: one["error"] for name, one in cases.items() if not one["equal"]} == {}
    assert min(one["bytes"] for one in cases.values()) > 0, "something went to the host in each"


def test_what_is_changed_in_place_before_backward_is_an_error_as_without_it(found: dict[str, Any]) -> None:
    changed = found["cases"]["changed in place"]
    assert "modified by an inplace operation" in changed["as_it_is"]
    assert changed["error"].startswith("OffloadError: a tensor of shape (128, 128) that backward needs was changed")


def test_host_memory_is_used_again_and_bounded(found: dict[str, Any]) -> None:
    straight, little = found["cases"]["straight"], found["cases"]["little host"]
    assert straight["bytes"] == 3 * straight["host_bytes"], "each of three steps takes the same places"
    assert 0 < little["host_bytes"] <= 150 << 10


def test_memory_falls_by_the_ratio_and_every_step_lets_go_at_the_same_places(found: dict[str, Any]) -> None:
    size_bytes = MIB  # of each of eight that are saved
    peaks = {name: told[:-1] for name, told in found["device"].items()}
    assert all(len(set(steps)) == 1 for steps in peaks.values())
    as_is, everything, half, window = (peaks[name][0] for name in ("as_is", "all", "half", "window"))
    assert as_is - half == pytest.approx(half - everything, abs=size_bytes / 64)
    assert as_is - everything == 6 * size_bytes, "one is saved, one is made, one comes back"
    assert window - everything == 2 * size_bytes
    assert found["device"]["all"][-1] == 8 * size_bytes
    assert found["device"]["half"][-1] == 4 * size_bytes


def test_a_head_in_parts_has_the_loss_of_the_whole_within_rounding_and_never_all_logits(found: dict[str, Any]) -> None:
    assert found["chunked"]["far"]["float32"] < 1e-6
    assert found["chunked"]["far"]["autocast"] < 2e-2
    logits_bytes = 4 * 1024 * 4096
    peaks = found["chunked"]["peaks"]
    assert peaks["whole"] >= 2 * logits_bytes
    assert peaks["chunked"] < logits_bytes


def test_a_ratio_that_is_none_is_refused_in_a_sentence() -> None:
    with pytest.raises(stalloc.BadInputError, match=r"a ratio of 1\.5 is not possible: give 0 to 1"):
        stalloc.offload_activations(1.5)


@pytest.mark.parametrize("told", [None, {}, {"ratio": 2, "window_bytes": 0, "host_bytes": 0},
                                  {"ratio": 1, "window_bytes": -1, "host_bytes": 0}])  # fmt: skip
def test_settings_of_strangers_are_checked(told: Any) -> None:
    with pytest.raises(ValueError, match="what it keeps of activations in host memory"):
        activations_from_json(told)
    settings = ActivationSettings(ratio=0.25, window_bytes=7, host_bytes=9)
    assert activations_from_json(settings.as_json()) == settings


def saved_and_needed() -> tuple[Any, ActivationsRecorded]:
    """Four activations of 1 MiB, saved one after the other and needed in the opposite order, each at once away."""
    start, end, events, returns = [], [], [], []
    for number in range(4):
        start.append(number)
        end.append(number + 1)
        events.append((number + 1, 0, number))
    for place, number in enumerate((3, 2, 1, 0)):
        start.append(10 + 2 * place)
        end.append(12 + 2 * place)
        events += [(11 + 2 * place, 1, number), (12 + 2 * place, 2, number)]
    returns = [7, 6, 5, 4]
    run = tuple(np.array(column, np.int64) for column in (start, end, [MIB] * 8))
    return run, ActivationsRecorded(events, [MIB] * 4, [0, 1, 2, 3], returns)


def test_a_ratio_and_a_window_are_foreseen() -> None:
    run, recorded = saved_and_needed()

    def peak(ratio: float, window_bytes: int = 0) -> tuple[int, int]:
        result = offloaded(run, recorded, ActivationSettings(ratio=ratio, window_bytes=window_bytes))
        return peak_bytes(result.lifespans) // MIB, result.host_bytes // MIB

    assert peak(0.0) == (4, 0)
    assert peak(0.5) == (3, 2), "two stay, and the last comes back first"
    assert peak(1.0) == (1, 4)
    assert peak(1.0, MIB) == (2, 4), "one is on its way while the next is made"
    assert peak(1.0, 4 * MIB) == (4, 4), "nothing has left before it is needed"


def test_copies_cost_what_they_are_waited_for() -> None:
    _, recorded = saved_and_needed()
    half_a_second = 2.0 * MIB  # bytes a second, where one is made in a second

    def seconds(ratio: float, window_bytes: int, rate: float) -> float:
        settings = ActivationSettings(ratio=ratio, window_bytes=window_bytes)
        return added_seconds(recorded, settings, 20.0, rate, 0.0)

    assert seconds(0.0, 0, half_a_second) == 0
    assert seconds(1.0, 0, half_a_second) == pytest.approx(4 * 2 * 0.5), "each is waited for, both ways"
    assert seconds(1.0, MIB, half_a_second) == 0, "the last is still there, and the others come while it is used"
    assert seconds(1.0, MIB, half_a_second / 8) == 15, "copies of 4 s, one at a time each way"


TRAINS = """
import sys, torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.dropout = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.Dropout(0.1)
    def forward(self, x):
        return x + self.dropout(self.two(torch.relu(self.one(x))))
MODEL = nn.Sequential(*[Block() for _ in range(6)]).cuda()
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    OPTIMIZER.zero_grad()
    MODEL(torch.ones(4096, 256, device="cuda")).sum().backward()
    OPTIMIZER.step()
"""


@pytest.mark.slow
def test_a_fit_keeps_a_share_in_the_host_and_the_run_keeps_the_budget(tmp_path: Path) -> None:
    program = tmp_path / "trains.py"
    program.write_text(TRAINS)
    budget = ("--budget", "180MiB", "--host", "256MiB")
    done = run_stalloc("fit", "--json", "found.json", *budget, "--policy", "offload-ratio", program, 6, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "found.json").read_text())
    rows = [one for one in told["candidates"] if one["technique"] == "offload-ratio"]
    assert rows
    for one in rows:
        assert one["expected_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.001)
        assert 0 < one["host_bytes"] <= 256 << 20
    assert told["best"] > 0
    settings = load_fit(tmp_path / "trains.fit.npz").settings
    assert 0 < settings.activations.ratio <= 1
    assert settings.host_bytes == 256 << 20
    assert f"next: stalloc run {' '.join(budget)}" in done.stdout
    words = ("run", "--device", "virtual", "--json", "run.json", *budget, program, 6)
    done = run_stalloc(*words, folder=tmp_path)
    assert "fitted anew" not in done.stderr
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["budget_kept"]
    assert report["run_reserved_peak_bytes"] <= 180 << 20
    assert report["hit_rate"] >= 0.999
