"""What is foreseen of every choice of a fit, and how closely a budget is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs.fitting_checks import PROGRAM, fit, program
from properties import variants

from stalloc.fitting.candidates import Fitting
from stalloc.fitting.frontier import Proposal
from stalloc.fitting.observation import BlockSeen, OperationSeen, ProgramSeen
from stalloc.fitting.proposals import Base, Known, Way
from stalloc.fitting.trials import Measured, TrialWork

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


#: each block averages what it sees: a product that nothing reads but a change in place, at once
AVERAGED = PROGRAM.replace(
    "self.one, self.two = nn.Linear(256, 1024), nn.Linear(1024, 256)",
    "self.one, self.two = nn.Linear(256, 1024), nn.Linear(1024, 256)\n"
    '        self.register_buffer("average", torch.zeros(256, 1024))',
).replace(
    "        return x + self.two(torch.tanh(self.one(x)))",
    "        y = torch.tanh(self.one(x))\n"
    "        self.average.mul_(0.9).add_(x.detach().t() @ y.detach(), alpha=0.1)\n"
    "        return x + self.two(y * self.average[0])",
)

EVERY_CHOICE = """
import json, os, sys
os.chdir(os.path.dirname(sys.argv[1]))
from stalloc import device
device.activate("virtual")
import torch._dynamo
from stalloc.cli.program import run_program
from stalloc.fitting.candidates import Fitting
from stalloc.fitting.frontier import keeping, proposal
from stalloc.fitting.trials import run_trial
from stalloc.fitting.proposals import Known, Way
from stalloc.sandbox import ProgramFiles
files = ProgramFiles([], keep=False)
def run():
    return run_program([sys.argv[1], "4"])
fitting = Fitting(Known(1 << 40), lambda work: run_trial(run, work, 60, files), lambda text: None)
fitting.run("blocks:3")
told, step = {}, fitting.known.step
for name in sys.argv[2:]:
    tried = fitting.measure(Way(fitting.as_it_is, proposal(step, keeping(step, (name,))), name, name))
    told[name] = [tried.expected_bytes, tried.allocated_bytes]
print(json.dumps(told))
"""


@variants("names", [("aten.mm.",), ("aten.tanh", "aten.mul.Tensor")], ids=["products", "the others"])
def test_what_is_kept_is_foreseen_to_the_byte(
    run_checks: Callable[..., dict[str, Any]], tmp_path: Path, names: tuple[str, ...]
) -> None:
    told = run_checks(EVERY_CHOICE, str(program(tmp_path, AVERAGED)), *names)
    assert len(told) == len(names)
    for expected, allocated in told.values():
        assert expected == allocated > 0


#: four blocks, of which each saves a large part of what the program needs, in eight results of one size
FEW = PROGRAM.replace("range(3)", "range(4)").replace(
    "torch.tanh(self.one(x))", "torch.tanh(torch.sin(torch.tanh(torch.sin(torch.tanh(torch.sin(self.one(x)))))))"
)


@pytest.mark.slow
def test_a_budget_is_used_though_blocks_are_few(tmp_path: Path) -> None:
    file = program(tmp_path, FEW)
    found, _ = fit(tmp_path, "--budget", "1MiB", file, 4, code=1)
    most, least = found["candidates"][0]["needed_bytes"], found["least_bytes"]
    for share in (0.3, 0.6, 0.85):
        budget = int(least + share * (most - least))
        found, _ = fit(tmp_path, "--budget", f"{budget}B", file, 4)
        assert found["candidates"][found["best"]]["needed_bytes"] > budget - 0.12 * (most - least)


#: one block that is called nine times under autocast, which casts its weights for the first call alone
CAST_ONCE = (
    PROGRAM.replace(
        "for block in self.blocks:\n            x = block(x)", "for _ in range(9):\n            x = self.block(x)"
    )
    .replace("self.blocks = nn.ModuleList([Block() for _ in range(3)])", "self.block = Block()")
    .replace("    MODEL(torch", '    with torch.autocast("cuda", torch.bfloat16):\n      LOSS = MODEL(torch')
    .replace('device="cuda")).backward()', 'device="cuda"))\n    LOSS.backward()\n    del LOSS')
)


@pytest.mark.slow
def test_a_block_that_is_called_several_times_under_autocast_is_computed_again(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", program(tmp_path, CAST_ONCE), 4)
    as_it_is, whole = found["candidates"]
    assert whole["what"] == "recompute 1 whole block"
    assert whole["allocated_bytes"] < as_it_is["allocated_bytes"] - (8 << 20)
    budget = (as_it_is["needed_bytes"] + whole["needed_bytes"]) // 2
    found, _ = fit(tmp_path, "--budget", f"{budget}B", tmp_path / "program.py", 4)
    for one in found["candidates"]:
        assert one["expected_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.002)


@pytest.mark.parametrize(("shortages", "most_steps", "fits"), [(0, 99, True), (1, 99, False), (0, 5, False)])
def test_a_way_fits_within_the_limit_only_where_nothing_was_short_and_for_longer(
    shortages: int, most_steps: int, fits: bool
) -> None:
    """A program that needs 100 bytes more than the budget where memory is plentiful, and can be squeezed."""
    budget = 1000

    def trial(work: TrialWork) -> Measured:
        if work.limit_bytes and work.num_steps > most_steps:
            return Measured(failure="out of memory", out_of_memory=True)
        reserved = min(budget + 100, work.limit_bytes or budget + 100)
        return Measured(
            allocated_bytes=budget - 10,
            reserved_bytes=reserved,
            num_shortages=shortages if work.limit_bytes else 0,
            plan=b"plan" if work.under == "recorded" else b"",
        )

    fitting = Fitting(Known(budget, step=ProgramSeen([], [], 1.0, 3)), trial, lambda text: None, num_steps=3)
    candidate = fitting.measure(Way(Base(), Proposal({}, 0.0), "as it is", "none"))
    assert candidate.fits(budget) is fits
    assert candidate.needed_bytes == (budget if fits else budget + 100)


#: what it makes in a step is another in every run
DIFFERING = PROGRAM.replace(
    "    OPTIMIZER.step()",
    '    for number in os.urandom(100):\n        torch.empty(512 * (1 + number), device="cuda")\n    OPTIMIZER.step()',
)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "is_told"), [(DIFFERING, True), (PROGRAM, False)])
def test_where_two_runs_cannot_be_lined_up_it_is_said(tmp_path: Path, source: str, is_told: bool) -> None:
    found, done = fit(tmp_path, "--budget", "1MiB", program(tmp_path, source), 4, code=1)
    told = [note for note in found["notes"] if "was not found again" in note]
    assert len(told) == is_told
    assert ("was not found again" in " ".join(done.stdout.split())) is is_told


def test_nothing_is_kept_of_calls_whose_operations_have_other_positions() -> None:
    """A second call that finds casts of weights made has fewer operations than the first, by casts at the most."""
    names = ["aten._to_copy.default", "aten._to_copy.default", "aten.addmm.default", "aten.add_.Tensor"]
    block = BlockSeen(
        0, "blocks.0", "Block", "", [OperationSeen(one, 1.0, 512, one[-7:] == ".Tensor") for one in names]
    )
    seen = ProgramSeen([block], [], 1.0, 3)
    for counts, kept in (({4}, 512), ({4, 2}, 0), ({4, 3}, 0), ({4, 1}, 512)):
        operations = seen.with_casts_once({0: counts}).blocks[0].operations
        assert [one.kept_bytes for one in operations] == [kept, kept, kept, 512], counts
