"""What CuPy is asked for, noted on the way to whatever allocator the program has: for a record of a program's own runs.

Contract: the allocator below gives the memory and takes it back, at the same moments as without us; noting costs some
microseconds a request, and of the events the last are kept. A thread inside `cupy.cuda.using_allocator` is not seen.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from stalloc.integrations.cupy_default_pool import call_outside
from stalloc.trace.sites import MAX_DEPTH

Event = dict[str, Any]
"""As torch writes them in a snapshot."""


class CupyRequests:
    """The requests of CuPy since `begin`, and what of them lives."""

    def __init__(self, max_events: int, *, stacks: bool, out_of_memory: Callable[[], None] | None) -> None:
        self._stacks, self._out_of_memory = stacks, out_of_memory
        self._below: Any = None
        self._ours: Any = None
        self.events: deque[tuple[int, Event]] = deque(maxlen=max_events)  #: of (device, event)
        self.live: dict[tuple[int, int], Event] = {}  #: by (device, address): the event that made it
        self.num_events = 0  #: since `restart`, those included that were forgotten

    def begin(self) -> None:
        """Note from here on; again after the program has chosen another allocator."""
        import cupy

        now = call_outside(cupy.cuda.get_allocator)
        if now is not self._ours or self._ours is None:
            self._below, self._ours = now, self._allocator(now)
            call_outside(cupy.cuda.set_allocator, self._ours)

    def restart(self) -> None:
        """Forget the events; what lives is still known."""
        self.events.clear()
        self.num_events = 0

    def end(self) -> None:
        """Give CuPy its allocator back."""
        import cupy

        if self._ours is not None and call_outside(cupy.cuda.get_allocator) is self._ours:
            call_outside(cupy.cuda.set_allocator, self._below)
        self._ours = None

    def _allocator(self, below: Any) -> Any:
        from cupy.cuda.memory import MemoryPointer, UnownedMemory

        requests = self

        class Noted:
            """Owns a piece of memory, and says when it ends."""

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

    def note_alloc(self, device: int, address: int, num_bytes: int, frame: FrameType | None) -> None:
        """A request was served."""
        made = _event("alloc", address, num_bytes) | {"frames": _frames(frame) if self._stacks else []}
        self.live[device, address] = made
        self._note(device, made)

    def note_free(self, device: int, address: int) -> None:
        """Note that CuPy freed the memory at an address."""
        made = self.live.pop((device, address), None)
        if made is not None:
            for action in ("free_requested", "free_completed"):
                self._note(device, _event(action, address, made["size"]))

    def note_refusal(self, num_bytes: int, error: Exception) -> None:
        """A request was not served."""
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


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < MAX_DEPTH:
        code = frame.f_code
        found.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno or 0})
        frame = frame.f_back
    return found
