"""Layers whose parameters are in host memory: the program's own numbers, and a budget that nothing else keeps."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_programs import run_stalloc, told_by_file

import stalloc
from stalloc.fitting.fit_record import load_fit
from stalloc.fitting.foreseen_host import Homes, LayerRecorded, Pass, Stay, homes, stays
from stalloc.trace import load_traces
from stalloc.trace.activity import Activity, Link, read_activity

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAM = Path(__file__).parent / "programs" / "streaming.py"
TRAIN = Path(__file__).parents[1] / "examples" / "train_gpt.py"
REFUSED = {
    "twice onto gradients": "is called twice before one backward pass that adds to gradients: sums would be made in",
    "second order": "gradients of its gradients are asked for (create_graph=True): do not stream this model.",
}
OTHERS = ("experts", "dropped", "loaded")


#: the cases that always run
FEW = ("window of two", "twice", "gpt recomputed", "evaluated and changed between", "unfrozen later")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(PROGRAM, *FEW, *REFUSED)
    return found


def test_losses_parameters_and_state_are_the_programs_own_to_the_last_bit(found: dict[str, Any]) -> None:
    check_equal(found, len(FEW))


@pytest.mark.slow
def test_they_are_so_whatever_a_program_does() -> None:
    check_equal(told_by_file(PROGRAM), 17)


def check_equal(found: dict[str, Any], num_cases: int) -> None:
    """Each case in the host and on disk, and two that are no cases of their own."""
    equal = {name: told for name, told in found.items() if name not in (*REFUSED, *OTHERS)}
    assert equal == dict.fromkeys(equal, True)
    assert len(equal) == 2 * num_cases + 2
    assert sum(name.endswith(", on disk") for name in equal) == num_cases


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_right_is_refused_in_a_sentence(found: dict[str, Any], case: str) -> None:
    assert found[case].startswith("layers.3 is streamed, and ")
    assert REFUSED[case] in found[case]


def test_parameters_whose_memory_cannot_be_let_go_stay_where_they_are(found: dict[str, Any]) -> None:
    assert found["loaded"].startswith("layers.0 has no parameters of its own on a device, whose memory can be let go:")


def test_what_a_model_had_in_the_host_goes_back_when_the_program_drops_it(found: dict[str, Any]) -> None:
    for before, after in found["dropped"].values():
        assert before > 0 == after


@pytest.mark.parametrize("programs", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_layers_on_disk_are_right_whatever_a_program_does_and_a_disk_that_fails_loses_nothing(programs: int) -> None:
    found = told_by_file(PROGRAM.with_name("layers_on_disk.py"), programs)
    assert found["differ"] == [], "numbers are seeds"
    told = found["refused"]
    assert told["full"] == "there is no room in host memory or on the disk for layers.0: its layers stay on the device."
    assert told["in use"] == "FOLDER/torn/layers is used by another optimizer or model meanwhile: name another."
    cases = {"torn": "torn", "later": "torn", "changed": "changed", "torn by the processor": "processor"}
    for case, where in cases.items():
        assert told[case].startswith(f"parameters cannot be kept in FOLDER/{where}/layers (")
        assert told[case].endswith("): go on from what you saved last.")
    assert "what was read is not what was written" in told["changed"]
    assert told["committed"]
    assert told["by the processor"], "layers on disk too"
    assert told["readable"], "what could not be written is on the device, or in the host"


def test_experts_compute_what_they_would_without_a_cache_and_take_no_more_than_its_room(found: dict[str, Any]) -> None:
    told = found["experts"]
    assert told["equal"], "outputs and weights, which the program changes between calls"
    assert told["undone"]
    assert told["hits"] > 0 < told["misses"]
    assert 0 < told["most"] <= told["room"]
    mib, result = 1 << 20, (1 << 20) + (2 << 10)
    assert told["away"] == 0
    assert told["peak"] == 2 * mib + result
    assert told["stayed"] == told["on another stream"] == 3, "memory of one stream is not handed to another"


def test_experts_that_cannot_be_cached_are_refused_in_a_sentence(found: dict[str, Any]) -> None:
    told = found["experts"]
    assert "is cached, and is called with gradients: call the model under torch.no_grad()" in told["with gradients"]
    assert told["no room"] == "expert 0 takes 1.00 MiB, and has room for 0.50 MiB: nothing is cached."
    assert told["shared"].startswith("expert 0 has a parameter that lies elsewhere too")


def test_layers_come_before_they_compute_and_go_when_their_gradients_are_there() -> None:
    layers = [LayerRecorded(place, 0, [place], [90 - 10 * place]) for place in range(3)]
    passes = [Pass(place, 10 + 10 * place, 20 + 10 * place, 80 - 10 * place) for place in range(3)]
    one = [(stay.layer, stay.begin, stay.end) for stay in stays(layers, passes, [100], 1)]
    assert one == [(0, 10, 20), (1, 20, 30), (2, 30, 40), (2, 60, 70), (1, 70, 80), (0, 80, 90)]
    frozen = [LayerRecorded(place, 0, [place], []) for place in range(3)]
    back = [stay for stay in stays(frozen, passes, [100], 1) if stay.begin >= 60]
    assert back == [Stay(2, 60, 70), Stay(1, 70, 80), Stay(0, 80, 100)]
    ahead = stays(layers, passes, [100], 2)
    assert [stay for stay in ahead if stay.layer == 1] == [Stay(1, 10, 30), Stay(1, 60, 80)]


def test_layers_lie_in_the_host_while_it_has_room_then_on_disk_and_else_stay() -> None:
    sizes = np.array([1000, 3000, 600, 5000, 1000])
    layers = [LayerRecorded(place, 0, rows, []) for place, rows in enumerate([[0], [1, 2], [], [3], [4]])]
    assert homes(layers, sizes, 2048, 8192) == Homes([0, 1, 4], {1}, 2048, 8192)
    assert homes(layers, sizes, 2048, 0) == Homes([0, 4], set(), 2048, 0)


@pytest.mark.slow
def test_a_fit_puts_layers_on_disk_and_the_run_stays_within_what_it_may_use(tmp_path: Path) -> None:
    program = (TRAIN, "--size", "124m", "--steps", "4")
    budget = ("--budget", "1250MiB", "--host", "128MiB", "--disk", f"{tmp_path}/disk:4GiB")
    words = ("--gpu", "RTX-4090", *budget, "--policy", "zero-infinity")
    done = run_stalloc("fit", *words, "--json", "found.json", *program, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    best = found["candidates"][found["best"]]
    assert best["what"].endswith(", page optimizer state, stream layers")
    state_bytes, layers_bytes = 2 * 4 * 124_000_000, 4 * 85_000_000
    assert best["disk_bytes"] + best["host_bytes"] > state_bytes + layers_bytes
    for one in found["candidates"]:
        assert one["expected_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.002)
        assert one["host_bytes"] <= 128 << 20
        assert one["disk_bytes"] <= 4 << 30
    run = ("run", "--device", "virtual", "--gpu", "RTX-4090", *budget, "--json", "run.json", *program)
    done = run_stalloc(*run, folder=tmp_path)
    assert "fitted anew" not in done.stderr
    assert json.loads((tmp_path / "run.json").read_text())["budget_kept"]


@pytest.mark.slow
def test_every_optimizer_comes_out_the_same_under_every_stack() -> None:
    told = told_by_file(PROGRAM.with_name("stacks.py"))
    assert told == dict.fromkeys(told, "equal")
    assert len(told) == 154


@pytest.mark.slow
def test_a_model_of_a_billion_parameters_trains_on_three_gibibytes(tmp_path: Path) -> None:
    program = (TRAIN, "--size", "1b", "--batch", "2", "--steps", "5")
    budget = ("--budget", "3200MiB", "--host", "16GiB")
    done = run_stalloc("fit", "--gpu", "RTX-4090", *budget, "--json", "found.json", *program, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    best = found["candidates"][found["best"]]
    assert best["what"].startswith("recompute ")
    assert best["what"].endswith(", page optimizer state, stream layers")
    for one in found["candidates"]:
        assert one["expected_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.002)
        assert one["host_bytes"] <= 16 << 30
    device = ("--device", "virtual", "--gpu", "RTX-4090", "--memory", "3.2GiB", "--json", "run.json")
    done = run_stalloc("run", *device, *budget, *program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["budget_kept"]
    assert told["run_reserved_peak_bytes"] <= 3200 << 20
    assert told["hit_rate"] >= 0.999


@pytest.mark.slow
def test_layers_are_streamed_in_a_window_that_is_never_waited_for(tmp_path: Path) -> None:
    fit = ("fit", "--gpu", "RTX-4090", "--budget", "1250MiB", "--host", "16GiB", "--policy", "page")
    done = run_stalloc(*fit, TRAIN, "--size", "124m", "--steps", "4", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stream layers" in done.stdout
    assert 2 < load_fit(tmp_path / "train_gpt.fit.npz").settings.tiers.streamed_window < 12


COPIES = """
import torch
import stalloc
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(256, 512), nn.Linear(512, 256)
    def forward(self, x):
        return x + self.two(torch.relu(self.one(x)))
model = nn.Sequential(*[Block() for _ in range(3)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
stalloc.page_optimizer(optimizer, window="2MiB")
stalloc.stream_layers(model, window=1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(16, 256, device="cuda")).sum().backward()
    optimizer.step()
"""


def recorded(folder: Path, program: str) -> Activity:
    """The copies of a program, as its trace has them."""
    (folder / "copies.py").write_text(program)
    words = ("-o", "copies.trace.npz", "--device", "virtual", "copies.py")
    done = run_stalloc("record", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    activity = read_activity(load_traces(folder / "copies.trace.npz")[0])
    assert activity is not None
    return activity


def test_copies_are_a_table_of_the_trace(tmp_path: Path) -> None:
    activity = recorded(tmp_path, COPIES)
    phases = [activity.names[name] if name >= 0 else "" for name in activity.phase.tolist()]
    rows = list(zip(phases, activity.link.tolist(), activity.num_bytes.tolist(), strict=True))
    layer_bytes = 4 * (2 * 256 * 512 + 256 + 512)
    state_bytes = 2 * 2 * 256 * 512 * 4  # of the weights; that of biases is small
    for place in range(3):
        assert rows.count((f"forward/{place}", Link.TO_DEVICE, layer_bytes)) == 3
        assert rows.count((f"backward/{place}", Link.TO_DEVICE, layer_bytes)) == 3
        update = [(link, size) for phase, link, size in rows if phase == f"update/{place}"]
        assert update.count((Link.TO_HOST, layer_bytes)) == 3
        assert update.count((Link.TO_DEVICE, layer_bytes)) == 2 * 3, "and its gradients"
        assert update.count((Link.TO_HOST, state_bytes)) == 3
        assert update.count((Link.TO_DEVICE, state_bytes)) == 2, "the first step makes it"
    done = run_stalloc("timeline", "--json", "-", "copies.trace.npz", folder=tmp_path)
    (study,) = json.loads(done.stdout)["devices"]
    assert not study["has_times"]
    assert study["findings"][0].startswith("Times are not shown: a virtual GPU computes nothing")
    moved = {link["link"]: link["num_bytes"] for link in study["links"]}
    assert moved["host to device"] == sum(size for _, link, size in rows if link == Link.TO_DEVICE)
    assert [link[part] for link in study["links"] for part in ("rate", "peak_rate", "used")] == [None] * 6
    assert [phase["seconds"] for phase in study["phases"]] == [None] * len(study["phases"])
    assert {part["runs"] for part in study["parts"]} == {3}
    summary = stalloc.report(tmp_path / "copies.trace.npz", tmp_path / "copies.md").read_text(encoding="utf-8")
    assert "Times are not shown" in summary
    assert "| phase | time |" not in summary
    assert study["phases"][-1]["host_bytes"] >= 3 * (layer_bytes + state_bytes)


def test_copies_of_layers_on_disk_belong_to_the_phase_that_asked_for_them(tmp_path: Path) -> None:
    on_disk = COPIES.replace("window=1)", f'window=1, host="64KiB", disk="{tmp_path}/layers:16MiB")')
    activity = recorded(tmp_path, on_disk)
    moved: Counter[tuple[str, int]] = Counter()
    phases = [activity.names[name] if name >= 0 else "" for name in activity.phase.tolist()]
    for phase, link, size in zip(phases, activity.link.tolist(), activity.num_bytes.tolist(), strict=True):
        moved[phase, link] += size
    layer_bytes = 4 * (2 * 256 * 512 + 256 + 512)
    for place in range(3):
        assert moved[f"forward/{place}", Link.TO_DEVICE] == moved[f"backward/{place}", Link.TO_DEVICE]
        assert moved[f"forward/{place}", Link.TO_DEVICE] == 3 * layer_bytes
        assert moved[f"update/{place}", Link.TO_HOST] == 3 * (layer_bytes + 2 * 2 * 256 * 512 * 4)


def test_a_step_with_copies_is_drawn_with_estimated_times(tmp_path: Path) -> None:
    (tmp_path / "copies.py").write_text(COPIES)
    words = ("--ops", "-o", "copies.trace.npz", "--device", "virtual", "copies.py")
    assert run_stalloc("record", *words, folder=tmp_path).returncode == 0
    (study,) = json.loads(run_stalloc("timeline", "--json", "-", "copies.trace.npz", folder=tmp_path).stdout)["devices"]
    assert study["is_estimated"]
    assert study["device_name"] == "NVIDIA H200"
    layer_bytes = 4 * (2 * 256 * 512 + 256 + 512)
    update_bytes = 3 * (layer_bytes + 2 * 2 * 256 * 512 * 4)  # the layer, and the state of its weights
    gradient_bytes = 3 * layer_bytes
    phases = {phase["name"]: phase for phase in study["phases"]}
    moved = {link["link"]: link["num_bytes"] for link in study["links"]}
    assert moved == {
        "device to host": update_bytes + gradient_bytes,
        "host to device": update_bytes + gradient_bytes + 2 * 3 * layer_bytes,
    }
    in_update, in_backward = (phases[name]["moved_bytes"]["device to host"] for name in ("update", "backward"))
    assert in_update + in_backward == update_bytes + gradient_bytes
    assert in_backward > gradient_bytes / 2, "gradients leave as backward makes them"
    updates = [part for part in study["parts"] if part["phase"] == "update"]
    assert [part["name"] for part in updates] == ["0", "1", "2"]
    assert all(part["compute_seconds"] > 0 for part in updates)
    for phase in study["phases"]:
        assert phase["headroom_bytes"] > 0
        assert phase["host_bytes"] == pytest.approx(update_bytes + gradient_bytes, rel=0.01)
    done = run_stalloc("report", "copies.trace.npz", "-o", "copies.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    page = stalloc.report(tmp_path / "copies.trace.npz", tmp_path / "code.html")
    assert page.read_bytes() == (tmp_path / "copies.html").read_bytes()
    (headers,) = re.findall(r'id="headers">(.*?)</script>', page.read_text(encoding="utf-8"))
    (device,) = json.loads(headers)
    assert device["study"]["found"]["links"] == study["links"]
    assert {name for _, _, name in device["phases"]} == {"forward", "backward", "update"}
