"""Trials: a program is run on the virtual GPU for a few steps, in a child of this process, and measured.

Contract: the child is forked from a process that has imported torch on the virtual GPU and not used it, so a trial
costs what the program itself costs. It sees STALLOC_TRIAL=1 and an empty standard input, and what it prints is kept
away; it ends in the middle of the program after its last step, without what the program does at its end, and it is
killed, with all that it has started, when its time is over. Whatever becomes of it, this process gets a Measured or a
reason. A step ends where the optimizer that made the first step ends its own; peaks are those of torch's statistics,
reset at every step.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from stalloc.allocator_conf import conf_in_force, conf_text
from stalloc.errors import BadInputError, SetupError
from stalloc.files import write_whole
from stalloc.forked_child import ForkedChild, first_ended
from stalloc.sandbox import ProgramFiles
from stalloc.techniques.technique_settings import TechniqueSettings

STEPS = 3  #: of a trial
TRIAL_VARIABLE = "STALLOC_TRIAL"
COMPARED_STEPS = 3  #: whose requests say whether a program asks for what another did


@dataclass(frozen=True)
class TrialWork:
    under: Literal["native", "observed", "timed", "recorded", "planned"]
    """Under torch's allocator, plainly, observing blocks, or noting when activations are saved and needed; under
    stalloc, to make a plan; on that plan."""
    settings: TechniqueSettings = field(default_factory=TechniqueSettings)
    num_steps: int = 3
    most_requests: int = 0  #: the trial ends with the first step after so many requests; 0: after num_steps
    most_processor_seconds: float = 0.0  #: or after so many seconds of the process's own processor time
    gpu_name: str = ""
    plan: bytes = b""  #: of a planned trial
    limit_bytes: int = 0  #: the most that is taken from the device; 0: no limit
    watched: dict[tuple[int, str], int] | None = None  #: rows of blocks whose operations are noted in a recorded trial


@dataclass(frozen=True)
class Measured:
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
    with ForkedChild(lambda folder: _measure(folder, program, work), variables, files.sandbox()) as child:
        in_time = _ends_in_time(child, limit_seconds)
        child.end()
        result, plan = child.folder / "result.json", child.folder / "plan.npz"
        measured: dict[str, Any] = {}
        if result.exists():
            measured = json.loads(result.read_text(encoding="utf-8"))
            measured["steps"] = [tuple(step) for step in measured["steps"]]
            measured["plan"] = plan.read_bytes() if plan.exists() else b""
        elif child.overrun or not in_time:
            late = f"its steps took more than {limit_seconds:g} s, the limit of --trial-seconds"
            measured["failure"] = child.overrun or late
        else:
            measured = _failure(child.output())
    files.note(child.files)
    return Measured(**{**measured, "seconds": time.monotonic() - begun})


def _ends_in_time(child: ForkedChild, limit_seconds: float) -> bool:
    """Whether a trial ends within the limit, or within ten times that if other processes keep the processors busy."""
    begun = time.monotonic()
    while (left := limit_seconds + min(child.starved_seconds(), 9 * limit_seconds) - (time.monotonic() - begun)) > 0:
        if first_ended([child], left):
            return True
    return False


def _failure(output: str) -> dict[str, Any]:
    if needed := re.findall(r"GradientError: (.*)", output):
        return {"failure": needed[-1]}
    if refused := re.findall(r"RecomputeError: ((\S+?):? .*)", output):
        return {"failure": refused[-1][0], "refused_block": refused[-1][1]}
    if memory := re.findall(r"OutOfMemoryError: (.*)", output):
        return {"failure": memory[-1], "out_of_memory": True}
    said = [line for line in output.splitlines() if line.strip()] or ["it said nothing"]
    return {"failure": f"the program failed in a trial ({said[-1]})"}


def _measure(folder: Path, program: Callable[[], int], work: TrialWork) -> None:
    """Run the program and write `result.json`, with a plan `plan.npz`; this process ends with the last step."""
    trial = _Trial(folder, work)
    code = program()
    if code != 0:
        sys.stdout.flush()
        raise SystemExit(code)
    trial.end()


class _Trial:
    """To be made before the program begins, when torch is imported, and nothing has used the device."""

    def __init__(self, folder: Path, work: TrialWork) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from stalloc.cost.gpu_rates import rates_of
        from stalloc.fitting.imports_ahead import ImportWatch
        from stalloc.fitting.observer import Observer, UpdateWatch

        self._folder, self._work = folder, work
        self._steps: list[tuple[int, int]] = []
        self._asked_events = 0  # of a recorded trial, up to the end of the first steps
        self._requests: list[tuple[int, int]] = []  # until the end of each step, and bytes asked for at its peak
        self._begun = time.process_time()
        self._notes: list[str] = []
        self._first: Any = None  # the optimizer whose steps count
        self._observer: Any = None  # of the program as it is, or of when activations are saved
        self._watched: Any = None
        self._updates: Any = None
        self._activations: Any = None
        self._in_host: Any = None
        self._imports: Any = None  # that the program makes first
        self._runtime: Any = _install(work) if work.under in ("recorded", "planned") else None
        if work.under == "observed":
            self._observer = Observer(rates_of(work.gpu_name))
            self._imports = ImportWatch()
        elif work.settings != TechniqueSettings() or work.under == "timed":
            self._apply()
        if work.watched is not None and not work.settings.step_in_backward:
            self._updates = UpdateWatch(self._clock)
        register_optimizer_step_post_hook(self._stepped)

    def _apply(self) -> None:
        from stalloc.cost.gpu_rates import rates_of
        from stalloc.fitting.observer import ActivationWatch, RunWatch, TimedStep
        from stalloc.techniques.applying import apply_settings
        from stalloc.techniques.block_tape import BlockTape

        work = self._work
        if work.watched is not None:
            self._watched = RunWatch(self._clock)
        if work.under == "timed":
            self._observer = TimedStep(rates_of(work.gpu_name))
            self._activations = self._observer.watch
        elif work.watched is not None and work.settings.activations:
            self._activations = ActivationWatch(self._clock)
        make_tape = (lambda _: BlockTape) if self._watched is None else self._watched.of_model
        self._in_host = apply_settings(work.settings, self._notes.append, make_tape, self._activations)

    def _clock(self) -> int:
        return int(self._runtime.controllers[0].state.record.log.num_events)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        import torch

        if self._first is None:
            self._first = optimizer
            if self._imports is not None:
                self._imports.end()
        if optimizer is not self._first or not torch.cuda.is_initialized():
            return
        self._note()
        if self._runtime is not None and len(self._steps) == COMPARED_STEPS:
            self._asked_events = self._clock()
        if self._observer is not None:
            self._observer.step_ended()
        else:
            torch.cuda.reset_peak_memory_stats()
        if len(self._steps) == 1:
            self._begun = time.process_time()  # what comes before, and code that is compiled in it, does not count
        work, spent = self._work, time.process_time() - self._begun
        is_long = 0 < work.most_requests < self._requests[-1][0] or 0 < work.most_processor_seconds < spent
        if is_long or len(self._steps) >= work.num_steps:
            self.end(is_whole=False)

    def _note(self) -> None:
        import torch

        found = torch.cuda.memory_stats()
        self._steps.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        self._requests.append((found.get("allocation.all.allocated", 0), found.get("requested_bytes.all.peak", 0)))

    def end(self, *, is_whole: bool = True) -> None:
        """Write what was measured; the process is over. `is_whole`: the program has ended by itself."""
        import torch

        has_rest = False
        if is_whole and torch.cuda.is_initialized() and len(self._steps) < self._work.num_steps:
            self._note()  # what came after the last step, if anything did
            has_rest = self._requests[-1][0] != (self._requests[-2][0] if len(self._requests) > 1 else 0)
            if not has_rest:
                del self._steps[-1], self._requests[-1]
        told: dict[str, Any] = {
            "steps": self._steps,
            "requests": self._requests,
            "is_whole": is_whole,
            "has_rest": has_rest,
            "allocated_bytes": max((allocated for allocated, _ in self._steps), default=0),
            "reserved_bytes": max((reserved for _, reserved in self._steps), default=0),
            "notes": self._notes,
        }
        if self._work.under == "planned":  # whatever the program does to torch's statistics
            reports = self._runtime.reports()
            told["reserved_bytes"] = max((one.run_reserved_peak_bytes for one in reports), default=0)
            dropped = sum(one.plans_dropped for one in reports) if self._work.plan else 0
            told["num_shortages"] = dropped + sum(one.out_of_memory_errors for one in reports)
        if self._in_host is not None:
            told |= self._in_host.told()
        if self._observer is not None:
            told["seen"] = self._observer.seen()
        if self._imports is not None:
            told["imports"] = self._imports.groups
        if self._work.watched is not None:
            from stalloc.fitting.observer import RunWatch

            trace = self._runtime.controllers[0].recording.trace()
            watch = self._watched or RunWatch(lambda: 0)
            told["seen"] = watch.seen(trace, self._work.watched, self._updates, self._activations).as_json()
        if self._work.under == "recorded":
            if self._asked_events:  # tiny requests are left out
                size, stream, _ = self._runtime.controllers[0].state.recorded_requests(0, self._asked_events)
                told["asked"] = sha256(size.tobytes() + stream.tobytes()).hexdigest()
            told["native_bytes"] = _native_bytes(self._runtime)
            if plan := _plan_of(self._runtime):
                write_whole(self._folder / "plan.npz", plan)
        write_whole(self._folder / "result.json", json.dumps(told))
        sys.stdout.flush()
        os._exit(0)


def _install(work: TrialWork) -> Any:
    """Install stalloc in this process, only to record, or on a plan within a limit."""
    from stalloc import integrations
    from stalloc.planner import plans_from_bytes

    if work.under == "recorded":
        return integrations.install(device="virtual", settings=integrations.Settings(plan=False, keep_recording=True))
    plans = plans_from_bytes(work.plan, "the plan of the trial") if work.plan else None
    runtime = integrations.install(device="virtual", known_plans=plans)
    if work.limit_bytes:
        for controller in runtime.controllers:
            controller.hold_to_budget(work.limit_bytes)
    return runtime


def _native_bytes(runtime: Any) -> int:
    """What PyTorch's allocator, as the user has set it, would have reserved for what was recorded; 0 if unknown."""
    from stalloc.integrations.memory_figures import served_controllers
    from stalloc.replay.simulation import Candidate, simulate

    conf = conf_in_force()[1]
    conf.pop("backend", None)
    allocator = Candidate("torch", conf_text(conf))
    try:
        devices = [simulate(one.recording.trace(), [allocator])[0] for one in served_controllers(runtime)]
    except BadInputError:
        return 0
    return max((one.peak_reserved_bytes for one in devices), default=0)


def _plan_of(runtime: Any) -> bytes:
    """The plan file of what was recorded; empty if its steps do not repeat."""
    from stalloc.integrations.memory_figures import served_controllers
    from stalloc.planner import plan, plans_to_bytes, validate

    plans = [plan(controller.recording.regular_trace()) for controller in served_controllers(runtime)]
    made = [one for one in plans if one.kind == "program" and validate(one).ok]
    return plans_to_bytes(made) if made else b""
