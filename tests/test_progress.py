"""Whatever takes longer than a second says on a terminal what it is at, in pipes too where it runs a program.

The input here arrives only once it has.
"""

import os
import pty
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from properties import variants
from warm_programs import run_stalloc

from stalloc.cli import main

CSV = "id,lower,upper,size\n" + "".join(f"{row},{row},{row + 2},512\n" for row in range(6))
PATIENCE = 120  # seconds until a verb counts as silent


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A trace and its plan."""
    csv, plan = tmp_path / "step.csv", tmp_path / "step.plan.npz"
    csv.write_text(CSV, encoding="utf-8")
    assert main(["plan", str(csv), "-o", str(plan)]) == 0
    return {"CSV": str(csv), "PLAN": str(plan), "OUT": str(tmp_path / "out.trace.npz")}


def heard(terminal: int, text: bytes) -> bytes:
    """What a terminal shows until `text` is in it, or nothing comes for too long."""
    shown = b""
    while text not in shown and select.select([terminal], [], [], PATIENCE)[0]:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # nobody writes to it any more
            break
    return shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stats -", "describing"),
        pytest.param("top -", "reading", marks=pytest.mark.slow),
        pytest.param("explain -", "explaining", marks=pytest.mark.slow),
        pytest.param("plan -", "planning", marks=pytest.mark.slow),
        pytest.param("simulate -", "reading", marks=pytest.mark.slow),
        pytest.param("validate PLAN -", "checking", marks=pytest.mark.slow),
        pytest.param("convert - OUT", "converting", marks=pytest.mark.slow),
        pytest.param("diff CSV -", "comparing", marks=pytest.mark.slow),
    ],
)
def test_a_verb_that_takes_long_says_what_it_is_at(files: dict[str, str], words: str, said: str) -> None:
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "stalloc", *(files.get(word, word) for word in words.split())]
    verb = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=its_end)
    os.close(its_end)
    shown = heard(terminal, said.encode())
    verb.communicate(CSV.encode(), timeout=PATIENCE)
    os.close(terminal)
    assert said.encode() in shown
    assert verb.returncode == 0


def test_no_color_means_no_escapes_here_either(files: dict[str, str]) -> None:
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "stalloc", "stats", "-"]
    environment = os.environ | {"NO_COLOR": "1"}
    verb = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=its_end, env=environment)
    shown = heard(terminal, b"describing")
    verb.communicate(CSV.encode(), timeout=PATIENCE)
    os.write(its_end, b"|")
    shown += heard(terminal, b"|")
    os.close(its_end)
    os.close(terminal)
    assert shown == b"describing 1 file\r\n|"


@variants("of", ["terminal", "pipe"])
def test_a_dry_run_says_under_which_allocator_the_program_runs(tmp_path: Path, cuda_torch: None, of: str) -> None:
    program = tmp_path / "waits.py"
    terminal, its_end = pty.openpty() if of == "terminal" else os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as gate:
        gate.settimeout(PATIENCE)
        waits = (
            f"with socket.create_connection(('127.0.0.1', {gate.getsockname()[1]})) as gate:\n        gate.recv(1)\n"
        )
        source = f"import contextlib, socket\nwith contextlib.suppress(OSError):\n    {waits}raise SystemExit(3)\n"
        program.write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "stalloc", "dryrun", str(program)]
        verb = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=its_end)
        os.close(its_end)
        shown = heard(terminal, b"running the program under")
        gate.accept()[0].close()
    verb.wait(PATIENCE)
    os.close(terminal)
    assert b"running the program under" in shown
    assert verb.returncode == 2


def test_pipes_hear_nothing_of_what_takes_seconds(files: dict[str, str]) -> None:
    for words in ("stats CSV", "plan CSV", "explain CSV"):
        done = run_stalloc(*(files.get(word, word) for word in words.split()))
        assert done.returncode == 0
        said = done.stderr
        assert "…" not in said
        assert "\x1b" not in said
