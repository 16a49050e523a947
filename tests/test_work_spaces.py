"""What `stalloc record --stacks` tells of cuDNN's workspaces, as rows that can be contributed to the table."""

import csv
import io
import json
from pathlib import Path

import pytest
from warm_programs import run_stalloc

from stalloc.cli import main
from stalloc.device.cudnn import workspace_table
from stalloc.trace import load_traces, save_traces

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROGRAM = """
import json, sys
import torch
from torch import nn
from stalloc.device import virtual

model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 32, 1, bias=False),
    nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.Conv2d(16, 4, 1), nn.ReLU(),
).cuda()
image = torch.randn(2, 3, 64, 64, device="cuda")
for _ in range(2):
    model(image).pow(2).sum().backward()
with torch.autocast("cuda", torch.float16):
    model(image).pow(2).sum().backward()
last = model.half().to(memory_format=torch.channels_last)
last(image.half().contiguous(memory_format=torch.channels_last)).pow(2).sum().backward()
nn.Conv3d(4, 8, 3).cuda()(torch.randn(2, 4, 8, 8, 8, device="cuda")).pow(2).sum().backward()
asked = [[c.direction, c.input_sizes, c.filter_sizes, c.strides, c.workspace_bytes] for c in virtual.convolutions()]
with open(sys.argv[1], "w") as file:
    json.dump(asked, file)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work-spaces")
    (folder / "program.py").write_text(_PROGRAM)
    device = ("--device", "virtual", "--gpu", "A100-40GB")
    words = ["record", "--stacks", "-o", "run.trace.npz", *device, "program.py", "asked.json"]
    done = run_stalloc(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def _by(sizes: list[int]) -> str:
    return "x".join(map(str, sizes))


def test_rows_of_a_recording_are_what_the_table_answered(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--cudnn-table", str(recorded / "run.trace.npz")]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    asked = json.loads((recorded / "asked.json").read_text())
    told = {
        (direction, f"{_by(sizes)} by {_by(filters)} stride {_by(strides)}", space)
        for direction, sizes, filters, strides, space in asked
    }
    assert {(row["direction"], row["shape"], int(row["more_bytes"])) for row in rows} == told
    assert len(rows) == len(asked)
    assert any(int(row["more_bytes"]) for row in rows)


def test_rows_have_the_form_of_the_table_and_say_what_they_are_from(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--cudnn-table", str(recorded / "run.trace.npz"), "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["cudnn_workspaces"]
    assert all(list(row) == list(workspace_table()[0].fields) for row in rows)
    assert {(row["element_bytes"], row["layout"]) for row in rows} == {("4", "first"), ("2", "first"), ("2", "last")}
    (row,) = {(row["architecture_from"], row["architecture_below"], row["source"].split(";")[0]) for row in rows}
    assert row == ("80", "81", "virtual NVIDIA A100-SXM4-40GB")


def test_a_trace_without_convolutions_says_what_to_record(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trace,) = load_traces(recorded / "run.trace.npz")
    note = trace.info.pop("convolutions")
    save_traces(tmp_path / "none.trace.npz", [trace])
    assert main(["info", "--cudnn-table", str(tmp_path / "none.trace.npz")]) == 2
    assert "stalloc record --stacks" in capsys.readouterr().err
    note["work_spaces"][0]["bytes"] = "many"
    trace.info["convolutions"] = note
    save_traces(tmp_path / "bad.trace.npz", [trace])
    assert main(["info", "--cudnn-table", str(tmp_path / "bad.trace.npz")]) == 2
    assert "record it again" in capsys.readouterr().err
