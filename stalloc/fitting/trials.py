"""Trials: a program is run on the virtual GPU for a few steps, in a child of this process, and measured.

Contract: the child is forked from a process that has imported torch on the virtual GPU and not used it, so a trial
costs what the program itself costs. It sees STALLOC_TRIAL=1 and an empty standard input, and what it prints is kept
away; it ends in the middle of the program after its last step, without what the program does at its end, and it is
killed, with all that it has started, when its time is over. Whatever becomes of it, this process gets a Measured or a
reason.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stalloc.errors import SetupError
from stalloc.fitting.trial_work import TrialWork, measure
from stalloc.forked_child import ForkedChild, first_ended
from stalloc.sandbox import ProgramFiles

STEPS = 3  #: of a trial
TRIAL_VARIABLE = "STALLOC_TRIAL"


@dataclass(frozen=True)
class Measured:
    """What one trial gave."""

    failure: str = ""  #: why the trial gave nothing else; empty if it did
    refused_block: str = ""  #: a block that cannot be computed twice, where that is the failure
    out_of_memory: bool = False
    allocated_bytes: int = 0  #: the allocated peak of all steps
    reserved_bytes: int = 0  #: the reserved peak of the allocator that the trial ran under
    native_bytes: int = 0  #: what PyTorch's allocator would have reserved, replayed, of a recorded trial
    num_shortages: int = 0  #: errors that the program caught, and plans given up, of a trial on a plan
    steps: list[tuple[int, int]] = field(default_factory=list)  #: allocated and reserved peak of each step
    requests: list[tuple[int, int]] = field(default_factory=list)
    """For each step, how many requests the device had had at its end, and the bytes that were requested at its peak."""
    is_whole: bool = False  #: the program ended by itself
    has_rest: bool = False  #: the last of `steps` is what came after the last step
    host_bytes: int = 0  #: of host memory that tiers took, at the most
    disk_bytes: int = 0  #: of files that tiers took, at the most
    num_paged: int = 0  #: optimizers whose state is paged
    paged_bytes: int = 0  #: of state that comes and goes in each step
    disk_state_bytes: int = 0  #: of that state, in files
    processor_bytes: int = 0  #: of parameters that the processor updates
    processor_streamed_bytes: int = 0  #: of those parameters, in streamed layers
    streamed_bytes: int = 0  #: of parameters of streamed layers
    disk_streamed_bytes: int = 0  #: of parameters of streamed layers, in files
    offloaded_bytes: int = 0  #: of all saved activations that went to the host
    notes: list[str] = field(default_factory=list)  #: what could not be applied
    seen: dict[str, Any] = field(default_factory=dict)  #: what an observing trial has seen
    imports: list[Any] = field(default_factory=list)  #: what the program imports first, for `import_ahead`
    asked: str = ""  #: a digest of what the first steps asked for, of a recorded trial
    plan: bytes = b""  #: a plan file, of a trial that makes one
    seconds: float = 0.0  #: that the trial took


def check_can_fork() -> None:
    """Raise SetupError unless this process can be forked for trials."""
    torch = sys.modules.get("torch")
    from stalloc import device

    if device.active() != "virtual" or (torch is not None and torch.cuda.is_initialized()):
        raise SetupError("trials need a process on the virtual GPU that has not used it: run `stalloc fit` in a shell.")


def run_trial(program: Callable[[], int], work: TrialWork, limit_seconds: float, files: ProgramFiles) -> Measured:
    """Run a program, a function that gives its exit code, in a child for a trial, with its own view of its files."""
    begun = time.monotonic()
    variables = {TRIAL_VARIABLE: "1", "STALLOC": "", "STALLOC_CACHE": "off"}
    with ForkedChild(lambda folder: measure(folder, program, work), variables, files.sandbox()) as child:
        in_time = _ends_in_time(child, limit_seconds)
        child.end()
        measured = _result(child, in_time, limit_seconds)
    files.note(child.files)
    return Measured(**{**measured, "seconds": time.monotonic() - begun})


def _ends_in_time(child: ForkedChild, limit_seconds: float) -> bool:
    """Whether a trial ends within the limit, or within ten times that if other processes keep the processors busy."""
    begun = time.monotonic()
    while (left := limit_seconds + min(child.starved_seconds(), 9 * limit_seconds) - (time.monotonic() - begun)) > 0:
        if first_ended([child], left):
            return True
    return False


def _result(child: ForkedChild, in_time: bool, limit_seconds: float) -> dict[str, Any]:
    text, result = child.output(), child.folder / "result.json"
    if not result.exists():
        if child.overrun:
            return {"failure": child.overrun}
        if not in_time:
            return {"failure": f"its steps took more than {limit_seconds:g} s, the limit of --trial-seconds"}
        needed = re.findall(r"GradientError: (.*)", text)
        if needed:
            return {"failure": needed[-1]}
        refused = re.findall(r"RecomputeError: ((\S+?):? .*)", text)
        if refused:
            return {"failure": refused[-1][0], "refused_block": refused[-1][1]}
        memory = re.findall(r"OutOfMemoryError: (.*)", text)
        if memory:
            return {"failure": memory[-1], "out_of_memory": True}
        lines = [line for line in text.splitlines() if line.strip()]
        return {"failure": f"the program failed in a trial ({lines[-1] if lines else 'it said nothing'})"}
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    found["steps"] = [tuple(step) for step in found["steps"]]
    plan = child.folder / "plan.npz"
    return {**found, "plan": plan.read_bytes() if plan.exists() else b""}
