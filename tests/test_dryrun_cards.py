"""`stalloc dryrun`: the card that is named is the one that the program sees, and what is not certain is said."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc

pytestmark = pytest.mark.usefixtures("cuda_torch")

_ASKS = """
import json, sys, torch
properties = torch.cuda.get_device_properties(0)
best, num_turns = torch.zeros(1, device="cuda"), 0
while not (torch.randn(4096, device="cuda").max() > best + 1).any():
    num_turns += 1
    block = torch.empty(num_turns << 20, dtype=torch.uint8, device="cuda")
torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([properties.name, properties.multi_processor_count, torch.cuda.get_device_capability(),
                           properties.total_memory]) + "\\n")
"""
_GUESSES = """
import torch
net = torch.nn.Conv2d(8, 8, 3, padding=1).cuda()
image = torch.randn(4, 8, 64, 64, device="cuda")
for _ in range(3):
    net(image).sum().backward()
    if torch.randn(5, device="cuda").argmax() == 3:
        print("chosen")
"""


def _dryrun(*arguments: str) -> Any:
    done = run_stalloc("dryrun", *arguments, variables=os.environ | {"STALLOC_CACHE": "off"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_program_sees_the_card_that_was_named_and_what_is_assumed_of_a_line(tmp_path: Path) -> None:
    program, answers, file = tmp_path / "asks.py", tmp_path / "answers", tmp_path / "result.json"
    program.write_text(_ASKS)
    _dryrun(
        "--keep-files", "--gpu", "L4", "--assume", "asks.py:5=true", "--json", str(file), str(program), str(answers)
    )
    seen = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(seen) >= 3  # natively, with expandable segments and under stalloc
    for name, multiprocessors, capability, _ in seen:
        assert (name, multiprocessors, capability) == ("NVIDIA L4", 58, [8, 9])
    result = json.loads(file.read_text())
    assert result["native"]["allocated_peak_bytes"] < 65 << 20
    assert result["uncertain"]["decisions"] == []


@pytest.mark.slow
def test_what_is_not_certain_is_said(tmp_path: Path) -> None:
    program = tmp_path / "guesses.py"
    program.write_text(_GUESSES)
    file = tmp_path / "result.json"
    text = _dryrun("--gpu", "A10G", "--json", str(file), str(program))
    assert "cuDNN's workspace is a guess for 2 of 2 convolutions" in text
    assert "3 decisions depended on values that the virtual GPU does not compute: " in text.replace("\n", " ")
    result = json.loads(file.read_text())
    assert re.search(r"CUDA context and NCCL +512\.00 MiB +512\.00 MiB", text)
    assert result["headroom_bytes"] == 512 << 20
    assert result["headroom_source"] in " ".join(text.split())
    convolutions = result["uncertain"]["convolutions"]
    assert convolutions["num_unseen"] == convolutions["num_convolutions"] == 2
    (decision,) = result["uncertain"]["decisions"]
    assert decision == {"place": f"{program}:7", "num_reads": 3}
    assert result["uncertain"]["torch"]
    low, high = convolutions["allocated_peak_bytes"]
    assert low <= result["native"]["allocated_peak_bytes"] <= high
    assert high - low <= 2 * convolutions["unknown_bytes"]
    assert result["native"]["taken_bytes"] in convolutions["taken_bytes_tried"]
    assert "given plenty, which bounds nothing" in " ".join(text.split())


def test_an_assumption_that_says_nothing_is_one_sentence(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.touch()
    done = run_stalloc("dryrun", "--assume", "waits.py=1", program, variables=os.environ | {"STALLOC_CACHE": "off"})
    assert done.returncode == 2
    assert "write FILE:LINE=NUMBER" in done.stderr
