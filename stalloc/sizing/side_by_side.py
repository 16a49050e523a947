"""Runs of a program side by side, each in a fork of this process.

Contract: this process is on the virtual GPU, has imported torch (where there is one) and has not used it; `warm` makes
it so. Results come in the order of the works, whichever ends first. A program that fails for another reason than memory
ends it all with a SetupError, after its output; one that would import the libraries otherwise with an
ImportedOtherwiseError. The child becomes the GPU that is asked for, runs the program under one allocator, and writes
`result.json` whenever the program ended by itself, whatever its exit code; `run.trace.npz` if a history was asked for
and the program used torch's allocator alone, from its first request to its last.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stalloc import device
from stalloc.analysis.error_search import find_errors
from stalloc.device import VirtualGPU, virtual
from stalloc.device.completion import Completion
from stalloc.device.cudnn import Workspaces
from stalloc.device.host_use import HostUse
from stalloc.device.known_gpus import takes_what_is_free
from stalloc.errors import SetupError, StallocError
from stalloc.files import write_whole
from stalloc.forked_child import ForkedChild, first_ended
from stalloc.imports import after_import
from stalloc.integrations.installation import installation
from stalloc.integrations.sleep_phases import SleepPhases
from stalloc.patient_threads import patient_threads
from stalloc.private import STARTED_ANEW
from stalloc.sandbox import ProgramFiles, end_as_python
from stalloc.sizing.fake_ranks import be_rank
from stalloc.sizing.imported_before import put_aside
from stalloc.sizing.native_peaks import native_peaks
from stalloc.trace import Trace
from stalloc.trace.sites import UNKNOWN, Frame, site_name

if TYPE_CHECKING:
    from stalloc.runtime import Runtime

_LIBRARIES = ("torch", "cupy")
_WARM = (
    *("torch.utils.checkpoint", "torch._dynamo"),  # most training loops import it with their optimizer
    *("stalloc.runtime", "stalloc.planner", "stalloc.lifespans.repeating_schedule", "stalloc.analysis.holders"),
    *("stalloc.integrations.installing", "stalloc.integrations.native_history"),
)
_MOST_AT_ONCE = 8
_HISTORY, _RESULT = "run.trace.npz", "result.json"
_MAX_EVENTS = 1 << 21  # of a history
_RECENT_EVENTS = 100_000  # of a run that is to run out of memory
_HOLDERS = 5
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class ImportedOtherwiseError(Exception):
    """The program sets `variables` before it imports a library that reads them as it is imported."""

    def __init__(self, variables: dict[str, str]) -> None:
        super().__init__(", ".join(sorted(variables)))
        self.variables = variables


@dataclass(frozen=True, kw_only=True)
class RunWork:
    gpu: VirtualGPU
    under: Literal["native", "stalloc"] = "native"
    at_first_use: bool = False  #: stalloc serves the program from its first use of CUDA on, as `stalloc run` does
    keep_history: bool = False
    name_holders: bool = False  #: note lines, so that an out-of-memory error can say who holds memory
    watch_server: bool = False  #: note what a server takes beside its requests, and how many tokens its cache holds
    is_rank: bool = False  #: whether the run is one of several ranks, as the variables say
    completion: Completion = "at-once"  #: when its work is done
    workspaces: Workspaces = "likely"  #: of cuDNN, where no GPU was seen to ask for one
    num_steps: int = 0  #: steps of an optimizer after which the run ends; 0: it goes to the program's end
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RanOut:
    """Where a program ran out of memory, and who held it."""

    wanted_bytes: int
    place: str  #: the line that asked for the memory
    allocated_bytes: int
    reserved_bytes: int
    holders: list[tuple[str, int]]  #: the lines that hold memory and the bytes of each, most first


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
    """The memory that the process took beside its allocators, once the program had ended."""
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
            _Run(folder, one.work).perform(lambda: program(list(one.command)))

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

    file = child.folder / _RESULT
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
        **{name: found[name] for name in ("devices", "findings", "uses_torch", "process", "sleep")},
        ran_out=RanOut(**{**told, "holders": [tuple(one) for one in told["holders"]]}) if told else None,
        server=server | {"output": child.output()} if server is not None else None,
        traces=load_traces(child.folder / _HISTORY) if found["is_replayable"] else [],
    )


class _Run:
    """What the child does."""

    def __init__(self, folder: Path, work: RunWork) -> None:
        self._folder, self._work = folder, work
        self._history: Any = None
        self._refused: dict[str, Any] | None = None  # the history as it was when memory ran out last
        self._refused_at = UNKNOWN  # the line that the main thread was at then
        self._num_steps = 0
        self._process = os.getpid()
        self._server: Any = None
        self._host: Any = None

    def perform(self, program: Callable[[], int]) -> None:
        work = self._work
        virtual.become(work.gpu)
        virtual.complete(work.completion)
        virtual.guess_workspaces(work.workspaces)
        put_aside(self._imports_otherwise)
        if work.is_rank:
            be_rank()
        installation.is_compared = work.under == "native"
        errors: list[StallocError] = []
        if work.under == "stalloc":
            from stalloc import integrations
            from stalloc.integrations.startup import start_at_first_use

            installation.sleep_phases = SleepPhases()
            if work.at_first_use:
                errors = start_at_first_use(
                    lambda torch, cupy: integrations.install(device="virtual", torch=torch, cupy=cupy)
                )
            else:
                integrations.install(device="virtual")
        if work.keep_history or work.name_holders:
            from stalloc.integrations.native_history import NativeHistory

            most = _MAX_EVENTS if work.keep_history else _RECENT_EVENTS
            self._history = NativeHistory(most, stacks=work.name_holders, out_of_memory=self._ran_out)
            self._history.begin()
        if work.watch_server:
            from stalloc.integrations.server_watch import ServerWatch

            self._server = ServerWatch()
            self._server.begin()
        if work.num_steps:
            after_import("torch", self._count_steps)
        self._host = virtual.host_use()
        self._host.begin(forked_from=os.getppid())
        code = program()
        if errors:
            raise errors[0]
        self._tell(code)
        end_as_python(0)

    def _imports_otherwise(self, variables: dict[str, str]) -> None:
        """End, unless the libraries have been imported anew with such variables, or a child of the program imports."""
        if os.getpid() == self._process and STARTED_ANEW not in os.environ:
            write_whole(self._folder / _RESULT, json.dumps({"imports_with": variables}))
            os._exit(0)

    def _count_steps(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self._num_steps += 1
        if self._num_steps >= self._work.num_steps:
            self._tell(0)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _ran_out(self) -> None:
        if self._work.name_holders:
            stack = traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0))
            named = (Frame(one.f_code.co_filename, line, one.f_code.co_name) for one, line in stack)
            self._refused = self._history.snapshot()
            self._refused_at = site_name([one for one in named if not one.filename.startswith(_OURS)])

    def _tell(self, code: int) -> None:
        from stalloc.integrations.installing import current
        from stalloc.integrations.sleep_and_wake import phases_told

        process = _process_told(self._host)
        runtime = current() if self._work.under == "stalloc" else None
        devices, refused = self._peaks(runtime)
        taken = max((device["reserved_peak_bytes"] for device in devices), default=0)
        more = {"taking_what_is_free": taken} if takes_what_is_free(self._work.gpu.total_bytes, taken) else {}
        more |= {"sleeps": True} if installation.was_to_sleep else {}
        sleep = phases_told(runtime, failed=code != 0)
        refused = refused or (sleep is not None and sleep["ran_out"] is not None)
        traces = self._history.traces("run", self._refused) if code != 0 and self._refused is not None else []
        ran_out = [made for trace in traces if (made := _ran_out(trace, self._refused_at)) is not None]
        told = {
            "exit_code": code,
            "out_of_memory": code != 0 and (refused or virtual.statistics()["out_of_memory"] > 0),
            "uses_torch": "torch" in sys.modules,
            "devices": devices,
            "findings": virtual.findings() | more,
            "process": process,
            "is_replayable": code == 0 and self._work.keep_history and self._keep_history(devices),
            "server": self._server.told(failed=code != 0) if self._server is not None else None,
            "ran_out": dataclasses.asdict(max(ran_out, key=lambda one: one.allocated_bytes)) if ran_out else None,
            "sleep": sleep,
        }
        write_whole(self._folder / _RESULT, json.dumps(told))

    def _peaks(self, runtime: "Runtime | None") -> tuple[list[dict[str, int]], bool]:
        if self._work.under == "native":
            return native_peaks(), False
        reports = runtime.reports() if runtime is not None else []
        names = ("allocated_peak_bytes", "reserved_peak_bytes")
        figures = [{"device": one.device, **{name: getattr(one, f"run_{name}") for name in names}} for one in reports]
        return figures, any(one.out_of_memory_errors for one in reports)

    def _keep_history(self, devices: list[dict[str, int]]) -> bool:
        """Whether the whole program is in the history, and all of it torch's."""
        from stalloc.trace import save_traces

        traces = self._history.traces("run")
        whole = all(trace.num_events < _MAX_EVENTS and not trace.num_baseline_requests for trace in traces)
        if not traces or not whole or any(device.get("cupy_bytes") for device in devices):
            return False
        save_traces(self._folder / _HISTORY, traces)
        return True


def _ran_out(trace: Trace, waiting_at: str) -> RanOut | None:
    """What the last out-of-memory error of a trace was about; None if there is none. Autograd's threads have no lines
    of their own: then it is the one at which the main thread was waiting."""
    from stalloc.analysis.holders import holders
    from stalloc.analysis.moments import last_oom

    if last_oom(trace) is None:
        return None
    found = holders(trace, "oom")
    return RanOut(
        wanted_bytes=found.wanted_bytes or 0,
        place=found.wanted_by if found.wanted_by != UNKNOWN else waiting_at,
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes or 0,
        holders=[(one.name, one.held_bytes) for one in found.by_site[:_HOLDERS]],
    )


def _process_told(use: HostUse) -> dict[str, Any]:
    """Memory of the host, communicators of NCCL, and what each device gave in all."""
    gpu = virtual.active_gpu()
    assert gpu is not None
    made = virtual.communicators()
    carriers = set(made.backends.values())  # of collectives of GPUs; NCCL's figures do not include buffers of others
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and hasattr(c10d, "ProcessGroup"):
        for config in c10d._world.pg_backend_config.values():  # "cpu:gloo,cuda:nccl"
            words = dict(word.split(":", 1) for word in str(config).split(",") if ":" in word)
            carriers.add(words.get("cuda", "nccl"))
    others = sorted(carriers - {"nccl", "undefined"})
    others += ["its own way between GPUs (CUDA IPC)"] if virtual.statistics()["shared_handles"] else []
    return {
        "host": use.told(),
        "communicators": [
            dataclasses.asdict(one) | {"ranks": made.ranks.get(one.group or "")}
            for one in made.seen()
            if made.backends.get(one.group or "", "nccl") == "nccl"  # a dry run has NCCL in the place of others
        ],
        "nccl_settings": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "driver_peak_bytes": [virtual.peak_bytes(device) for device in range(gpu.num_devices)],
        "outside_nccl": others,
    }
