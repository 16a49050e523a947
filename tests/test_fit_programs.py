"""Programs of all kinds that are fitted: with blocks that only calls show, compiled, sharded, of known formulas."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs.fitting_checks import PROGRAM, fit, program, stalloc
from warm_programs import told_by_file

from stalloc.fitting.candidates import Ahead, steps_to_try
from stalloc.fitting.run_seen import aligned

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


FORMULA = """
import json, sys
from stalloc import device
device.activate("virtual")
import torch._dynamo
from stalloc.cli.program import run_program
from stalloc.fitting.candidates import Fitting
from stalloc.fitting.frontier import selective
from stalloc.fitting.trials import run_trial
from stalloc.fitting.proposals import Known
from stalloc.sandbox import ProgramFiles
files = ProgramFiles([], keep=False)
def run():
    return run_program([sys.argv[1], "4"])
fitting = Fitting(Known(1 << 40), lambda work: run_trial(run, work, 60, files), lambda text: None)
fitting.run("selective")
tried, step = fitting.known.candidates[-1], fitting.known.step
print(json.dumps({
    "saved": [call.saved_bytes for call in step.calls],
    "kept": [one.kept_bytes for one in selective(step).values()],
    "expected": tried.expected_bytes, "allocated": tried.allocated_bytes, "what": tried.technique,
}))
"""


RESETTING = PROGRAM.replace("return x.sum()", "torch.cuda.reset_peak_memory_stats()\n        return x.sum()")


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


#: a model that is itself cut into rows: a sequence of layers, and statements of a forward pass
SEQUENCE = PROGRAM.replace(
    "MODEL = Model().cuda()",
    """
class Sum(nn.Module):
    def forward(self, x):
        return x.sum()
UNITS = [part for _ in range(3) for part in (nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Tanh())]
MODEL = nn.Sequential(*UNITS, Sum()).cuda()
""",
)
STATEMENTS = PROGRAM.replace(
    """        for block in self.blocks:
            x = block(x)
        return x.sum()""",
    """        for number in range(1):
            x = x * 2
        x = torch.tanh(self.one(x))
        x = y = torch.tanh(self.two(x))
        x = torch.tanh(self.three(x))
        x = torch.tanh(self.four(x)) + y
        x = torch.tanh(self.five(x))
        x = torch.tanh(self.six(x))
        return x.sum()""",
).replace(
    "self.blocks = nn.ModuleList([Block() for _ in range(3)])",
    """for name in ("one", "three", "five"):
            setattr(self, name, nn.Linear(256, 1024))
        self.two, self.four, self.six = (nn.Linear(1024, 256) for _ in range(3))""",
)


CALLS = """
import json, weakref
import torch
from torch import nn
from stalloc.fitting.observer import RepeatedCalls
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
print(json.dumps({
    "shared": found(Again(row(1), 3)),
    "once": found(Again(row(1), 1), times=4),
    "layers": found(Again(row(2), 3)),
    "pieces": found(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 4)),
    "models": found(Again(row(2), 1), Again(row(2), 1)),
    "raised": seen.blocks([(0, [], weakref.ref(failing))]),
}))
"""


COMPILED = PROGRAM.replace("MODEL = Model().cuda()", "MODEL = torch.compile(Model().cuda(), backend='aot_eager')")


@pytest.mark.slow
def test_a_program_that_fsdp2_shards_is_fitted(tmp_path: Path) -> None:
    program = Path(__file__).parent / "programs" / "real" / "fsdp2.py"
    found, _ = fit(tmp_path, "--budget", "1500MiB", "--policy", "blocks:16", program, 4)
    assert [one["refused"] for one in found["candidates"]] == ["", ""]
    for one in found["candidates"]:
        assert one["expected_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.002)
    assert found["candidates"][found["best"]]["what"] == "recompute 16 whole blocks"


@pytest.mark.slow
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


@pytest.mark.slow
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
        assert found["num_trials"] == 6, "a look, one ahead, two to foresee, and what needs too much twice"
        return
    early, as_is = rows["step-in-backward"], rows["none"]
    assert early["expected_bytes"] == early["allocated_bytes"]
    assert as_is["allocated_bytes"] - early["allocated_bytes"] > 3 << 20  # most of 6 MiB of gradients
    done = stalloc(tmp_path, "run", "--device", "virtual", "--budget", "94MiB", file, 6)
    assert "budget 94.00 MiB: kept (optimizer's step in the backward pass)" in done.stdout


#: at the peak a tensor of 20 MiB lies in a block of as much, and from the fourth step on in one of 20.75, never split
HOLES = PROGRAM.replace(
    "for step in range",
    """def take(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")
take(40 << 20)
rest = take(77 << 18)
for step in range""",
).replace(
    "    MODEL(torch",
    """    pair = [take(20 << 20), take(20 << 20)]
    del pair[0 if step == 0 or step > 2 else 1]
    take(600 << 20)
    del pair
    MODEL(torch""",
)


def test_steps_that_ask_for_the_same_are_alike_whichever_blocks_they_get(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", program(tmp_path, HOLES), 6)
    assert "all 6 steps were looked at" in found["notes"]


def test_steps_of_every_kind_are_tried_and_what_is_left_out_is_said() -> None:
    alike, short, long = [(10, 100)] * 4, (10, 60), (99, 500 << 30)
    assert steps_to_try(alike, 3, is_whole=True) == Ahead(3, 9, "all 4 steps were looked at")
    assert "a later one that is larger" in steps_to_try(alike, 3, is_whole=False).note
    assert steps_to_try([*alike, short, *alike, short], 3, is_whole=True) == Ahead(
        7, 17, "all 10 steps were looked at; 2 of them unlike the first 3, or after others, so each run has 7"
    )
    back = steps_to_try([*alike, short, short, *alike, short, *alike], 3, is_whole=True)
    assert back.num_steps == 8, "what a step finds is what the one before left"
    late = steps_to_try([*alike, short, *alike * 30, long], 3, is_whole=False)
    assert late.num_steps == 7
    assert late.num_within == 127, "the run that decides has every kind that was seen"
    assert "step 126, which allocates 500.00 GiB, is unlike those that were tried, or after another" in late.note
    assert "--trial-steps 126 has all runs try it" in late.note


def test_how_many_steps_are_tried_depends_on_what_they_ask_for_and_on_nothing_else() -> None:
    small, many = [(1_000, 100)] * 20, [(10_000, 100)] * 20
    assert steps_to_try([*small, (1_000, 60), *small], 3, is_whole=True).num_steps == 23
    assert steps_to_try([*many, (10_000, 60), *many], 3, is_whole=True).num_steps == 3


@pytest.mark.slow
def test_a_run_with_a_short_last_batch_keeps_its_budget_to_the_end(tmp_path: Path) -> None:
    rows = 'torch.ones(700 if step % 7 == 6 else 2048, 256, device="cuda")'
    file = program(tmp_path, PROGRAM.replace('torch.ones(2048, 256, device="cuda")', rows))
    found, _ = fit(tmp_path, "--budget", "118MiB", file, 20)
    assert found["candidates"][found["best"]]["checked"] == "run, 20 steps"
    assert any("so each run has 9" in note for note in found["notes"])
    done = stalloc(tmp_path, "run", "--device", "virtual", "--budget", "118MiB", "--json", "run.json", file, 20)
    assert "budget 118.00 MiB: kept" in done.stdout
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["phase"] == "running on the plan", "it comes back after what it does not know, be the budget full"
    assert told["run_reserved_peak_bytes"] == found["candidates"][found["best"]]["needed_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 6])
def test_steps_that_were_asked_for_are_all_of_a_program_that_has_no_more(tmp_path: Path, steps: int) -> None:
    words = ("--budget", "1GiB", "--policy", "blocks:1", "--trial-steps")
    found, _ = fit(tmp_path, *words, steps, program(tmp_path), 6)
    notes = [note for note in found["notes"] if "a later one" in note]
    assert [note.startswith("each run has 4 steps, and a later one") for note in notes] == [True] * (steps == 4)


@pytest.mark.slow
def test_a_program_that_resets_its_peaks_needs_what_it_needed(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", "--policy", "blocks:1", program(tmp_path, RESETTING), 5)
    usual, _ = fit(tmp_path, "--budget", "1GiB", "--policy", "blocks:1", program(tmp_path), 5)
    assert [one["needed_bytes"] for one in found["candidates"]] == [one["needed_bytes"] for one in usual["candidates"]]


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


@pytest.mark.slow
@pytest.mark.parametrize("source", [SEQUENCE, STATEMENTS], ids=["sequence", "statements"])
@pytest.mark.parametrize("options", [(), ("--host", "1GiB")], ids=["device", "host"])
def test_a_model_that_is_cut_into_rows_keeps_its_budget_from_its_first_call(
    tmp_path: Path, source: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STALLOC_CUT_FORWARD", "1")
    file = program(tmp_path, source)
    found, _ = fit(tmp_path, "--budget", "1MiB", *options, file, 6, code=1)
    as_is, least = found["candidates"][0]["needed_bytes"], found["least_bytes"]
    assert least < as_is - (6 << 20)
    found, _ = fit(tmp_path, "--budget", f"{least}B", *options, file, 6)
    assert found["candidates"][found["best"]]["fits"]
    command = ("run", "--device", "virtual", "--budget", f"{least}B", *options, "--json", "run.json", file, 6)
    stalloc(tmp_path, *command)
    assert json.loads((tmp_path / "run.json").read_text())["budget_kept"]


def test_two_runs_are_lined_up_where_they_part_several_times_in_a_row() -> None:
    """What one makes beside the other, in blocks that are looked at, takes no pair from what both make."""
    same = list(range(100, 108))
    looked_at, as_it_is = [9, 4, 4, 16, 64, 64, 16, 64, 64, *same], [9, 4, 16, 64, 16, 64, *same]
    pairs = list(aligned(looked_at, as_it_is))
    assert [as_it_is[place] for _, place in pairs] == [looked_at[place] for place, _ in pairs] == as_it_is
    assert pairs == sorted(pairs)
    assert list(aligned([1, 2, *same], [3, *same])) == [(place + 2, place + 1) for place in range(8)]
    far = list(range(200, 300))  # more than is left out at once
    assert list(aligned([*far, *same], [*reversed(far), *same]))[-8:] == [
        (place + 100, place + 100) for place in range(8)
    ]
    longer = list(range(1000, 7000))
    assert list(aligned([*longer, *same], [*reversed(longer), *same]))[-8:] == [
        (place + 6000, place + 6000) for place in range(8)
    ]


def test_calls_show_blocks_that_the_tree_of_modules_does_not(run_checks: Callable[..., dict[str, Any]]) -> None:
    told = run_checks(CALLS)
    assert told["shared"] == [[0, "parts.0"]]
    assert told["once"] == told["raised"] == []
    assert told["layers"] == [[0, "parts.0"], [0, "parts.1"]]
    assert told["pieces"] == [[1, "Block"], [2, "Block"]]
    assert told["models"] == [[0, "parts.0"], [0, "parts.1"], [1, "parts.0"], [1, "parts.1"]]


TRANSFORMED = """
import sys, torch
from torch import nn
from torch.func import functional_call, grad, vmap
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        x = x + self.two(self.one(x))
        return x if WITHIN else x + grad(lambda y: y.sin().sum())(x)
WITHIN = sys.argv[1] == "within"
model = nn.Sequential(Block(), Block()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(8, 64, device="cuda")
    if WITHIN:
        weights = {name: one.detach() for name, one in model.named_parameters()}
        of_each = vmap(grad(lambda weights, x: functional_call(model, weights, (x,)).sum()), (None, 0))(weights, x)
        for name, one in model.named_parameters():
            one.grad = of_each[name].mean(0)
    else:
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "says"), [("within", "is called in a transform"), ("calls", "calls a transform")])
def test_programs_with_transforms_of_torch_func_are_fitted_as_they_are(tmp_path: Path, how: str, says: str) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", program(tmp_path, TRANSFORMED), how)
    assert found["candidates"][found["best"]]["technique"] == "none"
    assert any(f"0 {says} of torch.func" in note for note in found["notes"])


LAZY = """
import json
from stalloc import device
device.activate("virtual")
import torch
from torch import nn
from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.repeated_blocks import why_not
seen = []
when_models_appear(lambda number, blocks, model: seen.append([number, *((one.name, why_not(one)) for one in blocks)]))
model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()) for _ in range(3)))
other = nn.Linear(4, 4)
for _ in range(3):
    other(model(torch.zeros(2, 6)))
print(json.dumps(seen))
"""


def test_models_with_lazy_layers_appear_when_these_have_their_parameters(run_checks: Callable[..., Any]) -> None:
    assert run_checks(LAZY) == [[0], [1, ["0", ""], ["1", ""], ["2", ""]]]


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
