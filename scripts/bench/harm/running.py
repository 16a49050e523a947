"""A program in a process of its own, under one allocator, on virtual devices of a size.

Contract: nothing that the user's environment says about allocators reaches the program, and what it did comes back even
if it failed, with the exit code that the operating system saw.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from harm.catalogue import ROOT, Program

AMPLE_BYTES = 80 << 30
LIMIT_SECONDS = 300
_OBSERVE = Path(__file__).with_name("observe.py")
_OURS = ("STALLOC", "PYTORCH_", "CUPY_GPU_MEMORY")


class Setting(Enum):
    """Whose allocator: torch's two and stalloc, or CuPy's two and stalloc."""

    DEFAULT = "default"  #: torch's caching allocator as it is, CuPy's MemoryPool
    EXPANDABLE = "expandable"  #: torch's with expandable segments
    ASYNC = "async"  #: CuPy's MemoryAsyncPool
    STALLOC = "stalloc"


@dataclass(frozen=True)
class Outcome:
    """What one run was like; bytes are sums over the devices, as the virtual driver handed them out."""

    code: int  #: 124 if it had no end
    last_line: str  #: of what it said, if it failed
    seen: dict[str, Any]  #: what observe.py wrote; empty if it could not

    @property
    def is_complete(self) -> bool:
        return self.code == 0 and bool(self.seen)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [*self.seen["steps"], self.seen["end"]]

    @property
    def peak_bytes(self) -> int:
        return peak(self.steps, "held")

    @property
    def allocated_peak_bytes(self) -> int | None:
        """The most that the program had allocated; None for CuPy, which does not say."""
        return peak(self.steps, "allocated") if "allocated" in self.steps[-1] else None

    def least_capacity(self, name: str) -> int:
        """The peak of the device that had the highest one, as a capacity that all devices have."""
        devices = range(len(self.steps[-1]["held"]))
        return max(max(step[name][device] for step in self.steps if name in step) for device in devices)


def peak(steps: list[dict[str, Any]], name: str) -> int:
    """The highest sum over the devices' peaks; each device's is that of all the steps."""
    rows = [step[name] for step in steps if name in step]
    return sum(max(column) for column in zip(*rows, strict=True))


def run(program: Program, setting: Setting, memory_bytes: int = AMPLE_BYTES) -> Outcome:
    variables = variables_of(program, setting, memory_bytes)
    with tempfile.TemporaryDirectory(prefix="stalloc-") as folder:
        result = Path(folder) / "seen.json"
        done = within_limit(command_of(program, setting, memory_bytes, "--result", str(result)), variables)
        seen = json.loads(result.read_text(encoding="utf-8")) if result.exists() and done.returncode != 124 else {}
    return Outcome(done.returncode, last_line(done.stderr) if done.returncode else "", seen)


def within_limit(command: list[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command from the checkout's folder; one without an end gets the exit code 124."""
    options: Any = {"cwd": ROOT, "env": variables, "capture_output": True, "text": True, "timeout": LIMIT_SECONDS}
    try:
        return subprocess.run(command, **options, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no end within {LIMIT_SECONDS} s")


def last_line(said: str) -> str:
    """The last line of what a program said, cut short; "": it said nothing."""
    return (said.strip().splitlines() or [""])[-1][:200]


def command_of(program: Program, setting: Setting, memory_bytes: int, *options: str) -> list[str]:
    """The command line that runs a program under observe.py, with more options of that."""
    devices = ["--devices", str(program.num_devices)]
    if setting is not Setting.STALLOC:
        devices += ["--memory", str(memory_bytes)]
    if setting is Setting.ASYNC:
        devices.append("--cupy-async")
    return [sys.executable, "-P", str(_OBSERVE), *options, *devices, str(program.script), *program.arguments]


def variables_of(program: Program, setting: Setting, memory_bytes: int) -> dict[str, str]:
    """The environment of a program; for stalloc it is all that switches it on."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    if setting is Setting.STALLOC:
        devices = f"virtual:{program.num_devices}x{memory_bytes}"
        variables |= {"STALLOC": "1", "STALLOC_DEVICE": devices, "STALLOC_CACHE": "off"}
    if setting is Setting.EXPANDABLE:
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return variables
