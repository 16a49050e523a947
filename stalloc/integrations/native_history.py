"""What a program allocates under its own allocators: torch's memory history, with CuPy's requests among its events.

Contract: neither library is imported for it, CUDA is not initialised for it, and both go on with the allocator that
they have. Under stalloc torch's history is stalloc's own, which holds CuPy's requests as well. Events of the two
libraries are put in order by their times, in microseconds.

CuPy's requests are noted on the way to whatever allocator the program has, which gives the memory and takes it back at
the same moments as without us; noting costs some microseconds a request, and of the events the last are kept. A thread
inside `cupy.cuda.using_allocator` is not seen.
"""

import atexit
import contextlib
import itertools
import os
import pickle
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

from stalloc.imports import after_import
from stalloc.integrations.cupy_default_pool import call_outside
from stalloc.integrations.installation import current
from stalloc.integrations.leading_optimizers import StepTimes
from stalloc.notices import say
from stalloc.printable import printable
from stalloc.trace import Trace
from stalloc.trace.sites import MAX_DEPTH
from stalloc.trace.sources.torch_snapshot import read_torch_snapshot
from stalloc.version import known_release

MAX_EVENTS = 1 << 20  #: of a record, unless somebody asks for other

Block = tuple[int, int]
"""Device and address."""
Event = dict[str, Any]
"""As torch writes them in a snapshot."""


class NativeHistory:
    """The last events of this process, from `begin` or the last `restart` on."""

    def __init__(
        self,
        max_events: int = MAX_EVENTS,
        *,
        stacks: bool = True,
        out_of_memory: Callable[[], None] | None = None,
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        """`out_of_memory` is called when memory is about to be refused, `begun` when torch's history has begun."""
        self._max_events, self._stacks = max_events, stacks
        self._out_of_memory, self._begun = out_of_memory, begun
        self._is_observing = False
        self._cupy = _CupyRequests(max_events, stacks=stacks, out_of_memory=out_of_memory)
        self._watches_cupy = self._records_torch = False
        self._steps = StepTimes()

    def begin(self) -> None:
        """Record from here on, or from when a library is imported and CUDA used."""
        after_import("torch", self._begin_torch)
        after_import("cupy", self._begin_cupy)

    def _begin_torch(self) -> None:
        torch: Any = sys.modules["torch"]
        if torch.backends.cuda.is_built():
            torch.cuda._lazy_call(self._record_torch)  # now, or once CUDA is initialised

    def _record_torch(self) -> None:
        self._records_torch = True
        if self._out_of_memory is not None and not self._is_observing:
            tell = self._out_of_memory
            sys.modules["torch"]._C._cuda_attach_out_of_memory_observer(lambda *_: tell())
            self._is_observing = True
        context, most = "alloc" if self._stacks else None, self._max_events
        sys.modules["torch"].cuda.memory._record_memory_history(
            enabled="all", context=context, stacks="python", max_entries=most, clear_history=True
        )
        self._steps.begin()
        self._begun()

    def _begin_cupy(self) -> None:
        self._watches_cupy = True
        self._cupy.begin()

    def settle(self) -> None:
        """Let go of what torch keeps for its libraries from their first use on, whoever comes first."""
        clear = getattr(getattr(sys.modules.get("torch"), "_C", None), "_cuda_clearCublasWorkspaces", None)
        if self._records_torch and clear is not None:
            clear()

    def restart(self) -> None:
        """Forget the events so far; of what lives is still known where it came from."""
        self.settle()
        if self._records_torch:
            self._record_torch()
        self._cupy.events.clear()
        self._cupy.num_events = 0
        if self._watches_cupy:
            self._cupy.begin()

    def live(self) -> dict[Block, int]:
        """What is allocated now, and its bytes."""
        found: dict[Block, int] = {}
        self.settle()
        if self._records_torch:
            snapshot = sys.modules["torch"].cuda.memory._snapshot()
            found = {
                (segment["device"], block["address"]): block.get("requested_size", block["size"])
                for segment in snapshot["segments"]
                for block in segment["blocks"]
                if block["state"] != "inactive"
            }
        ours = self._cupy.live if self._cupy_is_ours() else {}
        return found | {block: made["size"] for block, made in ours.items()}

    def end(self) -> None:
        if self._records_torch:
            sys.modules["torch"].cuda.memory._record_memory_history(enabled=None)
            self._steps.end()
            self._records_torch = False
        if self._watches_cupy:
            self._cupy.end()
            self._watches_cupy = False

    def snapshot(self) -> dict[str, Any] | None:
        """The record as a snapshot of torch, None if nothing was allocated."""
        ours = self._cupy_is_ours()
        if self._records_torch:
            found: dict[str, Any] = sys.modules["torch"].cuda.memory._snapshot()
            self._steps.add_to(found)
        elif ours and (self._cupy.events or self._cupy.live):
            found = {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}
        else:
            return None
        if ours:
            _add_cupy(found, self._cupy.events, self._cupy.live)
        return found

    def traces(self, name: str, snapshot: dict[str, Any] | None = None) -> list[Trace]:
        """The record as traces, one for each device with events; `name` stands for the file it is not from."""
        snapshot = self.snapshot() if snapshot is None else snapshot
        events = (event for history in snapshot["device_traces"] for event in history) if snapshot is not None else ()
        if snapshot is None or not any(event["action"] in ("alloc", "free_completed") for event in events):
            return []
        traces = read_torch_snapshot(Path(name), pickle.dumps(snapshot))
        longest, notes = max(map(len, snapshot["device_traces"]), default=0), []
        if longest >= self._max_events or self._cupy.num_events > self._max_events:
            notes = [f"only the last {self._max_events:,} events were kept: what was before is not in the record"]
        return [
            trace.replace(info=trace.info | known_release() | {"notes": [*trace.info.get("notes", []), *notes]})
            for trace in traces
        ]

    def _cupy_is_ours(self) -> bool:
        """Whether CuPy's requests have to be added to torch's history."""
        return self._watches_cupy and (current() is None or not self._records_torch)

    def cached_by_cupy(self) -> int:
        """Bytes that CuPy's default pool keeps on the current device and nobody uses; 0 if CuPy is not noted apart."""
        if not self._cupy_is_ours():
            return 0
        with contextlib.suppress(Exception):  # no device
            return int(sys.modules["cupy"].get_default_memory_pool().free_bytes())
        return 0


def _add_cupy(snapshot: dict[str, Any], events: Collection[tuple[int, Event]], live: dict[Block, Event]) -> None:
    """Put requests of CuPy among the events of a snapshot, each with a segment of its own."""
    devices = [device for device, _ in events] + [device for device, _ in live]
    histories: list[list[Event]] = snapshot["device_traces"]
    while len(histories) <= max(devices, default=-1):
        histories.append([])
    for device, event in events:
        if event["action"] == "alloc":
            histories[device].append(event | {"action": "segment_alloc"})
        histories[device].append(event)
        if event["action"] == "free_completed":
            histories[device].append(event | {"action": "segment_free"})
    for device in set(devices):
        histories[device].sort(key=lambda event: event.get("time_us", 0))
    for (device, address), made in live.items():
        size, frames = made["size"], made["frames"]
        sizes = {"total_size": size, "allocated_size": size, "active_size": size, "requested_size": size}
        block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
        of_none = {
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
        }
        segment = {"device": device, "address": address, **sizes, **of_none, "blocks": [block | {"frames": frames}]}
        snapshot["segments"].append(segment)


class _CupyRequests:
    """The requests of CuPy since `begin`, and what of them lives."""

    _below: Any = None
    _ours: Any = None

    def __init__(self, max_events: int, *, stacks: bool, out_of_memory: Callable[[], None] | None) -> None:
        self._stacks, self._out_of_memory = stacks, out_of_memory
        self.events: deque[tuple[int, Event]] = deque(maxlen=max_events)  #: of (device, event)
        self.live: dict[tuple[int, int], Event] = {}  #: by (device, address): the event that made it
        self.num_events = 0  #: since the last restart, those included that were forgotten

    def begin(self) -> None:
        """Note from here on; again after the program has chosen another allocator."""
        import cupy

        now = call_outside(cupy.cuda.get_allocator)
        if now is not self._ours or self._ours is None:
            self._below, self._ours = now, self._allocator(now)
            call_outside(cupy.cuda.set_allocator, self._ours)

    def end(self) -> None:
        import cupy

        if self._ours is not None and call_outside(cupy.cuda.get_allocator) is self._ours:
            call_outside(cupy.cuda.set_allocator, self._below)
        self._ours = None

    def _allocator(self, below: Any) -> Any:
        from cupy.cuda.memory import MemoryPointer, UnownedMemory

        requests = self

        class Noted:
            __slots__ = ("device", "memory")

            def __init__(self, memory: Any) -> None:
                self.memory = memory
                self.device = memory.device_id

            def __del__(self) -> None:
                requests.note_free(self.device, self.memory.ptr)

        def allocate(num_bytes: int) -> Any:
            try:
                pointer = below(num_bytes)
            except Exception as error:
                requests.note_refusal(int(num_bytes), error)
                raise
            memory = pointer.mem
            if not memory.ptr or not num_bytes:
                return pointer
            requests.note_alloc(memory.device_id, memory.ptr, int(num_bytes), sys._getframe(1))
            return MemoryPointer(UnownedMemory(memory.ptr, memory.size, Noted(memory), memory.device_id), 0)

        return allocate

    def note_alloc(self, device: int, address: int, num_bytes: int, frame: FrameType) -> None:
        made = _event("alloc", address, num_bytes) | {"frames": _frames(frame) if self._stacks else []}
        self.live[device, address] = made
        self._note(device, made)

    def note_free(self, device: int, address: int) -> None:
        made = self.live.pop((device, address), None)
        if made is not None:
            for action in ("free_requested", "free_completed"):
                self._note(device, _event(action, address, made["size"]))

    def note_refusal(self, num_bytes: int, error: Exception) -> None:
        if "OutOfMemory" in type(error).__name__:
            from cupy.cuda import runtime
            from cupy.cuda.device import get_device_id

            free, _ = runtime.memGetInfo()
            frames = _frames(sys._getframe(2)) if self._stacks else []
            self._note(get_device_id(), _event("oom", int(free), num_bytes) | {"frames": frames})
            if self._out_of_memory is not None:
                self._out_of_memory()

    def _note(self, device: int, event: Event) -> None:
        self.num_events += 1
        self.events.append((device, event))


def _event(action: str, address: int, num_bytes: int) -> Event:
    time_us = time.time_ns() // 1000
    return {"action": action, "addr": address, "size": num_bytes, "stream": 0, "time_us": time_us}


def _frames(frame: FrameType) -> list[dict[str, Any]]:
    found = itertools.islice(traceback.walk_stack(frame), MAX_DEPTH)
    return [{"name": at.f_code.co_name, "filename": at.f_code.co_filename, "line": line or 0} for at, line in found]


def follow_child(folder: str) -> None:
    """Record this process, which a guarded test started; at its end leave a trace in a folder, or say what failed."""
    history = NativeHistory()
    history.begin()
    atexit.register(_leave, history, folder, os.getpid())


def _leave(history: NativeHistory, folder: str, process: int) -> None:
    if os.getpid() != process or not os.path.isdir(folder):
        return  # a child of fork, or one that outlived its test
    from stalloc.trace import save_traces

    try:
        command = printable(" ".join(sys.argv)[:200]) or "python"
        traces = history.traces(command)
        if traces:
            named = [trace.replace(info=trace.info | {"process": command}) for trace in traces]
            save_traces(os.path.join(folder, f"{process}.trace.npz"), named)
    except Exception as error:
        say(f"what this process allocated is not recorded for its test: {type(error).__name__}: {error}")
