"""Forked children that run verbs on mutated files, each run with its time and memory, under the eyes of the parent.

Contract: whatever a run does (raise, die, hang, fill memory) it becomes one Outcome; the next run has a fresh child.
"""

import contextlib
import gc
import io
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PATIENCE_SECONDS, PATIENCE_ON_PROCESSOR = 30.0, 6.0
"""Of the parent with a run: by the clock, on a machine that may be busy with other work, and of processor time."""
ADDRESS_SPACE = 6 << 30
"""Bytes that a child may take beyond what it had, so that a bomb does not take the machine."""
FRESH_BYTES = 128 << 20
"""A child that grew by more is replaced, so that later runs are measured from where the first began."""
UNMADE = "while it prepares"
"""How the cause of an outcome ends if the child died before the run began."""
_VARIES = re.compile(r"/\S*|'[^']*'|[\d,.]+|(?<=: )\S+(?=: )")
_FORBIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


@dataclass(frozen=True)
class Outcome:
    code: int | None  #: the exit code; None if it had none
    failure: str = ""  #: "traceback", "signal", "hang", "output" or empty
    cause: str = ""  #: of a failure: the error and where it was raised, or the signal
    signature: str = ""  #: what it said, without numbers and names: a new one is worth keeping
    seconds: float = 0.0  #: of processor time
    grown_bytes: int = 0  #: the most that was resident, above what was before


Run = Callable[[], int]
"""Returns an exit code."""
Task = Callable[[], Run]
"""Makes what a run needs, which is not measured."""


def run_all(tasks: Sequence[Task], slots: int) -> Iterator[tuple[int, Outcome]]:
    """Run the tasks in `slots` children at a time, each of which takes what is left of its share; index and outcome."""
    shares = [list(range(len(tasks)))[slot::slots] for slot in range(slots)]
    children = [_Child(tasks, share) for share in shares if share]
    try:
        while children:
            ready, _, _ = select.select([child.pipe for child in children], [], [], 1.0)
            for child in list(children):
                if child.pipe in ready:
                    yield from child.read()
                yield from child.check()
                if child.is_done:
                    children.remove(child)
    finally:
        for child in children:
            child.kill()


class _Child:
    """A process that works through a share of the tasks, and the ones that follow it when it dies."""

    def __init__(self, tasks: Sequence[Task], share: list[int]) -> None:
        self._tasks, self._left = tasks, share
        self._running: int | None = None
        self._buffer = b""
        self._doing, self._began_at = "prepares", 0.0
        self.is_done = False
        self._start()

    def _start(self) -> None:
        self.pipe, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.pipe)
            _work(self._tasks, self._left, writing)
        os.close(writing)
        self._heard = time.monotonic()

    def read(self) -> Iterator[tuple[int, Outcome]]:
        data = os.read(self.pipe, 1 << 16)
        self._heard = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "prepares" in said or "begins" in said:
                self._running, self._doing = next((index, what) for what, index in said.items())
                self._began_at = _processor_seconds(self._pid)
            else:
                yield self._finish(Outcome(**said["outcome"]))
        if not data:
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
            if self._running is not None:
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                name = signal.Signals(number).name if number else f"exit code {os.WEXITSTATUS(status)}"
                yield self._finish(Outcome(None, "signal", f"{name} while it {self._doing}"))
            self._go_on()

    def check(self) -> Iterator[tuple[int, Outcome]]:
        if self.is_done or self._running is None or select.select([self.pipe], [], [], 0)[0]:
            return  # what it has said is still to be read: whoever takes outcomes may have been busy for long
        used = _processor_seconds(self._pid) - self._began_at
        if used > PATIENCE_ON_PROCESSOR or time.monotonic() - self._heard > PATIENCE_SECONDS:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            what = "works" if used > PATIENCE_ON_PROCESSOR else "waits"
            yield self._finish(Outcome(None, "hang", f"it {what} without end while it {self._doing}", "", used))
            self._go_on()

    def _finish(self, outcome: Outcome) -> tuple[int, Outcome]:
        index = self._running
        assert index is not None
        self._left = self._left[self._left.index(index) + 1 :]
        self._running = None
        return index, outcome

    def _go_on(self) -> None:
        """In a new process; what the old one had begun to say is gone."""
        os.close(self.pipe)
        self._buffer = b""
        self.is_done = not self._left
        if self._left:
            self._start()

    def kill(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _processor_seconds(pid: int) -> float:
    """What a process has used so far, 0 if it is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _work(tasks: Sequence[Task], share: list[int], writing: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_own("VmSize") + ADDRESS_SPACE, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 0
    try:
        with open(writing, "wb", buffering=0) as pipe:
            for index in share:
                pipe.write(json.dumps({"prepares": index}).encode() + b"\n")
                run = tasks[index]()
                pipe.write(json.dumps({"begins": index}).encode() + b"\n")
                outcome = observe(run)
                pipe.write(json.dumps({"outcome": asdict(outcome)}).encode() + b"\n")
                if outcome.grown_bytes > FRESH_BYTES:
                    break  # the parent goes on with a fresh one
    except BaseException:
        traceback.print_exc()
        code = 70
    os._exit(code)


def _own(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split(maxsplit=1)[0]) << 10


def observe(run: Run) -> Outcome:
    """What a run does, here, with its output kept from the terminal."""
    out, err = io.StringIO(), io.StringIO()
    before = _own("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from now on
    began = time.process_time()
    code: int | None = None
    failure, cause = "", ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run()
    except SystemExit as ending:
        failure, cause = "traceback", f"SystemExit({ending.code!r})"
    except BaseException as error:
        failure, cause = "traceback", cause_of(error)
    seconds = time.process_time() - began
    grown = max(_own("VmHWM") - before, 0)
    text = out.getvalue(), err.getvalue()
    if not failure:
        cause = _wrong_output(code, *text)
        failure = "output" if cause else ""
    signature = f"{code} {_VARIES.sub('#', text[code == 2])[:600]}"
    return Outcome(code, failure, cause, signature, seconds, grown)


def cause_of(error: BaseException) -> str:
    """The error and the innermost line of stalloc that it came through."""
    frames: list[Any] = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/stalloc/" in frame.filename] or frames
    place = f"{ours[-1].filename.rpartition('/stalloc/')[2]}:{ours[-1].lineno}" if ours else "nowhere"
    return f"{type(error).__name__} at {place}"


def _wrong_output(code: int | None, out: str, err: str) -> str:
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if any(unicodedata.category(char) in _FORBIDDEN for char in out + err if char != "\n"):
        return "control characters on the terminal"
    if code == 2 and (out or not err.startswith("stalloc: ") or err.count("\n") != 1):
        return "bad input is not one sentence"
    return ""
