"""A small program to fit, and stalloc fit as a user runs it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from warm_programs import run_stalloc

TRAIN = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = ("--size", "tiny", "--batch", "64", "--steps", "6")  #: 132 MiB as it is, 100 MiB at the least
BUDGET = "120MiB"


def stalloc(folder: Path, verb: str, *words: Any, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a verb of stalloc in a folder, which has to end with a code."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = run_stalloc(verb, *words, folder=folder, variables={**environment, "STALLOC_CACHE": "off", **variables})
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def fit(folder: Path, *words: Any, code: int = 0) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Run `stalloc fit` there: what its JSON says, and the process."""
    done = stalloc(folder, "fit", "--json", "result.json", *words, code=code)
    file = folder / "result.json"
    return json.loads(file.read_text()) if file.exists() else {}, done


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
    """Write a program to a folder."""
    file = folder / "program.py"
    file.write_text(source)
    return file


def sentence(folder: Path, *words: Any) -> str:
    """The one sentence of a fit that cannot be made."""
    _, done = fit(folder, *words, code=2)
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.endswith(" …")]  # of progress
    assert len(lines) == 1, done.stderr
    return lines[0]
