"""`stalloc live`: a program is watched while it runs, from beside it, through a small file."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.live_file import FILE_BYTES, LiveFile, read_live, running_programs

PATIENCE = 60  # seconds until nothing is expected to come any more

#: holds 96 MiB, says so, and goes on until its standard input ends
_HOLDS = """
import sys
{begin}
held = [{alloc} for _ in range(3)]
print("ready", flush=True)
sys.stdin.read()
"""
CUPY = _HOLDS.format(begin="import cupy as cp", alloc="cp.cuda.alloc(32 << 20)")
TORCH = _HOLDS.format(
    begin="from stalloc import device; device.activate('virtual')\nimport stalloc, torch; stalloc.watch()",
    alloc="torch.empty(32 << 20, dtype=torch.uint8, device='cuda')",
)


#: needs most before it is planned
PEAK = """
import sys
import cupy as cp, stalloc
first = cp.cuda.alloc(256 << 20)
del first
for _ in range(8):
    held = [cp.cuda.alloc((3 + 2 * i) << 20) for i in range(6)]
    del held
    stalloc.step()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of this test's own for the files of programs."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


@contextlib.contextmanager
def running(tmp_path: Path, source: str, *words: str, code: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A program that holds memory until the block ends, with this exit code."""
    program = tmp_path / "holds.py"
    program.write_text(source)
    command = [sys.executable, *words, str(program)]
    variables = {**os.environ, "STALLOC_CACHE": "off"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            pytest.fail(process.communicate(timeout=PATIENCE)[1])
        try:
            yield process
        finally:
            process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert process.pid not in running_programs()


UNDER_STALLOC = ("-m", "stalloc", "run", "--device", "virtual")


class Terminal:
    """A verb that runs on a terminal."""

    def __init__(self, *words: str) -> None:
        self.end, its_end = pty.openpty()
        command = [sys.executable, "-m", "stalloc", *words]
        self.process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True)
        os.close(its_end)
        self.shown = ""

    def wait_for(self, *texts: str) -> None:
        """Read until all of these were shown."""
        end = time.monotonic() + PATIENCE
        while not all(text in self.shown for text in texts) and time.monotonic() < end:
            assert select.select([self.end], [], [], PATIENCE)[0], self.shown
            try:
                self.shown += os.read(self.end, 4096).decode(errors="replace")
            except OSError:  # nobody writes any more
                break
        assert all(text in self.shown for text in texts), self.shown

    def code(self) -> int:
        """The exit code, once it has ended."""
        code = self.process.wait(timeout=PATIENCE)
        os.close(self.end)
        return code


@pytest.mark.usefixtures("cupy_installed")
def test_a_program_is_followed_until_it_ends(tmp_path: Path) -> None:
    with running(tmp_path, CUPY, *UNDER_STALLOC) as process:
        terminal = Terminal("live", str(process.pid))
        terminal.wait_for("holds.py", "allocated", "96.00 MiB", "reserved", "most is held by", "3 blocks of 32.00 MiB")
    terminal.wait_for("the program has ended")
    assert terminal.code() == 0


@pytest.mark.usefixtures("cupy_installed")
def test_ctrl_c_ends_the_look_or_the_program_and_not_both(tmp_path: Path) -> None:
    with running(tmp_path, CUPY, *UNDER_STALLOC, code=130) as process:
        terminal, other = Terminal("live"), Terminal("live")
        for one in (terminal, other):
            one.wait_for("96.00 MiB")
        os.killpg(terminal.process.pid, signal.SIGINT)
        assert terminal.code() == 0
        assert "Traceback" not in terminal.shown
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        other.wait_for("the program has ended")
    assert other.code() == 0
    assert "Traceback" not in other.shown


@pytest.mark.slow
@pytest.mark.usefixtures("cupy_installed")
def test_several_programs_have_to_be_chosen_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, CUPY, *UNDER_STALLOC) as one, running(tmp_path, CUPY, *UNDER_STALLOC) as other:
        assert main(["live"]) == 2
        said = capsys.readouterr().err
        assert all(f"{process.pid} holds.py" in said for process in (one, other))
        assert main(["live", str(other.pid), "--json", "-"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["pid"], told["devices"][0]["allocated_bytes"]) == (other.pid, 96 << 20)


@pytest.mark.slow
@pytest.mark.usefixtures("cupy_installed")
def test_peaks_are_those_of_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, PEAK, *UNDER_STALLOC) as process:
        phase = ""
        end = time.monotonic() + PATIENCE
        while phase != "running on the plan" and time.monotonic() < end:  # what it shows is half a second old
            assert main(["live", str(process.pid), "--json", "-"]) == 0
            device = json.loads(capsys.readouterr().out)["devices"][0:1]
            phase = device[0]["phase"] if device else ""
    assert phase == "running on the plan"
    assert device[0]["allocated_peak_bytes"] == 256 << 20
    assert device[0]["reserved_peak_bytes"] >= 256 << 20


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch")
def test_a_program_under_torchs_own_allocator_shows_itself_if_it_asks_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, TORCH) as process:
        terminal = Terminal("live")
        terminal.wait_for("PyTorch", "96.00 MiB")
        assert main(["live", str(process.pid), "--once"]) == 0
        shown = capsys.readouterr().out
        assert "virtual" not in shown  # what the program is told
        assert "\x1b" not in shown
    terminal.wait_for("the program has ended")
    assert terminal.code() == 0


def test_where_no_program_runs_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (((), "no program of yours"), (("1",), "process 1 shows no memory")):
        assert main(["live", *words]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "stalloc.watch()" in error
        assert error.count("\n") == 1


def test_files_of_programs_that_are_gone_are_removed(folder: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = folder / "stalloc" / f"{int(gone.stdout)}.live"
    own = LiveFile()
    left.write_bytes(own.path.read_bytes())
    assert running_programs() == [os.getpid()]
    assert not left.exists()
    own.remove()
    assert running_programs() == []


def test_what_is_written_is_read_and_what_is_too_long_is_not_shown() -> None:
    own = LiveFile()
    for number in range(3):
        own.write({"number": number})
        assert read_live(own.path) == {"number": number}
    own.write({"number": "x" * FILE_BYTES})
    assert read_live(own.path) == {"number": 2}
    own.remove()
    assert read_live(own.path) is None


HOSTILE: list[Any] = [
    {"devices": [1, {"device": "x", "allocated_bytes": [], "name": "\x1b[2J\nFORGED", "hit_rate": 7}]},
    {"devices": {"0": 1}, "holders": [["a"], 3, [0, "\x1b]8;;x\x07", 1 << 70, 2]], "command": ["\x1b[31m", "\n"]},
    {"devices": [{"device": 1e300, "step_ms": 3.0, "steps": 2, "total_bytes": -5, "allocated_bytes": 10}], "pid": []},
]


@pytest.mark.parametrize("figures", HOSTILE)
def test_what_strangers_wrote_does_no_harm(figures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    own = LiveFile()
    own.write(figures)
    assert main(["live", str(os.getpid()), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert not [line for line in shown.splitlines() if line.startswith("FORGED")]
    own.remove()


def test_another_kind_of_file_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = LiveFile()
    for damaged in (b"", b"stalloc", b"x" * 100):
        own.path.write_bytes(damaged)
        with pytest.raises(BadInputError, match="no file of a running program"):
            read_live(own.path)
        assert main(["live", str(os.getpid())]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    own.path.write_bytes(b"stalloc1" + (2).to_bytes(8, "little") + (1 << 60).to_bytes(8, "little") + b"{[[")
    assert read_live(own.path) is None
    own.remove()
