"""Times of a program's steps under stalloc and under its library's default: two processes that take turns.

Contract: a step of one, then the same step of the other, on one processor and in changing order, so that what disturbs
the machine disturbs both. Single runs, one after the other, differ by a quarter from one to the next on a busy machine;
of four programs that took turns twice none differed by more than 2 %.
"""

import os
import queue
import statistics
import subprocess
import tempfile
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harm.catalogue import OWN, ROOT, Program
from harm.running import AMPLE_BYTES, LIMIT_SECONDS, Setting, command_of, last_line, variables_of


@dataclass(frozen=True)
class Turn:
    clock_ns: int  #: from the begin of its turn
    processor_ns: int  #: of all threads, from the end of the step before


class RunError(Exception):
    """A program failed that is to run through; the text says under which setting, and how."""


_processors: queue.SimpleQueue[int] = queue.SimpleQueue()
for _number in sorted(os.sched_getaffinity(0)):
    _processors.put(_number)


class _Player:
    """A program that stands still at the end of each step until it is its turn."""

    def __init__(
        self, program: Program, setting: Setting, memory_bytes: int, processor: int, open_until: ExitStack
    ) -> None:
        self._setting, folder = setting, open_until.enter_context(tempfile.TemporaryDirectory(prefix="stalloc-"))
        go, turn = os.pipe()
        ends, told = os.pipe()
        self._go = open_until.enter_context(os.fdopen(turn, "wb", buffering=0))
        self._ends = open_until.enter_context(os.fdopen(ends))
        self._said = Path(folder) / "said"
        options = ["--turns", str(go), str(told), "--processor", str(processor)]
        with self._said.open("w") as said:
            command = command_of(program, setting, memory_bytes, *options)
            variables = variables_of(program, setting, memory_bytes)
            files: Any = {"pass_fds": (go, told), "stdout": subprocess.DEVNULL, "stderr": said}
            self._process = subprocess.Popen(command, cwd=ROOT, env=variables, **files)
        os.close(go)
        os.close(told)
        limit = threading.Timer(LIMIT_SECONDS, self._process.kill)
        limit.start()
        for ending in (self._process.wait, self._process.kill, limit.cancel):
            open_until.callback(ending)

    def wait(self) -> Turn | None:
        """Wait for the end of a step; None: the program has come to its own."""
        line = self._ends.readline()
        return Turn(*map(int, line.split())) if line else None

    def take_turn(self) -> Turn | None:
        """Let it make a step; None: the program has come to its end."""
        with suppress(BrokenPipeError):  # it has come to a bad one between its turns
            self._go.write(b".")
        return self.wait()

    def finish(self) -> None:
        """Let it come to its end. Raises RunError if that is not a good one."""
        self._go.close()
        code = self._process.wait()
        if code:
            raise RunError(f"ends with {code} under {self._setting.value}: {last_line(self._said.read_text())}")


def processor_ratio(program: Program, num_runs: int, num_steps: int | None) -> float:
    """Processor time of a step under stalloc by that under the library's default; the median of so many runs.

    The later half of the steps counts, and in it all that a process does, whichever thread does it. Runs
    have `num_steps` steps where it is given and the program takes a number. Raises RunError if one of them fails.
    """
    if num_steps is not None and program.script.parent == OWN:
        program = replace(program, arguments=(*program.arguments, str(num_steps)))
    ratios = []
    for _ in range(num_runs):
        turns = take_turns(program)
        later = turns[len(turns) // 2 :]
        ratios.append(sum(ours.processor_ns for _, ours in later) / sum(theirs.processor_ns for theirs, _ in later))
    return statistics.median(ratios)


def take_turns(program: Program, memory_bytes: int = AMPLE_BYTES) -> list[tuple[Turn, Turn]]:
    """Each step but the first under the library's default and under stalloc, on a processor that no other pair uses.

    Raises RunError if one of them fails.
    """
    processor = _processors.get()
    try:
        with ExitStack() as open_until:
            settings = Setting.DEFAULT, Setting.STALLOC
            players = [_Player(program, one, memory_bytes, processor, open_until) for one in settings]
            turns = _of_all_steps(*players)
            for player in players:
                player.finish()
            return turns
    finally:
        _processors.put(processor)


def _of_all_steps(native: _Player, ours: _Player) -> list[tuple[Turn, Turn]]:
    order = [native, ours]
    for player in order:
        player.wait()  # for the end of the first step, which is nobody's turn
    turns: list[tuple[Turn, Turn]] = []
    while True:
        order.reverse()
        took = {player: player.take_turn() for player in order}
        theirs, mine = took[native], took[ours]
        if theirs is None or mine is None:
            return turns
        turns.append((theirs, mine))
