"""Gradients that leave in backward: the program's own numbers, memory that depth does not change, copies in order."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_paging import BLOCK
from warm_programs import run_stalloc, told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAM = Path(__file__).parent / "programs" / "gradients_in_host.py"
FEW = ("in part by the processor", "beside backward")  #: the stacks that always run
#: of what would not be right beside backward, by habit
REFUSED_BESIDE = {
    "accumulated": "a forward pass (Linear) comes between",
    "accumulated and zeroed in place": "a forward pass (Linear) comes between",
    "accumulated through checkpoints": "a forward pass (Linear) comes between",
    "never zeroed": "gradients are accumulated over several steps",
    "clipped": "a forward pass (Linear) comes between",
    "clipped sometimes": "a gradient is read or set",
    "scaled": "a forward pass (Linear) comes between",
    "hooks of its own": "a gradient is read or set",
    "gradients held": "a forward pass (Linear) comes between",
    "gradients set": "a gradient is read or set",
    "read by the way": "a gradient is read or set",
    "backward fails": "a gradient is read or set",
    "another optimizer between": "a gradient is read or set",
    "skipped": "a gradient is read or set",
}
TRAINS = f"""
import gc, json, torch, stalloc
from torch import nn
{BLOCK}def trained(depth, way):
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*[Block() for _ in range(depth)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    processor = {{"processor": 1.0}} if way != "streamed" else {{}}
    stalloc.page_optimizer(optimizer, window="1MiB", **processor, beside_backward=way == "beside")
    if way != "processor":
        stalloc.stream_layers(model, window=1, microbatches=2)
    for step in range(4):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(1 if way == "beside" else 2):
            model(torch.ones(8, 256, device="cuda")).sum().backward()
        held = torch.cuda.memory_allocated() - before
        if step == 2 and way != "beside":
            sum(one.grad.numel() for one in model.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step > 0)
        if step == 1:
            found = held, torch.cuda.max_memory_allocated() - before
    return found
trained(2, "streamed")
print(json.dumps([[trained(depth, way) for depth in (2, 6)] for way in ("streamed", "processor", "beside")]))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(PROGRAM, *FEW)
    return found


def test_everything_that_a_program_sees_is_its_own_to_the_last_bit_or_refused(found: dict[str, Any]) -> None:
    check_habits(found["habits"], 2 * 23)


@pytest.mark.slow
def test_it_is_so_in_every_stack() -> None:
    check_habits(told_by_file(PROGRAM)["habits"], 4 * 23)


def check_habits(habits: dict[str, Any], number: int) -> None:
    assert len(habits) == number
    refused = {name: told for name, told in habits.items() if told is not True}
    beside = {f"{habit}: beside backward": told for habit, told in REFUSED_BESIDE.items()}
    second = {name: "gradients of its gradients are asked for" for name in habits if name.startswith("penalized: ")}
    assert refused.keys() == {*beside, *second}
    for name, told in (beside | second).items():
        assert told in refused[name]


def test_gradients_of_a_device_leave_are_summed_in_the_host_and_come_back_when_they_are_read(
    found: dict[str, Any],
) -> None:
    assert found["on the device"] == {
        "left": [True] * 8,
        "came back": [True] * 4,
        "device": ["cuda:0"] * 4,
        "stays when it was read": True,
        "leaves again": True,
    }


def test_a_batch_through_one_layer_after_the_other_gives_what_a_loop_over_microbatches_gives(
    found: dict[str, Any],
) -> None:
    told = found["microbatches"]
    assert [name for name, one in told.items() if one is True] == ["2", "3", "5", "10", "12", "recomputed"]
    assert told["random"] == (
        "0 draws random numbers, in another order for microbatches. Stream this model without microbatches."
    )
    assert told["other rows"].startswith("0 makes something else of 2 rows of a batch than as many rows.")
    assert told["normalized"] == "0: between normalizes over the whole batch: stream this model without microbatches."
    assert told["beside nothing"].startswith("nothing is updated beside backward but by the processor:")
    assert told["by none"] == "0 microbatches are not possible: give 1 or more."


def test_what_is_held_does_not_grow_with_depth_and_copies_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    words = ("--device", "virtual", "--check-order", "--json", "run.json", "trains.py")
    done = run_stalloc("run", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run.json").read_text())["order"] == []
    grown = [
        [deep - shallow for shallow, deep in zip(*depths, strict=True)]
        for depths in json.loads(done.stdout.splitlines()[0])
    ]
    small = 4 * 2 * 4 * 256  # state of biases, which is not paged
    weights, given = 4 * 4 * (2 * 256 * 1024 + 256 + 1024), 4 * 8 * 256 * 4
    at_end_of_backward, peaks = zip(*grown, strict=True)
    assert at_end_of_backward == (small, weights, 0), "no gradient of the four blocks more"
    assert peaks[0] <= small + 3 * given, "their activations"


FITTED = f"""
import sys, torch
from torch import nn
{BLOCK}MODEL = nn.Sequential(*[Block() for _ in range(8)]).cuda()
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
for step in range(6):
    MODEL(torch.ones(32, 256, device="cuda")).sum().backward()
    if "clips" in sys.argv:
        nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0)
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["l2l", "zero-offload", "stronghold"])
def test_a_fit_by_name_needs_no_room_for_gradients_and_a_program_that_clips_is_refused_beside_backward(
    tmp_path: Path, policy: str
) -> None:
    (tmp_path / "fitted.py").write_text(FITTED)

    def best(*words: str) -> dict[str, Any]:
        options = ("--budget", "1GiB", "--host", "1GiB", "--policy", policy, "--json", "found.json")
        run_stalloc("fit", *options, "fitted.py", *words, folder=tmp_path)
        found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())["candidates"][-1]
        return found

    gradients = 8 * 4 * (2 * 256 * 1024)
    plain, clipped = best(), best("clips")
    assert not plain["refused"]
    if policy == "stronghold":
        assert "a gradient is read or set between the backward pass and the optimizer's step" in clipped["refused"]
    else:
        assert not clipped["refused"]
    if policy == "zero-offload":
        assert plain["allocated_bytes"] < clipped["allocated_bytes"] - gradients / 2
