"""Show this process's memory to `stalloc live`: a thread that writes a few figures into a small file, now and then.

Contract: figures are read, nothing is changed; a look costs some microseconds, and whoever holds most is asked for so
rarely that it takes less than half a per cent of the time. What cannot be shown is not, and never an error of the
program's. A child of fork shows nothing.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from stalloc.errors import StallocError
from stalloc.integrations.installation import installation
from stalloc.integrations.memory_figures import device_figures, served_controllers
from stalloc.live_file import LiveFile

if TYPE_CHECKING:
    from stalloc.runtime import Controller, Runtime

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
    """The file of this process, and the thread that writes it."""

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
