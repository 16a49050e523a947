"""Processor time of a program under stalloc against that under its library's default: two processes that take turns.

Contract: a step of one, then the same step of the other, on one processor and in changing order, so that what disturbs
the machine disturbs both. The later half of the steps counts, and in it all that a process does, whichever thread does
it. Single runs, one after the other, differ by a quarter from one to the next on a busy machine; of four programs that
took turns twice none differed by more than 2 %.
"""

import os
import queue
import statistics
import subprocess
import tempfile
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from harm.catalogue import ROOT, Program
from harm.running import AMPLE_BYTES, LIMIT_SECONDS, Setting, command_of, last_line, variables_of


class RunError(Exception):
    """A program failed that is to run through; the text says under which setting, and how."""


_processors: queue.SimpleQueue[int] = queue.SimpleQueue()
for _number in sorted(os.sched_getaffinity(0)):
    _processors.put(_number)


class _Player:
    """A program that stands still at the end of each step until it is its turn."""

    def __init__(self, program: Program, setting: Setting, processor: int, open_until: ExitStack) -> None:
        self._setting, folder = setting, open_until.enter_context(tempfile.TemporaryDirectory(prefix="stalloc-"))
        go, turn = os.pipe()
        ends, told = os.pipe()
        self._go = open_until.enter_context(os.fdopen(turn, "wb", buffering=0))
        self._ends = open_until.enter_context(os.fdopen(ends))
        self._said = Path(folder) / "said"
        options = ["--turns", str(go), str(told), "--processor", str(processor)]
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                command_of(program, setting, AMPLE_BYTES, *options),
                cwd=ROOT,
                env=variables_of(program, setting, AMPLE_BYTES),
                pass_fds=(go, told),
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        os.close(go)
        os.close(told)
        limit = threading.Timer(LIMIT_SECONDS, self._process.kill)
        limit.start()
        for ending in (self._process.wait, self._process.kill, limit.cancel):
            open_until.callback(ending)
        self._worked_ns: list[int] = []  # of the whole process, at the end of each step

    def wait(self) -> bool:
        """Wait for the end of a step; False: the program has come to its own."""
        line = self._ends.readline()
        if line:
            self._worked_ns.append(int(line))
        return bool(line)

    def take_turn(self) -> bool:
        """Let it make a step; False: the program has come to its end."""
        with suppress(BrokenPipeError):  # it has come to a bad one between its turns
            self._go.write(b".")
        return self.wait()

    def finish(self) -> None:
        """Let it come to its end. Raises RunError if that is not a good one."""
        self._go.close()
        code = self._process.wait()
        if code:
            raise RunError(f"ends with {code} under {self._setting.value}: {last_line(self._said.read_text())}")

    @property
    def later_half_ns(self) -> int:
        """Processor time of the later half of the steps."""
        return self._worked_ns[-1] - self._worked_ns[(len(self._worked_ns) - 1) // 2]


def processor_ratio(program: Program, num_runs: int, num_steps: int | None) -> float:
    """Processor time of a step under stalloc by that under the library's default; the median of so many runs.

    Runs have `num_steps` steps where it is given and the program takes a number. Raises RunError if one of them fails.
    """
    if num_steps is not None and program.takes_steps:
        program = replace(program, arguments=(*program.arguments, str(num_steps)))
    processor = _processors.get()
    try:
        return statistics.median(_ratio(program, processor) for _ in range(num_runs))
    finally:
        _processors.put(processor)


def _ratio(program: Program, processor: int) -> float:
    with ExitStack() as open_until:
        theirs, ours = (_Player(program, one, processor, open_until) for one in (Setting.DEFAULT, Setting.STALLOC))
        order = [theirs, ours]
        going = all(player.wait() for player in order)
        while going:
            order.reverse()
            going = all(player.take_turn() for player in order)
        for player in order:
            player.finish()
        return ours.later_half_ns / theirs.later_half_ns
