"""Every command of the README and of docs/usage.md runs, on small programs and files.

Those that are shown with an answer run in test_docs.py. The names that both pages give to what is the reader's stand
for a program that trains, and for our recordings.
"""

import gzip
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recordings import path_of
from test_docs import ROOT, answer
from warm_programs import run_stalloc, without_compiling

PAGES = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/usage.md"))
TRAIN = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--my-options", action="store_true")
parser.add_argument("--batch", type=int, default=4)
batch = parser.parse_args().batch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    model(torch.ones(batch, 4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TEST = """
import torch
def test_it_allocates():
    torch.ones(1 << 20, device="cuda")
"""
#: what the pages call the reader's files and choices, where they do not name one
MEANT = {
    "8": "2",  # ranks
    "stalloc swap FILE… --budget SIZE": "stalloc swap operations.trace.npz --budget 16MiB",
    "stalloc evict FILE… --budget 0.5": "stalloc evict operations.trace.npz --budget 0.5",
    "SCRIPT": "train.py", "FILE…": "snapshot.pickle", "FILE": "snapshot.pickle", "PLAN": "step.plan.npz",
    "TRACE": "snapshot.pickle", "IN": "snapshot.pickle", "OUT": "out.json", "A": "snapshot.pickle",
    "B": "snapshot.pickle", "T": "snapshot.pickle", "P": "p.plan.npz",
}  # fmt: skip
#: commands that are not run here, and why
ELSEWHERE = {
    "pip install": "needs a network; scripts/lib/packaging_trial.py installs it",
    "./scripts/test": "runs this",
    "./scripts/demo": "is the command of docs/usage.md that shows its report, and one more of its kind",
    "./scripts/site": "installs MkDocs: test_site.py",
    "./scripts/gpu_check": "needs a GPU",
    "stalloc live": "needs a program beside it: test_live.py",
    "stalloc mcp": "needs the mcp package: test_mcp.py",
    "stalloc bench": "takes minutes: test_bench_….py run parts of them",
    "eval": "is argcomplete's own",
}
#: those that start several programs, or large ones, and more of a kind
SLOW = (
    "stalloc run -",
    "--my-options",
    "STALLOC",
    "stalloc dryrun",
    "stalloc fit",
    "--budget 24GiB",
    "--compare-native",
    "torchrun",
)
_GUARD = ("--stalloc-baseline", "memory.json", "--stalloc-gpu", "virtual:H100")


def typed() -> list[str]:
    """The lines that a reader may type: of blocks, of the table's first column, and those of the text with a script."""
    text = re.sub(r"```(console|python)\n.*?```", "", PAGES, flags=re.DOTALL)
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^```\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `(stalloc [^`]+)` \|", prose, re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    starts = ("stalloc ", "pytest ", "STALLOC", "./scripts", "eval ")
    asked = [code for code in inline if code.startswith(starts) and re.search(r"\.py\b|\.json\b|\./|\$\(", code)]
    commands = [one.strip() for line in (*lines, *rows, *asked) for one in re.sub(r"\s+#.*", "", line).split("; ")]
    commands = [" ".join(MEANT.get(word, word) for word in MEANT.get(one, one).split(" ")) for one in commands]
    return list(
        dict.fromkeys(one for one in commands if re.match(r"(stalloc|pytest|pip|eval) [\w\"-]|STALLOC|\./", one))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages name: a program, a package, a test, a snapshot, a log, and plans of both."""
    made = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", made / "examples")
    (made / "train.py").write_text(TRAIN)
    (made / "package").mkdir()
    (made / "package" / "train.py").write_text(TRAIN)
    (made / "test_model.py").write_text(TEST)
    (made / "snapshot.pickle").write_bytes(gzip.decompress(path_of("out_of_memory.pickle.gz").read_bytes()))
    shutil.copy(path_of("out_of_memory.log"), made / "error.log")
    done = answer(["pytest", *_GUARD, "--stalloc-update"], made, dict(os.environ), shows_stacks=False)
    assert done.returncode == 0, done.stdout
    done = run_stalloc("record", "--device", "virtual", "--ops", "-o", "operations.trace.npz", "train.py", folder=made)
    assert done.returncode == 0, done.stderr
    for plan in ("step.plan.npz", "t.plan.npz", "p.plan.npz"):
        done = run_stalloc("plan", "snapshot.pickle", "-o", plan, folder=made)
        assert done.returncode == 0, done.stderr
    return made


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, marks=[pytest.mark.slow] * any(part in one for part in SLOW))
        for one in typed()
        if not one.startswith(tuple(ELSEWHERE))
    ],
)
def test_a_command_runs(command: str, folder: Path) -> None:
    words = shlex.split(command)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("STALLOC", "PYTEST"))}
    variables |= {"STALLOC_CACHE": "off", "STALLOC_DEVICE": "virtual"}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"  # where torchrun is
    done = answer(words, folder, variables, shows_stacks=False)
    said = done.stdout + without_compiling(done.stderr)
    assert done.returncode == 0, said


def test_the_code_runs(run_program: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)
    names = "data = [1 << 20] * 6\ndef train(size):\n    import cupy\n    cupy.zeros(size)\n"
    done = run_program(names + code.replace("install()", "install(device='virtual')"))
    assert done.returncode == 0, done.stderr
    assert "running on the plan" in done.stdout


def test_what_is_not_run_here_stands_in_the_pages() -> None:
    commands = typed()
    assert len(commands) > 40
    for start in ELSEWHERE:
        assert any(command.startswith(start) for command in commands), start
