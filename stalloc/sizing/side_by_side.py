"""Runs of a program side by side, each in a fork of this process.

Contract: this process is on the virtual GPU, has imported torch (where there is one) and has not used it; `warm` makes
it so. Results come in the order of the works, whichever ends first. A program that fails for another reason than memory
ends it all with a SetupError, after its output; one that would import the libraries otherwise with an
ImportedOtherwiseError.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stalloc import device
from stalloc.analysis.error_search import find_errors
from stalloc.device import VirtualGPU
from stalloc.errors import SetupError
from stalloc.forked_child import ForkedChild, first_ended
from stalloc.patient_threads import patient_threads
from stalloc.sandbox import ProgramFiles
from stalloc.sizing.run_work import HISTORY, RESULT, RanOut, RunWork, perform
from stalloc.trace import Trace

_LIBRARIES = ("torch", "cupy")
_WARM = (
    *("torch.utils.checkpoint", "torch._dynamo"),  # most training loops import it with their optimizer
    *("stalloc.runtime", "stalloc.planner", "stalloc.lifespans.repeating_schedule", "stalloc.analysis.holders"),
    *("stalloc.integrations.installing", "stalloc.integrations.native_history"),
)
_MOST_AT_ONCE = 8


class ImportedOtherwiseError(Exception):
    """The program sets `variables` before it imports a library that reads them as it is imported."""

    def __init__(self, variables: dict[str, str]) -> None:
        super().__init__(", ".join(sorted(variables)))
        self.variables = variables


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One run: the program's words, what it runs under, and how people call it ("batch=8, PyTorch")."""

    command: list[str]
    work: RunWork
    name: str


@dataclass(frozen=True, kw_only=True)
class RunSeen:
    completes: bool
    devices: list[dict[str, int]]  #: one entry for each device: `device`, `allocated_peak_bytes`, `reserved_peak_bytes`
    findings: dict[str, Any]  #: what it could not know, as in `device.virtual.findings`
    uses_torch: bool = True
    process: dict[str, Any] = field(default_factory=dict)
    """The memory that the process took beside its allocators, as `process_memory` tells it."""
    ran_out: RanOut | None = None
    server: dict[str, Any] | None = None
    """What `ServerWatch` saw, and as `output` all that was printed; None unless that was asked for."""
    sleep: dict[str, Any] | None = None  #: its phases under stalloc, as `SleepPhases` tells them, if it sleeps
    traces: list[Trace] = field(default_factory=list)
    """The trace of the whole program for each device; empty where its replay would not be exact."""


def warm(gpu: VirtualGPU, command: Sequence[str]) -> None:
    """Put this process on the virtual GPU and import what runs of the program need."""
    with patient_threads():
        device.activate("virtual", gpu)
        found = [name for name in _LIBRARIES if importlib.util.find_spec(name) is not None]
        if not found:
            raise SetupError("neither PyTorch nor CuPy is installed, so there is nothing to run: install one of them.")
        try:
            script = b"" if command[0] == "-m" else Path(command[0]).read_bytes()
        except OSError:
            script = b""
        # those that the script itself names; what another module imports all the same, each run imports
        found = [name for name in found if name.encode() in script] or found
        for name in (*found, *_WARM):
            if "torch" in found or not name.startswith("torch"):
                importlib.import_module(name)


def side_by_side(jobs: int) -> int:
    """How many runs at a time: `jobs`, or as many as there are processors."""
    return jobs or min(len(os.sched_getaffinity(0)), _MOST_AT_ONCE)


def run_all(
    asked: Sequence[Asked],
    program: Callable[[list[str]], int],
    jobs: int,
    told: Callable[[Asked, RunSeen], None],
    files: ProgramFiles,
) -> list[RunSeen]:
    """Make the runs, `jobs` at a time, each with its own view of the program's files; `told` is called after each."""
    seen: dict[int, RunSeen] = {}
    running: dict[ForkedChild, int] = {}

    def collect() -> None:
        """Wait for one, and read what all that have ended have written."""
        for child in first_ended(list(running)):
            number = running.pop(child)
            with child:
                child.end()
                seen[number] = _read(child, asked[number])
            files.note(child.files)
            told(asked[number], seen[number])

    def start(number: int, one: Asked) -> None:
        def work(folder: Path) -> None:
            perform(folder, lambda: program(list(one.command)), one.work)

        child = ForkedChild(work, {"STALLOC": "", "STALLOC_CACHE": "off", **one.work.variables}, files.sandbox())
        running[children.enter_context(child)] = number

    with contextlib.ExitStack() as children:
        for number, one in enumerate(asked):
            if len(running) >= jobs:
                collect()
            start(number, one)
        while running:
            collect()
    return [seen[number] for number in range(len(asked))]


def _read(child: ForkedChild, one: Asked) -> RunSeen:
    from stalloc.trace import load_traces

    file = child.folder / RESULT
    if child.overrun:
        raise SetupError(f"{child.overrun} ({one.name}).")
    if not file.exists():
        sys.stderr.write(child.output())
        raise SetupError(
            f"the program ({one.name}) ended with code {child.exit_code} before it could report: see its output above."
        )
    found = json.loads(file.read_text(encoding="utf-8"))
    if "imports_with" in found:
        raise ImportedOtherwiseError(found["imports_with"])
    server = found["server"]
    # an engine that measures what is free says itself that it is too little, before the device has to
    lacks_memory = found["out_of_memory"] or (server is not None and bool(find_errors(child.output())))
    if found["exit_code"] != 0 and not lacks_memory:
        sys.stderr.write(child.output())
        raise SetupError(
            f"the program failed with code {found['exit_code']} ({one.name}), not for lack of memory: see its output "
            "above."
        )
    told = found["ran_out"]
    return RunSeen(
        completes=found["exit_code"] == 0,
        devices=found["devices"],
        findings=found["findings"],
        uses_torch=found["uses_torch"],
        process=found["process"],
        sleep=found["sleep"],
        ran_out=RanOut(**{**told, "holders": [tuple(one) for one in told["holders"]]}) if told else None,
        server=server | {"output": child.output()} if server is not None else None,
        traces=load_traces(child.folder / HISTORY) if found["is_replayable"] else [],
    )
