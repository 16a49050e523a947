"""Plans kept from one run of a program to the next, so that the next starts planned from its first allocation.

Contract: a plan is found again only for the same script (place and content), arguments, devices, rank and versions; it
is put in force under the runtime's usual guards, so a stale one costs memory for a while, never correctness, and is
removed. Files are replaced whole, so processes may run at once; a damaged file costs one sentence. The folder keeps the
newest plans up to a total size. A plan decides where memory lies, so the folder is a private one (see
stalloc/private.py); in any other nothing is read, written or removed.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stalloc
from stalloc.errors import BadInputError, SetupError
from stalloc.files import write_whole
from stalloc.integrations import program_source
from stalloc.integrations.memory_figures import served_controllers
from stalloc.notices import say
from stalloc.private import private_folder, read_private, user_cache

if TYPE_CHECKING:
    from stalloc.planner import Plan
    from stalloc.runtime import Runtime

_OFF = ("off", "0", "no")
_MAX_BYTES = 256 << 20  # of all plans together
_VERSION = 1  # of what the key is made of
_STALE_RATE = 0.9  # a cached plan that serves less of the steps than this is not worth keeping
_PLANNING_SECONDS = 20.0  # at most, when a program ends; the best plan until then is kept
_ADVICE = "name another folder in STALLOC_CACHE, or set it to off"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def folder() -> Path | None:
    """Where plans are kept: $STALLOC_CACHE, by default stalloc/plans in the user's cache folder; None if it is off."""
    named = os.environ.get("STALLOC_CACHE", "")
    if named.lower() in _OFF or os.environ.get("STALLOC_POISON", "") not in ("", "0"):
        return None  # guards make requests larger: plans of the two modes do not fit each other
    return Path(named) if named else user_cache("plans")


def _version(*packages: str) -> str:
    """Of the first that is installed."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def _devices() -> list[tuple[str, int]]:
    from stalloc.device import virtual
    from stalloc.device.nvidia_driver import gpus

    gpu = virtual.active_gpu()
    if gpu is not None:
        return [(gpu.name, gpu.total_bytes)] * gpu.num_devices
    return [(gpu.name, gpu.total_bytes) for gpu in gpus()]


class PlanCache:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.loaded = False  #: whether `load` found plans
        self._refused = False  # the folder cannot be used, which was said

    @property
    def kept(self) -> bool:
        return not self._refused and os.path.exists(self.file)

    def load(self) -> "list[Plan]":
        """Last time's plans, one a device; none if there are none or they cannot be read, which is said once."""
        try:
            private_folder(self.file.parent, _ADVICE, make=False)
        except FileNotFoundError:
            return []
        except (SetupError, OSError) as error:
            self._refuse(error)
            return []
        try:
            data = read_private(self.file)
            from stalloc.planner import plans_from_bytes

            plans = plans_from_bytes(data, self.file)
        except FileNotFoundError:
            return []
        except (BadInputError, SetupError, OSError) as error:
            say(f"the plan of the last run is ignored: {error}")
            self.remove()
            return []
        with contextlib.suppress(OSError):
            os.utime(self.file)  # the least recently used go first
        self.loaded = bool(plans)
        return plans

    def update(self, runtime: "Runtime") -> None:
        """Keep what this run has learnt: new plans replace the file, a plan that went stale is removed.

        To be called when the program is over. A folder that cannot be written costs one sentence.
        """
        if self._refused or os.getpid() != runtime.pid:
            return  # or a child of fork
        try:
            self._update(runtime)
        except Exception as error:  # the program is over: nothing of ours may spoil its ending
            say(f"no plan is kept for the next run ({type(error).__name__}: {error}).")

    def _update(self, runtime: "Runtime") -> None:
        used = served_controllers(runtime)
        if self.loaded:
            # a device that watched its steps either left its kept plan aside or dropped it
            watched = any(controller.status.observed is not None for controller in used)
            if not watched and not any(_is_stale(report) for report in runtime.reports()):
                return
            self.remove()
        observed = [(c.recording.observed_trace, c.status.settings) for c in used]
        found = [(trace, settings) for trace, settings in observed if trace is not None]
        if not found or not all(trace.info.get("complete", False) for trace, _ in found):
            return
        from stalloc.planner import plan, plans_to_bytes

        stop = threading.Event()
        timer = threading.Timer(_PLANNING_SECONDS, stop.set)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # some versions of Python start no thread when they end
            timer.start()
        made = [plan(trace, stop=stop, streams=settings.streams) for trace, settings in found]
        plans = [plan for plan in made if plan.kind == "program"]
        timer.cancel()
        if not plans:
            return
        try:
            private_folder(self.file.parent, _ADVICE)
            write_whole(self.file, plans_to_bytes(plans), _ADVICE, private=True)
            _prune(self.file.parent)
        except (BadInputError, SetupError, OSError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self._refused = True
        reason = error if not isinstance(error, OSError) else f"{self.file.parent}: {error.strerror}: {_ADVICE}."
        say(f"the plan could not be kept for the next run: {reason}")

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink()


def _is_stale(report: Any) -> bool:
    """Whether the plan that a run began with was dropped, served little, or may have stood in the way of memory."""
    served_little = report.hit_rate is not None and report.hit_rate < _STALE_RATE
    return report.plans_made != 1 or served_little or report.out_of_memory_errors > 0


def _prune(directory: Path) -> None:
    """Remove the least recently used plans beyond the total size; other processes may do the same."""
    total, found = 0, []
    for file in directory.glob("*.plan.npz"):
        with contextlib.suppress(OSError):
            status = file.stat()
            found.append((status.st_mtime, status.st_size, file))
    for _, size, file in sorted(found, reverse=True):
        total += size
        if total > _MAX_BYTES:
            with contextlib.suppress(OSError):
                file.unlink()


def of_program(command: list[str] | None, streams: str = "separate") -> PlanCache | None:
    """The cache of a program given as Python would be: [SCRIPT, ARGS…] or [-m, MODULE, ARGS…]; None: of this process.

    `streams` are the settings of that name and the price of a handover. The devices have to be decided. None if there
    is no cache or no file that says what the program is, as for what was typed in or given with -c.
    """
    directory = folder()
    if directory is None:
        return None
    source = program_source.of_this_process() if command is None else program_source.of_command(command)
    if source is None:
        return None
    key = {
        "format": _VERSION,
        "script": [str(source.path), hashlib.sha256(source.content).hexdigest()],
        "arguments": source.arguments,
        "streams": [streams],
        "devices": _devices(),
        "ranks": [os.environ.get(name, "") for name in _RANK_VARIABLES],
        "versions": {
            "python": sys.version,
            "stalloc": stalloc.__version__,
            "torch": _version("torch"),
            "cupy": _version("cupy", "cupy-cuda13x", "cupy-cuda12x"),
        },
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return PlanCache(directory / f"{source.path.stem[:40]}-{digest}.plan.npz")
