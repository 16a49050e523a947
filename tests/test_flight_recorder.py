"""The flight recorder: a file when a program dies or is asked, natively, under stalloc, with CuPy; and nothing else."""

import json
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_programs import run_stalloc, run_warm

pytestmark = pytest.mark.usefixtures("cuda_torch")

BEGIN = """
import os, signal, sys
from stalloc import device
device.activate("virtual", device.find_gpu("RTX-4090"))
import stalloc
INSTALL
stalloc.flight_recorder("flight", **OPTIONS)
import torch

def grow(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

held = [grow(100) for _ in range(5)]
"""


@pytest.fixture
def died(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program that has begun the recorder and holds 500 MiB; checks its exit code."""

    def run(ending: str, code: int, *, install: str = "", **options: object) -> subprocess.CompletedProcess[str]:
        source = BEGIN.replace("INSTALL", install).replace("OPTIONS", repr(options)) + ending
        kept = {name: value for name, value in os.environ.items() if name not in ("STALLOC", "RANK", "SLURM_PROCID")}
        done = run_warm(source, folder=tmp_path, variables=kept | {"STALLOC_CACHE": "off"})
        assert done.returncode == code, done.stderr
        return done

    return run


def explained(folder: Path) -> dict[str, object]:
    """What `stalloc explain` says of the only file of the recorder."""
    (file,) = (folder / "flight").iterdir()
    done = run_stalloc("explain", "--json", "-", file)
    assert done.returncode == 0, done.stderr
    (device,) = json.loads(done.stdout)["devices"]
    return device


ENDINGS = {
    "term": ("os.kill(os.getpid(), signal.SIGTERM)\nwhile True: signal.pause()", -signal.SIGTERM, "SIGTERM arrived"),
    "usr1": ("signal.raise_signal(signal.SIGUSR1)", 0, "SIGUSR1 arrived"),
    "exit": ("sys.exit(3)", 3, "the program ended with a failure"),
    "error": ("raise ValueError('x')", 1, "the program failed (ValueError)"),
    "oom": ("grow(100_000)", 1, "out of memory"),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_file_is_written_that_explain_reads(
    died: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, how: str
) -> None:
    ending, code, why = ENDINGS[how]
    said = died(ending, code).stderr
    assert f"stalloc: {why}: wrote the last events" in said
    assert said.count("wrote the last events") == 1
    assert "500.00 MiB  <string>:11 grow" in said
    (file,) = (tmp_path / "flight").iterdir()
    assert f"next: stalloc explain flight/{file.name}" in said
    made = explained(tmp_path)
    assert made["allocated_bytes"] == 500 << 20
    wanted = ("capacity", 100_000 << 20) if how == "oom" else (None, None)
    assert (made.get("verdict"), made.get("wanted_bytes")) == wanted


def test_a_program_that_ends_well_writes_nothing(
    died: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert died("sys.exit(0)", 0).stderr == ""
    assert list((tmp_path / "flight").iterdir()) == []


@pytest.mark.usefixtures("cupy_installed")
@pytest.mark.parametrize(("how", "stacks"), [("term", True), ("oom", False)])
def test_under_stalloc_it_is_the_same(
    died: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, how: str, stacks: bool
) -> None:
    ending, code, _ = ENDINGS[how]
    said = died(ending, code, install="stalloc.install(device='virtual')", stacks=stacks).stderr
    assert ("500.00 MiB  <string>:11 grow" if stacks else "500.00 MiB  unknown") in said
    made = explained(tmp_path)
    assert made["allocated_bytes"] == 500 << 20
    wanted = ("capacity", 100_000 << 20) if how == "oom" else (None, None)
    assert (made.get("verdict"), made.get("wanted_bytes")) == wanted


def test_handlers_that_were_there_are_called_afterwards(
    died: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    install = """
def handler(number, frame):
    print("handled", number, len(os.listdir("flight")))
    if number == signal.SIGTERM: sys.exit(7)
for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, handler)
"""
    ending = "signal.raise_signal(signal.SIGUSR1)\nsignal.raise_signal(signal.SIGTERM)"
    done = died(ending, 7, install=install)
    assert done.stdout.splitlines() == [f"handled {signal.SIGUSR1:d} 1", f"handled {signal.SIGTERM:d} 1"]


@pytest.mark.usefixtures("cupy_installed")
@pytest.mark.parametrize("install", ["", "stalloc.install(device='virtual')"])
def test_only_the_last_events_are_kept(
    died: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, install: str
) -> None:
    mark = "; stalloc.step()" if install else ""  # which are planned, and the first of which are gone in the end
    died(f"for step in range(500): last = grow(1 + step % 2){mark}\nsys.exit(3)", 3, install=install, max_events=120)
    assert explained(tmp_path)["allocated_bytes"] == 503 << 20  # at the peak: the last two and what is held
    (file,) = (tmp_path / "flight").iterdir()
    (history,) = pickle.loads(file.read_bytes())["device_traces"]
    assert len(history) == 120
    sizes = [event["size"] >> 20 for event in history if event["action"] == "alloc"]
    assert sizes == [1 + step % 2 for step in range(500)][-len(sizes) :]
    assert len(sizes) >= 40
    times = [event["time_us"] for event in history]
    assert times == sorted(times)


@pytest.mark.usefixtures("cupy_installed")
def test_requests_of_cupy_are_recorded(died: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    ending = "import cupy\na = cupy.empty(50 << 20, cupy.uint8)\ncupy.empty(1 << 40, cupy.uint8)"
    said = died(ending, 1).stderr
    assert "stalloc: out of memory: wrote the last events" in said
    assert "50.00 MiB  <string>:15 <module>" in said
    made = explained(tmp_path)
    assert (made["allocated_bytes"], made["wanted_bytes"]) == (550 << 20, 1 << 40)


def test_what_goes_wrong_is_a_sentence_and_the_program_goes_on(
    died: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "flight").write_text("no folder")
    done = died("print('goes on')", 0)
    assert done.stdout == "goes on\n"
    assert "stalloc: the flight recorder could not begin: FileExistsError" in done.stderr


def test_a_child_of_fork_writes_nothing_and_ends(
    died: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    ending = """
ready, begun = os.pipe()
child = os.fork()
if not child:
    os.write(begun, b"!")  # a signal that comes before is lost to Python
    while True: pass
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.listdir("flight"))
"""
    assert died(ending, 0).stdout == f"{-signal.SIGTERM} []\n"


def test_it_is_switched_on_by_a_variable(tmp_path: Path) -> None:
    program = (
        "from stalloc.integrations.startup import arm; arm()\nimport sys, torch\n"
        "x = torch.empty(7 << 20, dtype=torch.uint8, device='cuda')\nsys.exit(3)"
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith("STALLOC_")} | {
        "STALLOC": "1",
        "STALLOC_DEVICE": "virtual",
        "STALLOC_CACHE": "off",
        "STALLOC_RECORD": "flight",
        "RANK": "3",
    }
    done = run_warm(program, folder=tmp_path, variables=variables)
    assert done.returncode == 3, done.stderr
    assert "7.00 MiB  <string>:3 <module>" in done.stderr
    assert [file.name for file in (tmp_path / "flight").iterdir()] == ["rank3.pickle"]
