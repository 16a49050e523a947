"""Plans kept from one run of a program to the next, so that the next starts planned from its first allocation.

Contract: a plan is found again only for the same script (place and content), arguments, devices, rank and versions; it
is put in force under the runtime's usual guards, so a stale one costs memory for a while, never correctness, and is
removed. Files are replaced whole, so processes may run at once; a damaged file costs one sentence. The folder keeps the
newest plans up to a total size.
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

from stalloc.errors import BadInputError

if TYPE_CHECKING:
    from stalloc.planner import Plan
    from stalloc.runtime import Runtime, Settings
    from stalloc.trace import Trace

_OFF = ("off", "0", "no")
_MAX_BYTES = 256 << 20  # of all plans together
_VERSION = 1  # of what the key is made of
_STALE_RATE = 0.9  # a cached plan that serves less of the steps than this is not worth keeping
_PLANNING_SECONDS = 20.0  # at most, when a program ends; the best plan until then is kept
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def folder() -> Path | None:
    """Where plans are kept: $STALLOC_CACHE, by default stalloc/plans in the user's cache folder; None if it is off."""
    named = os.environ.get("STALLOC_CACHE", "")
    if named.lower() in _OFF or os.environ.get("STALLOC_POISON", "") not in ("", "0"):
        return None  # guards make requests larger: plans of the two modes do not fit each other
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "stalloc" / "plans"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions() -> dict[str, str]:
    cupy = next((v for v in map(_version, ("cupy", "cupy-cuda13x", "cupy-cuda12x")) if v), "")
    return {"python": sys.version, "stalloc": _version("stalloc"), "torch": _version("torch"), "cupy": cupy}


def _devices() -> list[tuple[str, int]]:
    """Name and total bytes of every device, without a context on any."""
    from stalloc.device import virtual
    from stalloc.device.driver import gpus

    gpu = virtual.active_gpu()
    if gpu is not None:
        return [(gpu.name, gpu.total_bytes)] * gpu.num_devices
    return [(gpu.name, gpu.total_bytes) for gpu in gpus()]


class PlanCache:
    """The file of one program under one configuration."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.loaded = False  #: whether `load` found plans

    def load(self) -> "list[Plan]":
        """Last time's plans, one a device; none if there are none or they cannot be read, which is said once."""
        if not self.file.exists():
            return []
        from stalloc.planner import load_plans

        try:
            plans = load_plans(self.file)
        except BadInputError as error:
            print(f"stalloc: the plan kept from the last run is ignored: {error}", file=sys.stderr)
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
        if os.getpid() != runtime.pid:
            return  # a child of fork
        used = [controller for controller in runtime.controllers if controller.state["NUM_ALLOCS"]]
        if self.loaded:
            # a device that watched its steps either left its kept plan aside or dropped it
            watched = any(controller.status.observed is not None for controller in used)
            if not watched and not any(_is_stale(report) for report in runtime.reports()):
                return
            self.remove()
        try:
            found = [
                (c.recording.observed_trace, c.status.settings) for c in used if c.recording.observed_trace is not None
            ]
            self._keep(found)
        except Exception as error:  # the program is over: nothing of ours may spoil its ending
            print(f"stalloc: no plan is kept for the next run ({type(error).__name__}: {error}).", file=sys.stderr)

    def _keep(self, found: "list[tuple[Trace, Settings]]") -> None:
        from stalloc.planner import plan

        if not found or not all(trace.info.get("complete", False) for trace, _ in found):
            return
        stop = threading.Event()
        timer = threading.Timer(_PLANNING_SECONDS, stop.set)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # some versions of Python start no thread when they end
            timer.start()
        made = [
            plan(trace, stop=stop, streams=settings.streams, handover_bytes=settings.handover_bytes)
            for trace, settings in found
        ]
        plans = [plan for plan in made if plan.kind == "program"]
        timer.cancel()
        if plans:
            self._save(plans)

    def _save(self, plans: "list[Plan]") -> None:
        from stalloc.planner import save_plans

        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            save_plans(self.file, plans)
            _prune(self.file.parent)
        except (BadInputError, OSError) as error:
            print(
                f"stalloc: the plan could not be kept for the next run ({error}): name a folder in STALLOC_CACHE, or "
                "set it to off.",
                file=sys.stderr,
            )

    def remove(self) -> None:
        """Forget the plans."""
        with contextlib.suppress(OSError):
            self.file.unlink()


def _is_stale(report: Any) -> bool:
    """Whether the plan that a run began with was dropped, served little, or may have stood in the way of memory."""
    served_little = report.hit_rate is not None and report.hit_rate < _STALE_RATE
    return report.plans_made != 1 or served_little or report.out_of_memory_errors > 0


def _prune(directory: Path) -> None:
    """Remove the least recently used plans beyond the total size; other processes may do the same."""
    total = 0
    found = []
    for file in directory.glob("*.plan.npz"):
        with contextlib.suppress(OSError):
            status = file.stat()
            found.append((status.st_mtime, status.st_size, file))
    for _, size, file in sorted(found, reverse=True):
        total += size
        if total > _MAX_BYTES:
            with contextlib.suppress(OSError):
                file.unlink()


def of_program(command: list[str], streams: tuple[str, int] = ("separate", 0)) -> PlanCache | None:
    """The cache of a program given as Python would be: [SCRIPT, ARGS…] or [-m, MODULE, ARGS…].

    `streams` are the settings of that name and the price of a hand-over. The devices have to be decided. None if there
    is no cache or no file that says what the program is.
    """
    directory = folder()
    if directory is None:
        return None
    if command[0] == "-m":
        import importlib.util

        try:
            spec = importlib.util.find_spec(command[1])
            if spec is not None and spec.submodule_search_locations:
                spec = importlib.util.find_spec(f"{command[1]}.__main__")
        except (ImportError, ValueError):
            return None
        script = spec.origin if spec is not None else None
        arguments = command[2:]
    else:
        script, arguments = command[0], command[1:]
    return _of_script(directory, script, arguments, streams)


def of_this_program(streams: tuple[str, int] = ("separate", 0)) -> PlanCache | None:
    """The cache of the program that this interpreter runs; None too for what was typed in or given with -c."""
    directory = folder()
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if directory is None or not script or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return None
    return _of_script(directory, script, sys.argv[1:], streams)


def _of_script(directory: Path, script: str | None, arguments: list[str], streams: tuple[str, int]) -> PlanCache | None:
    if script is None:
        return None
    try:
        path = Path(script).resolve()
        content = path.read_bytes()
    except OSError:
        return None
    key = {
        "format": _VERSION,
        "script": [str(path), hashlib.sha256(content).hexdigest()],
        "arguments": arguments,
        "streams": streams if streams[0] == "weigh" else streams[:1],
        "devices": _devices(),
        "ranks": [os.environ.get(name, "") for name in _RANK_VARIABLES],
        "versions": _versions(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return PlanCache(directory / f"{path.stem[:40]}-{digest}.plan.npz")
