"""A cap: what is saved for backward goes when a request does not fit, and nothing of the program's numbers changes."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc, run_warm, told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAMS = Path(__file__).parent / "programs"
TWINS, CAPPED = PROGRAMS / "capped_twins.py", PROGRAMS / "capped_programs.py"
MIB = 1 << 20

#: the cases that always run
FEW = ("mixture", "tree", "blocks", "autocast", "counting", "double backward", "threads", "changed in place")
WAYS = ("dropped", "both", "moved")


@pytest.fixture(scope="module")
def twins() -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(TWINS, *FEW)
    return found


def test_losses_gradients_and_parameters_are_the_programs_own_to_the_last_bit(twins: dict[str, Any]) -> None:
    check_equal(twins, len(FEW) - 1)


@pytest.mark.slow
def test_they_are_so_whatever_a_program_does() -> None:
    check_equal(told_by_file(TWINS), 18)


def check_equal(twins: dict[str, Any], num_cases: int) -> None:
    cases = {name: one for name, one in twins.items() if not one["as_it_is"]}
    assert len(cases) == num_cases
    assert [
        (name, way, one[way]["error"]) for name, one in cases.items() for way in WAYS if not one[way]["equal"]
    ] == []
    assert min(one["both"]["num_evictions"] for one in cases.values()) > 0, "something was evicted in each"


def test_blocks_run_again_or_move_and_come_back(twins: dict[str, Any]) -> None:
    dropped, moved = twins["blocks"]["dropped"], twins["blocks"]["moved"]
    assert dropped["num_recomputed"] > 0
    assert dropped["moved_bytes"] == 0
    assert moved["moved_bytes"] > 0


def test_a_block_that_cannot_run_twice_moves_instead(twins: dict[str, Any]) -> None:
    counting = twins["counting"]
    assert counting["dropped"]["num_recomputed"] == counting["both"]["num_recomputed"] == 0
    assert counting["both"]["moved_bytes"] > 0


def test_what_is_changed_in_place_before_backward_is_an_error_as_without_a_cap(twins: dict[str, Any]) -> None:
    changed = twins["changed in place"]
    assert "modified by an inplace operation" in changed["as_it_is"]
    for way in WAYS:
        assert changed[way]["error"].startswith(
            "OffloadError: a tensor of shape (512, 64) that backward needs was chang"
        )


def run_capped(folder: Path, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """What a run of one of the programs told, and what it said."""
    options = ("run", "--device", "virtual", "--gpu", "A100-80GB", "--json", "told.json")
    done = run_stalloc(*options, *arguments, folder=folder)
    assert done.returncode == code, done.stderr
    return json.loads((folder / "told.json").read_text()), done.stderr


@pytest.mark.parametrize(
    ("program", "cap", "options"),
    [
        ("language", "210MiB", ("--check-order",)),
        pytest.param("mixture", "240MiB", ("--check-order",), marks=pytest.mark.slow),
        pytest.param("tree", "330MiB", ("--check-order",), marks=pytest.mark.slow),
        pytest.param("generation", "44MiB", ("--check-order", "--cap-caches"), marks=pytest.mark.slow),
        pytest.param("language", "210MiB", ("--host", "0"), marks=pytest.mark.slow),
        pytest.param("language", "210MiB", ("--cap-policy", "lru"), marks=pytest.mark.slow),
    ],
)
def test_a_program_whose_shapes_change_never_holds_more_than_its_cap(
    tmp_path: Path, program: str, cap: str, options: tuple[str, ...]
) -> None:
    told, _ = run_capped(tmp_path, "--cap", cap, *options, str(CAPPED), program, "4")
    found = told["cap"]
    assert found["kept"]
    assert told["run_reserved_peak_bytes"] <= found["cap_bytes"] == int(cap.removesuffix("MiB")) * MIB
    assert found["evictions"] > 0
    assert found["estimated_seconds"] > 0
    assert told["out_of_memory_errors"] == 0
    assert not told.get("order")
    if "--host" in options:
        assert found["moved_bytes"] == found["host_bytes"] == 0


def test_a_cap_that_cannot_be_kept_says_which_would_serve_the_request(tmp_path: Path) -> None:
    told, said = run_capped(tmp_path, "--cap", "40MiB", str(CAPPED), "language", "1", code=1)
    assert told["run_reserved_peak_bytes"] <= 40 * MIB
    assert not told["cap"]["kept"], "it ran out of memory"
    assert "The cap of 40.00 MiB cannot be kept: what could be evicted was" in said
    assert re.search(r"A cap of \d+\.\d\d MiB serves this request; what comes after it may need more", said)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--cap", "1GiB", "--cap-policy", "coop"),
            "'coop' goes by addresses, and is for stalloc evict: give one of dtr",
        ),
        (("--cap", "1GiB", "--budget", "1GiB"), "--budget and --cap exclude each other"),
        (("--cap-caches",), "--cap-caches is for --cap: add --cap SIZE."),
        (("--cap", "24"), "--cap is 24 without a unit"),
        (("--cap", "1MiB"), "a cap of 1.00 MiB is not possible: the device gives memory by 2.00 MiB"),
        (("--cap", "200%"), "--cap: '200%' is not an amount of memory"),
        (("--cap", ""), "--cap: '' is not an amount of memory"),
        (("--cap", "100GiB"), "a cap of 100.00 GiB is not possible: the device has 79.35 GiB"),
    ],
)
def test_a_cap_that_is_none_is_one_sentence(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    done = run_stalloc(
        "run", "--device", "virtual", "--gpu", "A100-80GB", *options, str(CAPPED), "language", folder=tmp_path
    )
    assert done.returncode == 125
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


STEADY = """
import stalloc
cap = stalloc.cap("150MiB", device="virtual")
import torch
from torch import nn

layers = nn.ModuleList([nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(6)])
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with cap:
    counts = []
    for _ in range(20):
        model(torch.randn(8, 128, 256, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(cap.told()["evictions"])
report = stalloc.statistics()[0]
import json
told = {"counts": counts, "held": report.run_reserved_peak_bytes, "phase": report.phase, "hits": report.hit_rate}
print(json.dumps(cap.told() | told))
"""


def told_by(source: str) -> Any:
    """What a program prints as JSON in its last line."""
    done = run_warm(source)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_steps_that_repeat_evict_the_same_each_time_and_are_planned() -> None:
    told = told_by(STEADY)
    assert told["held"] <= told["cap_bytes"]
    last = told["counts"][-6:]
    assert len({after - before for before, after in itertools.pairwise(last)}) == 1
    assert last[-1] > last[0], "in each step"
    assert told["phase"] == "running on the plan"
    assert told["hits"] == 1.0


def test_as_a_last_resort_nothing_goes_before_the_device_is_full() -> None:
    few = STEADY.replace("range(20)", "range(4)")
    roomy = told_by(few.replace('"150MiB", ', '"auto", '))
    assert roomy["evictions"] == 0
    small = 'gpu=stalloc.device.VirtualGPU(name="small", total_bytes=150 << 20)'
    full = told_by("import stalloc.device\n" + few.replace('"150MiB", ', f'"auto", {small}, '))
    assert full["evictions"] > 0
