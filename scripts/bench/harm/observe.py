"""One program in this process, looked at from outside its allocator: python observe.py OPTIONS PROGRAM ARGS.

Contract: bytes held are those that the virtual driver handed out (cudaMalloc, cuMemCreate), never an allocator's own
count. The peaks are those of each step, so that the parts of a run can be judged. With --turns times are told instead,
and nothing else is asked at the end of a step. Under STALLOC=1 stalloc's hook has chosen the device before this begins;
natively --memory and --devices choose it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalloc.cli.program import run_program
from stalloc.runtime.runtime_settings import Phase

FOLDER = Path(__file__).resolve().parents[1] / "harm_programs"


class Observer:
    def __init__(self, num_devices: int) -> None:
        self._devices = range(num_devices)
        self._rows: list[dict[str, Any]] = []
        self._before = 0, 0

    def __call__(self, kind: str) -> None:
        from stalloc.device import virtual

        held = [virtual.peak_bytes(device) for device in self._devices]
        for device in self._devices:
            virtual.restart_peak(device)
        row: dict[str, Any] = {"kind": kind, "held": held, "maps": virtual.statistics()["maps"]}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            statistics = [torch.cuda.memory_stats(device) for device in self._devices]
            requests = sum(entry.get("allocation.all.allocated", 0) for entry in statistics)
            num_bytes = sum(entry.get("requested_bytes.all.allocated", 0) for entry in statistics)
            row["allocated"] = [entry.get("allocated_bytes.all.peak", 0) for entry in statistics]
            row["kind"] = kind or f"{requests - self._before[0]} requests, {num_bytes - self._before[1]} bytes"
            self._before = requests, num_bytes
            for device in self._devices:
                torch.cuda.reset_peak_memory_stats(device)
        reports = _reports()
        row["hits"] = sum(report.run_hits for report in reports)
        row["misses"] = sum(report.run_misses for report in reports)
        phases = {report.phase for report in reports if report.plans_made or report.watched_steps}
        row["on_plan"] = phases == {Phase.PLANNED.value}
        row["planned"] = any(report.plan_peak_bytes is not None for report in reports)
        self._rows.append(row)

    def result(self, code: int) -> dict[str, Any]:
        from stalloc.device import virtual

        self("after the last step")
        return {
            "exit_code": code,
            "steps": self._rows[:-1],
            "end": self._rows[-1],
            "plans_made": sum(report.plans_made for report in _reports()),
            "gave_up": [report.note for report in _reports() if report.phase == Phase.RESTING.value],
            "statistics": virtual.statistics(),
        }


class Turns:
    """Tells at the end of each step what it took, by the clock and on the processor, and waits for its turn."""

    def __init__(self, go: int, told: int) -> None:
        self._go, self._told = go, told  # what is read and written, as the operating system numbers it
        self._are_taken = True
        self._began_ns, self._worked_ns = time.perf_counter_ns(), 0

    def __call__(self, kind: str) -> None:
        if self._are_taken:
            ended, worked = time.perf_counter_ns(), time.process_time_ns()
            os.write(self._told, b"%d %d\n" % (ended - self._began_ns, worked - self._worked_ns))
            self._are_taken = os.read(self._go, 1) != b""
            self._began_ns, self._worked_ns = time.perf_counter_ns(), worked


def _reports() -> list[Any]:
    from stalloc.errors import SetupError
    from stalloc.integrations import statistics

    try:
        return statistics()
    except SetupError:
        return []  # stalloc is not in this process


def _watch_optimizers(listener: Callable[[str], None]) -> None:
    """For programs that are not ours and say nothing: a step is over when an optimizer's is."""
    from stalloc.imports import after_import

    def register() -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: listener(""))

    after_import("torch", register)


def main() -> int:
    parser = argparse.ArgumentParser(prog="observe.py", allow_abbrev=False)
    parser.add_argument("--result", help="the file to write")
    parser.add_argument("--memory", type=int, help="run natively on devices of so many bytes")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--turns", type=int, nargs=2, metavar=("GO", "TOLD"), help="files that are open already")
    parser.add_argument("--processor", type=int, help="run on this one alone")
    parser.add_argument("--cupy-async", action="store_true", help="CuPy allocates by its MemoryAsyncPool")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    observer = Observer(args.devices)
    listener = Turns(*args.turns) if args.turns else observer
    if args.processor is not None:
        os.sched_setaffinity(0, {args.processor})
    if args.memory is not None:
        from stalloc import device

        gpu = device.VirtualGPU(name="of no harm", total_bytes=args.memory, num_devices=args.devices)
        device.activate("virtual", gpu)
    elif "stalloc.integrations.startup" not in sys.modules:
        sys.exit("stalloc's hook is not in this environment: python -m stalloc.integrations.hook puts it there.")
    if args.cupy_async:
        import cupy

        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    if Path(args.program[0]).resolve().parent == FOLDER:
        sys.path.insert(0, str(FOLDER))
        import steps  # type: ignore[import-not-found]

        steps.listeners.append(listener)
    else:
        _watch_optimizers(listener)
    code = run_program(args.program)
    if args.result:
        Path(args.result).write_text(json.dumps(observer.result(code)), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
