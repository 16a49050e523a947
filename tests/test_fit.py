"""`stalloc fit` and `stalloc run --budget`: what fits is found by running the program, and the budget is kept."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_programs import run_stalloc, run_warm, told_by_file

from stalloc.errors import BadInputError
from stalloc.fitting import Candidate, Fit
from stalloc.fitting.fit_record import Program, load_fit, undominated
from stalloc.fitting.keeping import plans_of
from stalloc.fitting.look_ahead import Ahead, steps_to_try
from stalloc.planner import plans_to_bytes
from stalloc.techniques.recompute_settings import BlockSettings, RecomputeSettings
from stalloc.techniques.technique_settings import Settings

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

TRAIN = Path(__file__).parents[1] / "examples" / "train_gpt.py"
SMALL = ("--size", "tiny", "--batch", "64", "--steps", "6")  #: 132 MiB as it is, 100 MiB at the least
BUDGET = "120MiB"


def stalloc(folder: Path, verb: str, *words: Any, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = run_stalloc(verb, *words, folder=folder, variables={**environment, "STALLOC_CACHE": "off", **variables})
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def fit(folder: Path, *words: Any, code: int = 0) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    done = stalloc(folder, "fit", "--json", "result.json", *words, code=code)
    file = folder / "result.json"
    return json.loads(file.read_text()) if file.exists() else {}, done


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A folder with the fit of a small GPT, what was found, and what was printed."""
    folder = tmp_path_factory.mktemp("fit")
    result, done = fit(folder, "--budget", BUDGET, TRAIN, *SMALL)
    return folder, result, done.stdout


def test_what_fits_is_found_and_the_program_as_it_is_comes_first(fitted: tuple[Path, dict[str, Any], str]) -> None:
    _, found, shown = fitted
    as_it_is, best = found["candidates"][0], found["candidates"][found["best"]]
    assert as_it_is["what"] == "as it is"
    assert not as_it_is["fits"]
    assert as_it_is["factor"] == 1.0
    assert best["fits"]
    assert best["needed_bytes"] <= found["budget_bytes"] == 120 << 20 < as_it_is["needed_bytes"]
    assert best["added_seconds"] == min(one["added_seconds"] for one in found["candidates"] if one["fits"])
    assert found["least_bytes"] == min(one["needed_bytes"] for one in found["candidates"])
    for one in found["candidates"]:
        assert one["expected_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.002)
        assert one["allocated_bytes"] <= one["native_bytes"]
        assert one["checked"] == "run, 3 steps"
    assert [line for line in shown.splitlines() if line.lstrip().startswith("*")]
    assert f"next: stalloc run --budget {BUDGET} {TRAIN}" in shown


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["checkmate", "remat-aware"])
def test_a_policy_by_name_is_the_only_one_tried(tmp_path: Path, policy: str) -> None:
    if policy == "checkmate":
        pytest.importorskip("scipy.optimize")
    found, _ = fit(tmp_path, "--budget", BUDGET, "--policy", policy, TRAIN, *SMALL)
    assert {one["technique"] for one in found["candidates"]} == {"none", policy}
    best = found["candidates"][found["best"]]
    assert best["fits"]
    assert best["technique"] == policy
    assert best["expected_bytes"] == pytest.approx(best["allocated_bytes"], rel=0.002)


@pytest.mark.slow
def test_a_program_that_fsdp2_shards_is_fitted(tmp_path: Path) -> None:
    program = Path(__file__).parent / "programs" / "real" / "fsdp2.py"
    found, _ = fit(tmp_path, "--budget", "1500MiB", "--policy", "blocks:16", program, 4)
    assert [one["refused"] for one in found["candidates"]] == ["", ""]
    for one in found["candidates"]:
        assert one["expected_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.002)
    assert found["candidates"][found["best"]]["what"] == "recompute 16 whole blocks"


def test_a_run_keeps_its_budget_from_the_first_allocation(fitted: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = fitted
    done = stalloc(folder, "run", "--device", "virtual", "--budget", BUDGET, "--json", "run.json", TRAIN, *SMALL)
    told = json.loads((folder / "run.json").read_text())
    assert told["plan_source"] == "fit"
    assert told["budget_kept"]
    assert 0 < told["run_reserved_peak_bytes"] <= told["budget_bytes"] == 120 << 20
    assert told["hit_rate"] >= 0.999
    assert told["budget_by"] == found["candidates"][found["best"]]["what"]
    assert "budget 120.00 MiB: kept" in done.stdout
    assert "fitted anew" not in done.stderr


@pytest.mark.slow
def test_a_fit_of_other_arguments_is_not_used(fitted: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    folder, _, _ = fitted
    (tmp_path / "train_gpt.fit.npz").write_bytes((folder / "train_gpt.fit.npz").read_bytes())
    words = ("--device", "virtual", "--budget", BUDGET, "--json", "run.json", TRAIN, *SMALL, "--seed", "1")
    done = stalloc(tmp_path, "run", *words)
    said = [line for line in done.stderr.splitlines() if line.startswith("stalloc: ")]
    assert said == [
        "stalloc: train_gpt.fit.npz is not used: it is of the arguments --size tiny --batch 64 --steps 6. The program "
        "is fitted anew."
    ]
    assert json.loads((tmp_path / "run.json").read_text())["budget_kept"]
    assert load_fit(tmp_path / "train_gpt.fit.npz").program.arguments[-1] == "1"


def test_a_budget_that_nothing_keeps_is_one_sentence_with_the_least(tmp_path: Path) -> None:
    words = ("--budget", "1MiB", TRAIN, *SMALL)
    (tmp_path / "train_gpt.fit.npz").write_text("of yesterday")
    found, done = fit(tmp_path, *words, code=1)
    assert (tmp_path / "train_gpt.fit.npz").read_text() == "of yesterday", "nothing is lost for a fit that is none"
    assert found["output"] is None
    assert found["best"] == -1
    assert 0 < found["least_bytes"] < found["candidates"][0]["needed_bytes"]
    assert "next:" not in done.stdout
    sentence = done.stderr.strip().splitlines()[-1]
    assert sentence.startswith("stalloc: train_gpt.py cannot be kept within 1.00 MiB: the least that was reached is ")
    assert sentence.endswith("give that much, or a smaller batch.")


@pytest.mark.slow
def test_a_run_within_a_budget_that_nothing_keeps_is_the_same_sentence(tmp_path: Path) -> None:
    words = ("--device", "virtual", "--budget", "1MiB", TRAIN, *SMALL)
    said = stalloc(tmp_path, "run", *words, code=125).stderr.strip().splitlines()
    assert said[-1].startswith("stalloc: train_gpt.py cannot be kept within 1.00 MiB: the least that was reached is ")


PROGRAM = """
import json, os, sys, torch
from torch import nn
with open("seen.txt", "a") as file:
    file.write(json.dumps([os.environ.get("STALLOC_TRIAL"), sys.stdin.read(), os.environ.get("STALLOC")]) + chr(10))
print("the program speaks")
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.two(torch.tanh(self.one(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()
MODEL = Model().cuda()
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    MODEL(torch.ones(2048, 256, device="cuda")).backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()
"""


def program(folder: Path, source: str = PROGRAM) -> Path:
    file = folder / "program.py"
    file.write_text(source)
    return file


def test_a_module_of_the_current_folder_is_fitted_and_run(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    program(tmp_path / "package").rename(tmp_path / "package" / "__main__.py")
    words = ("--budget", "1GiB", "--policy", "blocks:1", "-m", "package", "5")
    fit(tmp_path, *words)
    done = stalloc(tmp_path, "run", "--device", "virtual", "--budget", "1GiB", "-m", "package", "5")
    assert "budget 1.00 GiB: kept (as it is)" in done.stdout
    assert (tmp_path / "package.fit.npz").exists()
    assert "fitted anew" not in done.stderr


def test_trials_are_told_so_and_hear_and_say_nothing(tmp_path: Path) -> None:
    found, done = fit(tmp_path, "--budget", "118MiB", "--policy", "blocks:1", program(tmp_path), 5)
    seen = [json.loads(line) for line in (tmp_path / "seen.txt").read_text().splitlines()]
    assert seen == [["1", "", None]] * found["num_trials"]
    assert "the program speaks" not in done.stdout + done.stderr


def sentence(folder: Path, *words: Any) -> str:
    """The one sentence of a fit that cannot be made."""
    _, done = fit(folder, *words, code=2)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("source", "argument", "told"),
    [
        (
            PROGRAM,
            2,
            "the program ended after 2 steps, and three are looked at: give it arguments with which it trains",
        ),
        ("raise KeyError('mine')", 2, "the program failed in a trial (KeyError: 'mine')"),
        ("print('nothing')", 2, "the program used no GPU through PyTorch: a budget is kept for what PyTorch trains"),
        ("import torch; torch.ones(9).cuda()", 2, "no optimizer of PyTorch made a step in the program"),
    ],
)
def test_a_program_that_cannot_be_tried_is_one_sentence(tmp_path: Path, source: str, argument: int, told: str) -> None:
    assert told in sentence(tmp_path, "--budget", "1GiB", program(tmp_path, source), argument)


def test_a_program_that_does_not_end_is_given_up_with_all_that_it_started(tmp_path: Path) -> None:
    hanging = (
        "import fcntl, os, time\nfile = open('held', 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\nos.fork()\ntime.sleep(99)"
    )
    words = ("--trial-seconds", "0.5", "--budget", "1GiB", program(tmp_path, hanging))
    assert "took more than 0.5 s" in sentence(tmp_path, *words)
    with (tmp_path / "held").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for whoever still runs


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--budget", "24"), "--budget is 24 without a unit"),
        (("--budget", "9TiB"), "is not possible on NVIDIA H200"),
        (("--budget", "1GiB", "-o", "fit.bin"), "does not end in .fit.npz"),
        (("--budget", "1GiB", "--trial-seconds", "0"), "--trial-seconds is 0"),
        (("--budget", "1GiB", "--policy", "nonsense"), "there is no policy 'nonsense' that fits"),
        (("--budget", "1GiB", "--policy", "blocks:x"), "'blocks:x' has no number of blocks"),
        (("--budget", "1GiB", "--policy", "page:7"), "page takes no number"),
        (("--budget", "1GiB", "--as-gpu", "x"), "--as-gpu is for stalloc itself"),
    ],
)
def test_options_that_make_no_sense_are_one_sentence(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    assert told in sentence(tmp_path, *options, program(tmp_path), 5)


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    done = stalloc(tmp_path, "run", "--budget", "1GiB", program(tmp_path), 5, code=125, WORLD_SIZE="2")
    assert "a budget is kept for programs of one rank so far, and WORLD_SIZE is 2" in done.stderr


def test_a_budget_and_a_plan_exclude_each_other(tmp_path: Path) -> None:
    done = stalloc(tmp_path, "run", "--budget", "1GiB", "--plan", "x.npz", program(tmp_path), 5, code=125)
    assert "--plan and --budget exclude each other" in done.stderr


@pytest.mark.slow
def test_without_repeated_blocks_the_program_stays_as_it_is(tmp_path: Path) -> None:
    flat = PROGRAM.replace("range(3)", "range(1)")
    found, done = fit(tmp_path, "--budget", "1GiB", program(tmp_path, flat), 5)
    assert found["best"] == 0
    assert "nothing can be recomputed: no module with parts of its own is repeated" in done.stdout


FORMULA = """
import json, sys
from stalloc import device
device.activate("virtual")
import torch._dynamo
from stalloc.cli.program import run_program
from stalloc.fitting.candidates import Fitting
from stalloc.fitting.frontier import selective
from stalloc.fitting.trials import run_trial
def run():
    return run_program([sys.argv[1], "4"])
fitting = Fitting(1 << 40, lambda work: run_trial(run, work, 60), lambda text: None)
fitting.run("selective")
tried = fitting.candidates[-1]
print(json.dumps({
    "saved": [call.saved_bytes for call in fitting.step.calls],
    "kept": [one.kept_bytes for one in selective(fitting.step).values()],
    "expected": tried.expected_bytes, "allocated": tried.allocated_bytes, "what": tried.technique,
}))
"""


def test_what_a_layer_saves_is_what_korthikanti_says(run_checks: Callable[..., dict[str, Any]]) -> None:
    found = run_checks(FORMULA, str(Path(__file__).parent / "programs" / "korthikanti.py"))
    sequence, batch, width, heads, layers = 1024, 2, 1024, 16, 4
    unit, input_bytes = sequence * batch * width, 2 * sequence * batch * width
    assert len(found["saved"]) == len(found["kept"]) == layers
    for saved in found["saved"]:  # the input of a layer is the result of the one before
        assert saved + input_bytes == pytest.approx(unit * (34 + 5 * heads * sequence / width), rel=1e-3)
    for kept in found["kept"]:  # 34 without the masks of two dropouts, which are drawn again
        assert kept + input_bytes == pytest.approx(32 * unit, rel=1e-3)
    assert found["what"] == "selective"
    assert found["allocated"] == pytest.approx(found["expected"], rel=0.002)


def test_korthikanti_s_formulas_are_what_is_measured() -> None:
    rows = told_by_file(Path(__file__).parent / "programs" / "korthikanti.py", "formulas")
    assert [formula for *_, formula, _, _ in rows[:2]] == [620756992, 34 * 1024 * 4 * 2048]
    for *_, again, formula, measured, error in rows:
        assert measured == pytest.approx(formula, rel=1e-3), again
        assert error == pytest.approx(measured / formula - 1)


RESETTING = PROGRAM.replace("return x.sum()", "torch.cuda.reset_peak_memory_stats()\n        return x.sum()")


@pytest.mark.slow
@pytest.mark.parametrize("clipped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_optimizer_steps_in_backward_unless_gradients_are_read(tmp_path: Path, clipped: bool) -> None:
    source = PROGRAM.replace("SGD(", "AdamW(").replace("2048, 256", "64, 256")
    clip = "    nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0)\n"
    file = program(tmp_path, source.replace("    OPTIMIZER.step()\n", clip * clipped + "    OPTIMIZER.step()\n"))
    found, _ = fit(tmp_path, "--budget", "94MiB", file, 6, code=int(clipped))
    rows = {one["technique"]: one for one in found["candidates"]}
    if clipped:
        assert "step-in-backward" not in rows
        assert any("a gradient is read" in note for note in found["notes"])
        return
    early, as_is = rows["step-in-backward"], rows["none"]
    assert early["expected_bytes"] == early["allocated_bytes"]
    assert as_is["allocated_bytes"] - early["allocated_bytes"] > 3 << 20  # most of 6 MiB of gradients
    done = stalloc(tmp_path, "run", "--device", "virtual", "--budget", "94MiB", file, 6)
    assert "budget 94.00 MiB: kept (optimizer's step in the backward pass)" in done.stdout


def test_steps_of_every_kind_are_tried_and_what_is_left_out_is_said() -> None:
    alike, short, long = [(10, 100)] * 4, (10, 60), (99, 500 << 30)
    assert steps_to_try(alike, 3, 0.1, is_whole=True) == Ahead(3, "all 4 steps were looked at")
    assert "a later one that is larger" in steps_to_try(alike, 3, 0.1, is_whole=False).note
    assert steps_to_try([*alike, short, *alike, short], 3, 0.1, is_whole=True) == Ahead(
        7, "all 10 steps were looked at; 1 of them unlike the first 3, so each run has 7"
    )
    nothing_asked = (0, 60)  # after the last step
    assert steps_to_try([*alike, nothing_asked], 3, 0.1, is_whole=True).num_steps == 3
    late = steps_to_try([*alike, short, *alike * 30, long], 3, 0.1, is_whole=False)
    assert late.num_steps == 7
    assert "step 126, which allocates 500.00 GiB, is unlike those that were tried" in late.note
    assert late.note.endswith("--trial-steps 126 tries it")


@pytest.mark.slow
def test_a_run_with_a_short_last_batch_keeps_its_budget_to_the_end(tmp_path: Path) -> None:
    rows = 'torch.ones(700 if step % 7 == 6 else 2048, 256, device="cuda")'
    file = program(tmp_path, PROGRAM.replace('torch.ones(2048, 256, device="cuda")', rows))
    found, _ = fit(tmp_path, "--budget", "118MiB", file, 20)
    assert found["candidates"][found["best"]]["checked"] == "run, 9 steps"
    assert any("so each run has 9" in note for note in found["notes"])
    done = stalloc(tmp_path, "run", "--device", "virtual", "--budget", "118MiB", file, 20)
    assert "budget 118.00 MiB: kept" in done.stdout


@pytest.mark.slow
def test_a_program_that_resets_its_peaks_needs_what_it_needed(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", "--policy", "blocks:1", program(tmp_path, RESETTING), 5)
    usual, _ = fit(tmp_path, "--budget", "1GiB", "--policy", "blocks:1", program(tmp_path), 5)
    assert [one["needed_bytes"] for one in found["candidates"]] == [one["needed_bytes"] for one in usual["candidates"]]


VARYING = PROGRAM.replace("torch.ones(2048", "torch.ones(2048 + 64 * (os.getpid() % 61)")


def test_steps_that_differ_between_trials_are_said_so(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", program(tmp_path, VARYING), 5)
    assert [note for note in found["notes"] if "steps differ between two trials" in note]


UNREPEATABLE = PROGRAM.replace("class Block", "CALLS = []\nclass Block").replace(
    "        return x +", "        CALLS.append(1)\n        x = x + 1 if len(CALLS) % 5 == 4 else x\n        return x +"
)


def test_blocks_that_cannot_be_computed_twice_are_left_as_they_are(tmp_path: Path) -> None:
    found, done = fit(tmp_path, "--budget", "66MiB", program(tmp_path, UNREPEATABLE), 6, code=1)
    assert any("does not do the same when it is computed again" in note for note in found["notes"])
    assert not any(one["fits"] for one in found["candidates"])
    assert "nothing can be recomputed" in done.stdout


SHARED = PROGRAM.replace(
    "for block in self.blocks:\n            x = block(x)", "for _ in range(3):\n            x = self.block(x)"
).replace("self.blocks = nn.ModuleList([Block() for _ in range(3)])", "self.block = Block()")
CALLED_BY_THE_SCRIPT = (
    PROGRAM.replace("MODEL = Model().cuda()", "LAYERS = [Block().cuda() for _ in range(3)]")
    .replace("MODEL.parameters()", "[one for layer in LAYERS for one in layer.parameters()]")
    .replace(
        '    MODEL(torch.ones(2048, 256, device="cuda")).backward()',
        '    x = torch.ones(2048, 256, device="cuda")\n'
        "    for layer in LAYERS:\n        x = layer(x)\n    x.sum().backward()",
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("source", [SHARED, CALLED_BY_THE_SCRIPT], ids=["shared", "called by the script"])
def test_blocks_that_only_calls_show_are_found_and_the_budget_is_kept(tmp_path: Path, source: str) -> None:
    file = program(tmp_path, source)
    found, _ = fit(tmp_path, "--budget", "112MiB", file, 6)
    as_is, best = found["candidates"][0], found["candidates"][found["best"]]
    assert as_is["needed_bytes"] > 115 << 20
    assert best["technique"] in ("recompute", "blocks")
    assert best["expected_bytes"] == pytest.approx(best["allocated_bytes"], rel=0.002)
    stalloc(tmp_path, "run", "--device", "virtual", "--budget", "112MiB", "--json", "run.json", file, 6)
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["budget_kept"]
    assert told["budget_by"] == best["what"]


CALLS = """
import json, weakref
import torch
from torch import nn
from stalloc.fitting.repeated_calls import RepeatedCalls
from stalloc.techniques.repeated_blocks import find_blocks

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.two(self.one(x))

class Again(nn.Module):
    def __init__(self, parts, times):
        super().__init__()
        self.parts, self.times = parts, times
    def forward(self, x):
        for _ in range(self.times):
            for part in self.parts:
                x = part(x)
        return x

class Raises(nn.Module):
    def forward(self, x):
        raise ValueError

def found(*models, times=1):
    seen = RepeatedCalls()
    for _ in range(times):
        for model in models:
            model(torch.zeros(1, 4))
    told = seen.blocks([(number, find_blocks(one), weakref.ref(one)) for number, one in enumerate(models)])
    return [[number, block.name] for number, block in told]

def row(count):
    return nn.ModuleList([Block() for _ in range(count)])

seen = RepeatedCalls()
failing = Again(nn.ModuleList([Block(), Raises()]), 2)
for _ in range(2):
    try:
        failing(torch.zeros(1, 4))
    except ValueError:
        pass
looped = RepeatedCalls()
model = Again(row(2), 2)
with torch.autocast("cpu", torch.bfloat16):
    model(torch.zeros(1, 4))
print(json.dumps({
    "cast": [looped.why_not(block) for _, block in looped.blocks([(0, find_blocks(model), weakref.ref(model))])],
    "shared": found(Again(row(1), 3)),
    "once": found(Again(row(1), 1), times=4),
    "layers": found(Again(row(2), 3)),
    "pieces": found(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 4)),
    "models": found(Again(row(2), 1), Again(row(2), 1)),
    "raised": seen.blocks([(0, [], weakref.ref(failing))]),
}))
"""


def test_calls_show_blocks_that_the_tree_of_modules_does_not(run_checks: Callable[..., dict[str, Any]]) -> None:
    told = run_checks(CALLS)
    assert told["shared"] == [[0, "parts.0"]]
    assert told["once"] == told["raised"] == []
    assert told["layers"] == [[0, "parts.0"], [0, "parts.1"]]
    assert "parts.1 is called several times under autocast" in told["cast"][1]
    assert told["pieces"] == [[1, "Block"], [2, "Block"]]
    assert told["models"] == [[0, "parts.0"], [0, "parts.1"], [1, "parts.0"], [1, "parts.1"]]


CHECKPOINTED = (
    PROGRAM.replace("from torch import nn", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint")
    .replace("    def forward(self, x):\n        return x +", "    def compute(self, x):\n        return x +", 1)
    .replace(
        "class Model(",
        "    def forward(self, x):\n        return checkpoint(self.compute, x, use_reentrant=x is None)\nclass Model(",
    )
    .replace("MODEL = ", "class Own(torch.optim.SGD):\n    def step(self):\n        super().step()\nMODEL = ")
    .replace("torch.optim.SGD(MODEL", "Own(MODEL")
)


def test_what_cannot_help_is_said_and_not_tried(tmp_path: Path) -> None:
    """Blocks that checkpoint themselves, and an optimizer that nobody knows."""
    found, _ = fit(tmp_path, "--budget", "10MiB", program(tmp_path, CHECKPOINTED), 6, code=1)
    assert [one["technique"] for one in found["candidates"]] == ["none"]
    assert any("blocks.0 saves nothing that could be computed again" in note for note in found["notes"])
    assert any("stays after the backward pass: Own is not known" in note for note in found["notes"])
    assert found["num_trials"] <= 5


FROM_CODE = (
    "import stalloc\nmade = stalloc.budget('118MiB', device='virtual')\n"
    + PROGRAM
    + """
report = stalloc.statistics()[0]
print(json.dumps([report.run_reserved_peak_bytes, report.phase, made.candidates[made.best].what]))
"""
)


@pytest.mark.slow
def test_a_budget_from_code_is_fitted_once_and_kept(tmp_path: Path) -> None:
    program(tmp_path, FROM_CODE)
    environment = {**os.environ, "STALLOC_CACHE": "off"}
    told = []
    for _ in range(2):
        command = [sys.executable, "program.py", "5"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    assert told[0] == told[1]
    assert told[0][0] <= 118 << 20
    assert told[0][1] == "running on the plan"
    assert told[0][2].startswith("recompute ")
    seen = [json.loads(line)[0] for line in (tmp_path / "seen.txt").read_text().splitlines()]
    assert seen == ["1"] * (len(seen) - 2) + [None, None], "the second run has the fit of the first"
    assert len(seen) > 2 + 3


def test_fit_from_code_gives_the_record(tmp_path: Path) -> None:
    source = (
        "import stalloc, json, sys\n"
        "made = stalloc.fit(sys.argv[1:], budget='66MiB', gpu='A100-80GB', output='mine.fit.npz', policy='blocks:2')\n"
        "print(json.dumps([made.program.gpu, made.best, [one.what for one in made.candidates], made.least_bytes]))\n"
    )
    done = run_warm(source, program(tmp_path), 5, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    gpu, best, ways, least = json.loads(done.stdout.splitlines()[-1])
    assert gpu == "NVIDIA A100-SXM4-80GB"
    assert ways[best] == "recompute 2 whole blocks"
    assert load_fit(tmp_path / "mine.fit.npz").least_bytes == least <= 66 << 20


def test_a_fit_whose_plan_would_make_tensors_overlap_is_not_used(fitted: tuple[Path, dict[str, Any], str]) -> None:
    file = fitted[0] / "train_gpt.fit.npz"
    fit = load_fit(file)
    plans = plans_of(fit, file)
    assert plans is not None
    assert plans_of(replace(fit, plan=b""), file) is None
    overlapping = replace(plans[0], tape_offset=0 * plans[0].tape_offset, offset=0 * plans[0].offset)
    with pytest.raises(BadInputError, match="its plan is not valid"):
        plans_of(replace(fit, plan=plans_to_bytes([overlapping])), file)
    with pytest.raises(BadInputError, match="its plan is damaged"):
        plans_of(replace(fit, plan=b"PK?"), file)


def sample() -> Fit:
    blocks = (BlockSettings(0, "blocks.0", "Block", ((3, "aten.mm.default"),)), BlockSettings(0, "blocks.1", "Block"))
    return Fit(
        program=Program(name="a.py", content="0" * 64, arguments=("-x",), torch="2", stalloc="0", gpu="G"),
        budget_bytes=5, gpu_bytes=9, step_seconds=0.5, estimate="none", best=0, plan=b"plan", notes=("one",),
        candidates=(Candidate(what="as it is", technique="none", needed_bytes=4),),
        settings=Settings(RecomputeSettings(blocks)),
    )  # fmt: skip


def test_the_pareto_set_has_each_way_that_no_other_beats_in_bytes_and_seconds() -> None:
    def way(device: int, host: int, disk: int, seconds: float, refused: str = "") -> Candidate:
        return Candidate(
            what="", technique="", needed_bytes=device, host_bytes=host, disk_bytes=disk, added_seconds=seconds,
            refused=refused,
        )  # fmt: skip

    ways = [way(9, 0, 0, 0), way(5, 0, 0, 2), way(5, 1, 0, 2), way(4, 3, 0, 1), way(4, 0, 3, 1), way(1, 0, 0, 0, "no")]
    assert undominated(ways) == [0, 1, 3, 4]
    assert undominated([*ways, way(4, 0, 0, 1)]) == [0, 6]
    assert undominated([ways[0]] * 2) == [0, 1]


def test_a_fit_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    file = tmp_path / "a.fit.npz"
    sample().save(file)
    assert load_fit(file) == sample()
    assert sample().to_bytes() == sample().to_bytes()
    with pytest.raises(BadInputError, match=r"does not end in \.fit\.npz"):
        sample().save(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "stalloc plan"),
        ("version", 99),
        ("best", 7),
        ("best", True),
        ("budget_bytes", -1),
        ("budget_bytes", 1e300),
        ("step_seconds", float("nan")),
        ("candidates", {}),
        ("candidates", [{"what": "x"}]),
        ("program", None),
        ("notes", [3]),
        ("settings", {"recompute": [{"model": 0, "kind": "B", "keep": [[-1, "x"]], "names": ["a"]}]}),
        ("settings", {"recompute": [{"model": 0, "kind": "B", "keep": [], "names": [["a"]]}]}),
        ("settings", {"recompute": [{"model": "0", "kind": "B", "keep": [], "names": ["a"]}]}),
        ("settings", []),
        ("settings", {}),
        ("estimate", "x" * 5000),
    ],
)
def test_a_fit_file_with_anything_else_in_it_is_one_sentence(tmp_path: Path, name: str, value: object) -> None:
    file = tmp_path / "a.fit.npz"
    sample().save(file)
    with np.load(file) as columns:
        header, plan = json.loads(columns["header"].tobytes()), columns["plan"]
    header[name] = value
    with file.open("wb") as out:
        np.savez(out, header=np.frombuffer(json.dumps(header).encode(), np.uint8), plan=plan)
    with pytest.raises(BadInputError, match="is not a fit"):
        load_fit(file)


def test_damaged_bytes_are_one_sentence(tmp_path: Path) -> None:
    file, whole = tmp_path / "a.fit.npz", sample().to_bytes()
    random = np.random.default_rng(17)
    for _ in range(200):
        damaged = bytearray(whole)
        for place in random.integers(len(whole), size=3):
            damaged[place] = random.integers(256)
        file.write_bytes(bytes(damaged[: random.integers(1, len(whole) + 1)]))
        with contextlib.suppress(BadInputError):
            assert isinstance(load_fit(file), Fit)


def test_a_fit_tells_what_it_is_of() -> None:
    mine = sample().program
    assert mine.difference(mine) == ""
    assert "another program" in mine.difference(replace(mine, content="1" * 64))
    assert "torch 3, and this is 2" in mine.difference(replace(mine, torch="3"))
    assert "gpu H, and this is G" in mine.difference(replace(mine, gpu="H"))


def test_every_system_has_an_honest_status(tmp_path: Path) -> None:
    done = stalloc(tmp_path, "policies", "--json", "systems.json")
    systems = json.loads((tmp_path / "systems.json").read_text())["systems"]
    assert len(systems) >= 35
    assert len({one["name"] for one in systems}) == len(systems)
    assert {one["status"] for one in systems} <= {"executes", "emulates", "replays", "reports", "not yet"}
    assert all(bool(one["where"]) == (one["status"] != "not yet") for one in systems)
    assert "checkmate" in done.stdout


def test_the_package_loads_no_torch(run_fresh: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    source = "import sys, stalloc, stalloc.fitting, stalloc.techniques, stalloc.cost, stalloc.fitting.fit_record\n"
    source += "assert not {'torch', 'scipy', 'cupy'} & set(sys.modules)"
    assert run_fresh(source).returncode == 0


ATTENTION = PROGRAM.replace(
    "return x + self.two(torch.tanh(self.one(x)))",
    "heads = self.one(x).view(8, 256, 16, 64).transpose(1, 2)\n"
    "        found = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)\n"
    "        return x + nn.functional.dropout(self.two(found.transpose(1, 2).reshape(2048, 1024)), 0.1)",
)


@pytest.mark.slow
def test_attention_is_not_said_to_be_kept_where_random_numbers_come_after_it(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", "--policy", "keep-attention", program(tmp_path, ATTENTION), 5)
    assert [one["technique"] for one in found["candidates"]] == ["none"]
    assert "results of attention are not kept, as random numbers are drawn after them" in found["notes"]


COMPILED = PROGRAM.replace("MODEL = Model().cuda()", "MODEL = torch.compile(Model().cuda(), backend='aot_eager')")


@pytest.mark.slow
def test_compiled_code_saves_less_for_a_budget(tmp_path: Path) -> None:
    source = COMPILED.replace("torch.compile(Model().cuda(), backend='aot_eager')", "Model().cuda()").replace(
        "OPTIMIZER =", "for one in MODEL.blocks: one.compile(backend='aot_eager_decomp_partition')\nOPTIMIZER ="
    )
    file = program(tmp_path, source)
    found, _ = fit(tmp_path, "--budget", "112MiB", "--policy", "compile-budget", file, 6)
    best = found["candidates"][found["best"]]
    assert best["technique"] == "compile-budget"
    assert best["fits"]
    done = stalloc(tmp_path, "run", "--device", "virtual", "--budget", "112MiB", file, 6)
    assert f"budget 112.00 MiB: kept ({best['what']})" in done.stdout


@pytest.mark.slow
def test_a_compiled_program_is_fitted_as_it_is_with_the_reason(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", program(tmp_path, COMPILED), 6)
    assert found["candidates"][0]["fits"]
    assert [note for note in found["notes"] if note.startswith("nothing can be recomputed")]
