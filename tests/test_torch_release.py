"""What another release of PyTorch recorded or planned is said to be of that one."""

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path

import pytest
from warm_programs import run_stalloc

from stalloc.cli import main
from stalloc.planner import load_plans, save_plans
from stalloc.trace import load_traces, save_traces

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROGRAM = """
import torch
for _ in range(8):
    a = torch.empty(1 << 20, device="cuda")
    b = torch.empty(1 << 21, device="cuda")
    del a, b
    import stalloc; stalloc.step()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    (folder / "program.py").write_text(_PROGRAM, encoding="utf-8")
    stalloc(folder, "record", "-o", "run.trace.npz", "program.py")
    stalloc(folder, "plan", "run.trace.npz", "-o", "run.plan.npz")
    return folder


def stalloc(folder: Path, verb: str, *arguments: str) -> str:
    options = ["--device", "virtual"] if verb in ("record", "run") else []
    done = run_stalloc(verb, *options, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_a_recording_and_its_plan_name_the_torch_they_are_of(recorded: Path) -> None:
    (trace,) = load_traces(recorded / "run.trace.npz")
    (plan,) = load_plans(recorded / "run.plan.npz")
    assert trace.info["torch"] == plan.provenance["torch"]
    assert trace.info["torch"].split("+")[0] == version("torch").split("+")[0]


@pytest.mark.slow
def test_a_plan_of_another_release_is_said_to_be_one(recorded: Path) -> None:
    (plan,) = load_plans(recorded / "run.plan.npz")
    other = dataclasses.replace(plan, provenance=plan.provenance | {"torch": "2.6.0+cu124"})
    save_plans(recorded / "other.plan.npz", [other])
    assert "of torch 2.6.0, not torch" in stalloc(recorded, "run", "--plan", "other.plan.npz", "program.py")
    assert "not torch" not in stalloc(recorded, "run", "--plan", "run.plan.npz", "program.py")


def test_recordings_of_two_releases_are_compared_with_a_note(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trace,) = load_traces(recorded / "run.trace.npz")
    save_traces(tmp_path / "a.trace.npz", [dataclasses.replace(trace, info=trace.info | {"torch": "2.6.0+cu124"})])
    save_traces(tmp_path / "b.trace.npz", [trace])
    assert main(["diff", str(tmp_path / "a.trace.npz"), str(tmp_path / "b.trace.npz"), "--json", "-"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "was recorded with torch 2.6.0, not torch" in note
    assert main(["diff", str(tmp_path / "b.trace.npz"), str(tmp_path / "b.trace.npz"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []
