"""What the devices of this process hold right now: the one place that reads it, for `stalloc live` and for trackers.

Contract: figures are read, nothing is changed, and torch is asked only if the program has used CUDA through it. Under
stalloc they are those of its report; elsewhere those of torch's allocator, which has no hit rate.

For `stalloc live` a thread writes a few figures into a small file, now and then; a look costs some microseconds, and
whoever holds most is asked for so rarely that it takes less than half a per cent of the time. What cannot be shown is
not, and never an error of the program's. A child of fork shows nothing.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stalloc.device.known_gpus import shown_name
from stalloc.errors import StallocError
from stalloc.figures import fragmentation
from stalloc.integrations.installation import current, installation
from stalloc.live_file import LiveFile

if TYPE_CHECKING:
    from stalloc.runtime import Controller, Runtime


def served_controllers(runtime: "Runtime | None") -> "list[Controller]":
    controllers = runtime.controllers if runtime is not None else []
    return [controller for controller in controllers if controller.state.record.total.num_allocs]


def device_figures(served: "Sequence[Controller]") -> list[dict[str, Any]]:
    """What each device holds: of those that stalloc serves, or else of those that torch's allocator serves."""
    return [_under_stalloc(controller) for controller in served] or _under_torch()


def _under_stalloc(controller: "Controller") -> dict[str, Any]:
    from stalloc.runtime.statistics import run_counts, run_peaks

    record, marks = controller.state.record, controller.recording.step_times_ns
    (hits, misses), (allocated_peak, reserved_peak) = run_counts(controller), run_peaks(controller)
    lasted = (marks[-1] - marks[-2]) / 1e6 if len(marks) > 1 else None
    return {
        "device": controller.device.index,
        "name": shown_name(controller.device.kind, controller.device.name),
        "allocator": "stalloc",
        "phase": controller.status.phase.value,
        "total_bytes": controller.device.total_bytes,
        "allocated_bytes": record.total.allocated_bytes,
        "reserved_bytes": record.statistics.reserved_bytes,
        "allocated_peak_bytes": allocated_peak,
        "reserved_peak_bytes": reserved_peak,
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "steps": len(marks),
        "step_ms": lasted,
        "out_of_memory_errors": record.statistics.num_ooms,
    }


def _under_torch() -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return []
    found = []
    for device in range(torch.cuda.device_count()):
        told = torch.cuda.memory_stats(device)
        if not told.get("allocated_bytes.all.allocated"):
            continue
        properties = torch.cuda.get_device_properties(device)
        found.append(
            {
                "device": device,
                "name": properties.name,
                "allocator": "PyTorch",
                "phase": "",
                "total_bytes": properties.total_memory,
                "allocated_bytes": told["allocated_bytes.all.current"],
                "reserved_bytes": told["reserved_bytes.all.current"],
                "allocated_peak_bytes": told["allocated_bytes.all.peak"],
                "reserved_peak_bytes": told["reserved_bytes.all.peak"],
                "hit_rate": None,
                "steps": 0,
                "step_ms": None,
                "out_of_memory_errors": told.get("num_ooms", 0),
            }
        )
    return found


_NOW = ("allocated_bytes", "reserved_bytes", "hit_rate")


def memory_scalars() -> dict[str, float]:
    """Allocated and reserved bytes, hit rate and fragmentation of each device, for a tracker of experiments.

    Named `stalloc/gpu0/allocated_bytes` and so on. Allocated and reserved are of this moment, the hit rate (where
    stalloc plans) and fragmentation of the run so far. Empty if no GPU memory is used.
    """
    found: dict[str, float] = {}
    for figures in device_figures(served_controllers(current())):
        name = f"stalloc/gpu{figures['device']}"
        found |= {f"{name}/{what}": figures[what] for what in _NOW if figures[what] is not None}
        peaks = figures["allocated_peak_bytes"], figures["reserved_peak_bytes"]
        found[f"{name}/fragmentation"] = fragmentation(*peaks)
    return found


_SECONDS = 0.5
_MAX_SHARE = 0.005  # of the time, for those who hold most
_MAX_HOLDERS = 6


def watch() -> None:
    """Let `stalloc live` show the memory of this process while it runs, under stalloc's allocator or PyTorch's own.

    A program under stalloc is shown without it. Raises SetupError or OSError where its file cannot be made.
    """
    _show(None)


def watch_runtime(runtime: "Runtime") -> None:
    """Let `stalloc live` show a process under stalloc, which did not ask for it; say nothing if that fails."""
    with contextlib.suppress(StallocError, OSError, RuntimeError):
        _show(runtime)


def _show(runtime: "Runtime | None") -> None:
    shown = installation.showing
    if shown is None or shown.pid != os.getpid():
        shown = installation.showing = Showing()
    shown.runtime = runtime or shown.runtime


class Showing:
    def __init__(self) -> None:
        from stalloc.threads import start_thread

        self.pid = os.getpid()
        self.runtime: Runtime | None = None
        self._file = LiveFile()
        self._over = threading.Event()
        self._began = time.time()
        self._holders: list[list[Any]] = []
        self._ask_holders_at = 0.0
        start_thread(self._work)
        atexit.register(self._end)

    def _work(self) -> None:
        while not self._over.wait(_SECONDS):
            try:
                self._file.write(self._figures())
            except Exception:
                return

    def _end(self) -> None:
        self._over.set()
        if os.getpid() == self.pid:
            self._file.remove()

    def _figures(self) -> dict[str, Any]:
        served = served_controllers(self.runtime)
        devices = device_figures(served)
        now = time.monotonic()
        if served and now >= self._ask_holders_at:
            began = time.thread_time()
            self._holders = self._ask_holders(served)
            self._ask_holders_at = now + max(2.0, (time.thread_time() - began) / _MAX_SHARE)
        return {
            "pid": self._file.pid,
            "command": [word[:200] for word in sys.argv[:20]],
            "began": self._began,
            "time": time.time(),
            "devices": devices,
            "holders": self._holders,
        }

    def _ask_holders(self, served: "list[Controller]") -> list[list[Any]]:
        """Device, name, bytes and number of what holds most: call sites where they are known, else sizes."""
        from stalloc.runtime.shortage import largest_holders

        sites = self.runtime.call_sites if self.runtime is not None else None
        return [
            [controller.device.index, name[:200], held, count]
            for controller in served
            for name, held, count in largest_holders(controller.state, sites, _MAX_HOLDERS)
        ]
