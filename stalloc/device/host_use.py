"""Memory of the host that a program takes on the virtual GPU: pinned, registered, its own, and below /dev/shm.

Contract: what is pinned and registered is what the driver was asked for, to the byte. The program's own memory is the
peak of what is resident in this process, less what was resident when it began, what `import torch` added, and pages
that stand for device memory and pinned memory. What it and its children share below /dev/shm is looked at every 20 ms:
what is there for less time may be missed.
"""

import contextlib
import ctypes
import os
import re
import resource
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from stalloc.imports import after_import, before_import

_PINNED, _UNPINNED, _REGISTERED, _UNREGISTERED = range(4)  # as virtual_pinned.c numbers them
_OBSERVER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_CUDA = 1  # c10::DeviceType
_GET_ALLOCATOR = "_ZN2at16getHostAllocatorEN3c1010DeviceTypeE"  # at::getHostAllocator, of newer releases
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SHARED = "/dev/shm"
_EVERY_SECONDS = 0.02


class HostUse:
    """What this process takes, from `begin` until `told`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._observer = _OBSERVER(self._observe)
        self._lock = threading.RLock()  # what is freed meanwhile, by the collector, is noted too
        self._live: dict[int, tuple[str, int, int]] = {}  # address: line, bytes, bytes asked for
        self._pinned: Counter[str] = Counter()  # bytes by line
        self._asked: Counter[str] = Counter()
        self._at_peak = self._pinned.copy(), self._asked.copy()
        self._knows_asked = False
        self._imported = self._before_import = self._at_start = self._at_fork = 0
        self._shared = self._shared_at_start = 0
        self._ended = threading.Event()

    def begin(self, forked_from: int | None = None) -> None:
        """Look from now on; before torch is imported, or after. `forked_from`: the process that has imported it."""
        if "torch" in sys.modules:
            self._follow_torch()
        else:
            before_import(("torch",), lambda: setattr(self, "_before_import", _status("VmRSS")))
            after_import("torch", self._import_ends)
        self._library.stalloc_virtual_observe_pinned(self._observer)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        self._at_start = _status("VmRSS")
        # a fork maps pages of libraries that it touches, and no others
        self._at_fork = _status("VmRSS", forked_from) if forked_from is not None else 0
        self._shared_at_start = _used_below(_SHARED)
        threading.Thread(target=self._watch_shared, name="stalloc-shared-memory", daemon=True).start()

    def told(self) -> dict[str, Any]:
        """What was seen, as plain values; the end of looking."""
        peak = _status("VmHWM")
        self._library.stalloc_virtual_observe_pinned(None)
        counted = (ctypes.c_uint64 * 4)()
        self._library.stalloc_virtual_pinned(counted)
        resident = self._resident_of_virtual()
        (sites, asked), known = self._at_peak, self._knows_asked
        self._ended.set()
        self._look_at_shared()
        return {
            "pinned_bytes": counted[1],
            "pinned_asked_bytes": asked.total() if known else None,
            "pinned_sites": [[name, size, asked[name] if known else None] for name, size in sites.most_common()],
            "pinned_end_bytes": counted[0],
            "registered_bytes": counted[3],
            "own_bytes": max(0, peak - self._at_start - self._imported - resident),
            "resident_peak_bytes": peak,
            "resident_before_bytes": max(self._at_start + self._imported, self._at_fork),
            "largest_child_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            "shared_memory_bytes": self._shared,
        }

    def _import_ends(self) -> None:
        self._imported = max(0, _status("VmRSS") - self._before_import)
        self._follow_torch()

    def _follow_torch(self) -> None:
        """Have the allocator of pinned memory say how much it was asked for, in releases of which one is known."""
        torch: Any = sys.modules["torch"]
        with contextlib.suppress(OSError, AttributeError):
            function = getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")), _GET_ALLOCATOR)
            function.restype = ctypes.c_void_p
            if allocator := function(_CUDA):
                self._library.stalloc_virtual_follow_host_allocator(ctypes.c_void_p(allocator))
                self._knows_asked = True

    def _observe(self, event: int, address: int, size: int, asked: int) -> None:
        with self._lock:
            if event == _PINNED:
                site = _line_of_caller()
                self._live[address] = (site, size, asked)
                self._pinned[site] += size
                self._asked[site] += asked
                if self._pinned.total() > self._at_peak[0].total():
                    self._at_peak = self._pinned.copy(), self._asked.copy()
            elif event == _UNPINNED and address in self._live:
                site, size, asked = self._live.pop(address)
                self._pinned[site] -= size
                self._asked[site] -= asked

    def _resident_of_virtual(self) -> int:
        """Pages that stand for memory of devices, and pinned ones, as far as somebody wrote to them."""
        region = (ctypes.c_uint64 * 2)()
        self._library.stalloc_virtual_region(region)
        resident, inside = 0, False
        with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                first = line.split(maxsplit=1)[0]
                if "-" in first and not first.endswith(":"):
                    inside = region[0] <= int(first.split("-")[0], 16) < region[1]
                elif inside and first == "Rss:":
                    resident += int(line.split()[1]) * 1024
        return resident

    def _watch_shared(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            self._look_at_shared()

    def _look_at_shared(self) -> None:
        """The most that this process and its children have mapped there, segments that they share counted once."""
        if _used_below(_SHARED) > self._shared_at_start:  # by whomever: else there is nothing to look for
            self._shared = max(self._shared, _mapped_by(os.getpid(), {}))


def _used_below(folder: str) -> int:
    try:
        there = os.statvfs(folder)
    except OSError:
        return 0
    return (there.f_blocks - there.f_bfree) * there.f_frsize


def _mapped_by(process: int, found: dict[str, int]) -> int:
    """Bytes of the segments that a process and its children have mapped, by their inodes; semaphores are none."""
    own: Counter[str] = Counter()
    children: list[int] = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            if f" {_SHARED}/" in line and f" {_SHARED}/sem." not in line:
                span, _, _, _, inode, _ = line.split(maxsplit=5)
                begin, end = span.split("-")
                own[inode] += int(end, 16) - int(begin, 16)
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            children += map(int, file.read_text(encoding="ascii").split())
    for inode, size in own.items():
        found[inode] = max(found.get(inode, 0), size)
    for child in children:
        _mapped_by(child, found)
    return sum(found.values())


def _status(name: str, process: int | str = "self") -> int:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def _line_of_caller() -> str:
    """The innermost line that is the program's own: neither this package's nor torch's."""
    torch: Any = sys.modules.get("torch")
    library = os.path.dirname(torch.__file__) + os.sep if torch is not None else _PACKAGE
    frame, innermost = sys._getframe(1), ""
    while frame := frame.f_back:  # type: ignore[assignment]
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<frozen")):
            place = f"{os.path.basename(name)}:{frame.f_lineno} {frame.f_code.co_name}"
            if not name.startswith(library) and f"{os.sep}threading.py" not in name:
                return place
            innermost = innermost or place
    return innermost or "a thread without a line of Python"
