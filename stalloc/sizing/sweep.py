"""Dry runs of many programs on any executor: processors of this machine, or workers of a cluster.

Contract: each run is `stalloc dryrun` in a process of its own, on the machine of the worker that has it; results are in
the order of the programs, and the same on every executor. A run that is lost with its worker, or whose process is
killed, is done again, and says so. A program that fails is not run again.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalloc.errors import BadInputError
from stalloc.printable import printable
from stalloc.sizing.side_by_side import side_by_side

_DONE = (0, 1)  # exit codes of a dry run that has an answer


@dataclass(frozen=True)
class Swept:
    program: tuple[str, ...]
    told: dict[str, Any] | None  #: what `stalloc dryrun --json` writes; None: there is no answer
    failure: str = ""  #: why there is none
    lost: tuple[str, ...] = ()  #: of each try that was lost with its worker or killed: how


class _KilledError(Exception):
    pass


def sweep(
    programs: Sequence[Sequence[str]], options: Sequence[str] = (), *, executor: Executor | None = None, tries: int = 3
) -> list[Swept]:
    """Ask `stalloc dryrun`, with `options`, of each program: a list of words, such as ["train.py", "--batch", "4"].

    `executor`: where to run; None: here, a process for each processor. Any will do, as `Client(...).get_executor()`
    of dask.distributed; its workers need stalloc, torch and the programs under the same names. A run is tried `tries`
    times at the most. Raises BadInputError for what cannot be asked.
    """
    if tries < 1:
        raise BadInputError(f"tries is {tries}: give a number from 1.")
    if "--json" in options:
        raise BadInputError("leave --json out of the options: the answers are returned.")
    found: dict[int, Swept] = {}
    lost: dict[int, list[str]] = {number: [] for number in range(len(programs))}
    running: dict[Future[tuple[dict[str, Any] | None, str]], int] = {}
    with contextlib.ExitStack() as stack:
        pool = executor if executor is not None else stack.enter_context(ThreadPoolExecutor(side_by_side(0)))
        stack.callback(lambda: [future.cancel() for future in running])
        waiting = list(range(len(programs)))
        while waiting or running:
            for number in waiting:
                future = pool.submit(_dryrun, list(programs[number]), list(options), len(lost[number]))
                running[future] = number
            waiting = []
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                told, failure = None, ""
                try:
                    told, failure = future.result()
                except Exception as error:  # of many kinds: whatever an executor says of a worker that is gone
                    lost[number].append(printable(f"{type(error).__name__}: {error}", 200))
                    if len(lost[number]) < tries:
                        waiting.append(number)
                        continue
                    failure = f"lost {tries} times: {lost[number][-1]}"
                found[number] = Swept(tuple(programs[number]), told, failure, tuple(lost[number]))
    return [found[number] for number in range(len(programs))]


def _dryrun(program: list[str], options: list[str], _: int) -> tuple[dict[str, Any] | None, str]:
    """What it tells, or why it tells nothing; on the worker. The last argument is the try: to Dask the same function of
    the same arguments is the same work, lost or not."""
    with tempfile.TemporaryDirectory(prefix="stalloc-sweep-") as folder:
        file = Path(folder) / "told.json"
        command = [sys.executable, "-P", "-m", "stalloc", "dryrun", "--json", str(file), *options, "--", *program]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode < 0:
            raise _KilledError(f"signal {-done.returncode} ended the run")
        if done.returncode in _DONE and file.exists():
            return json.loads(file.read_text(encoding="utf-8")), ""
        lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        return None, printable(next((line for line in reversed(lines) if line.startswith("stalloc:")), lines[-1]))
