"""What stalloc fit says where it cannot help: one sentence, and what to do next."""

import fcntl
import json
from pathlib import Path

import pytest
from programs.fitting_checks import PROGRAM, fit, program, sentence, stalloc
from warm_programs import told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


VARYING = PROGRAM.replace("torch.ones(2048", "torch.ones(2048 + 64 * (os.getpid() % 61)")


UNREPEATABLE = PROGRAM.replace("class Block", "CALLS = []\nclass Block").replace(
    "        return x +", "        CALLS.append(1)\n        x = x + 1 if len(CALLS) % 5 == 4 else x\n        return x +"
)


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


ATTENTION = PROGRAM.replace(
    "return x + self.two(torch.tanh(self.one(x)))",
    "heads = self.one(x).view(8, 256, 16, 64).transpose(1, 2)\n"
    "        found = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)\n"
    "        return x + nn.functional.dropout(self.two(found.transpose(1, 2).reshape(2048, 1024)), 0.1)",
)


def test_trials_are_told_so_and_hear_and_say_nothing(tmp_path: Path) -> None:
    found, done = fit(tmp_path, "--budget", "118MiB", "--policy", "blocks:1", "--keep-files", program(tmp_path), 5)
    seen = [json.loads(line) for line in (tmp_path / "seen.txt").read_text().splitlines()]
    assert seen == [["1", "", None]] * found["num_trials"]
    assert "the program speaks" not in done.stdout + done.stderr
    assert "looking at a step of the program …" in done.stderr.splitlines(), "in pipes too"


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
        (("--budget", "1GiB", "--policy", "nonsense"), "no fit takes the policy 'nonsense'"),
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


@pytest.mark.slow
def test_steps_that_differ_between_trials_are_said_so(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", program(tmp_path, VARYING), 5)
    assert [note for note in found["notes"] if "steps differ between two trials" in note]


@pytest.mark.slow
def test_blocks_that_cannot_be_computed_twice_are_left_as_they_are(tmp_path: Path) -> None:
    found, done = fit(tmp_path, "--budget", "66MiB", program(tmp_path, UNREPEATABLE), 6, code=1)
    assert any("does not do the same when it is recomputed" in note for note in found["notes"])
    assert not any(one["fits"] for one in found["candidates"])
    assert "nothing can be recomputed" in done.stdout


def test_what_cannot_help_is_said_and_not_tried(tmp_path: Path) -> None:
    """Blocks that checkpoint themselves, and an optimizer that nobody knows."""
    found, _ = fit(tmp_path, "--budget", "10MiB", program(tmp_path, CHECKPOINTED), 6, code=1)
    assert [one["technique"] for one in found["candidates"]] == ["none"]
    assert any("blocks.0 is checkpointed by the program already" in note for note in found["notes"])
    assert any("stays after the backward pass: Own is not known" in note for note in found["notes"])
    assert found["num_trials"] <= 5


@pytest.mark.slow
def test_attention_is_not_said_to_be_kept_where_random_numbers_come_after_it(tmp_path: Path) -> None:
    found, _ = fit(tmp_path, "--budget", "1GiB", "--policy", "keep-attention", program(tmp_path, ATTENTION), 5)
    assert [one["technique"] for one in found["candidates"]] == ["none"]
    assert "results of attention are not kept, as random numbers are drawn after them" in found["notes"]


def test_a_block_that_saves_nothing_that_could_be_computed_again_is_told_the_true_reason() -> None:
    said, idle = told_by_file(Path(__file__).parent / "programs" / "blocks_that_stay.py")
    assert said.pop("Plain") == ""
    assert {kind: " ".join(words.split(",")[0].split()[1:]) for kind, words in said.items()} == {
        "Frozen": "has no gradients",
        "Convolved": "saves for backward only what it is given",
        "Averaged": "saves for backward only what it is given",
        "Within": "is checkpointed by the program already",
        "WithinReentrant": "is checkpointed by the program already",
        "Around": "is recomputed by the program itself",
        "Shifted": "saves nothing for backward",
    }
    assert "parts.0 was not called with gradients in the steps that were looked at" in idle
