"""The copies between host and device that techniques make, and the host memory that they hold, as a table of activity.

Contract: times are those of the device, on the clock of the record; a copy that has not ended is waited for when the
table is made. Without a recording nothing is noted.
"""

import time
from typing import Any

from stalloc.columns import Column
from stalloc.runtime import Runtime
from stalloc.trace.activity import Held, Link, MemoryKind, Work, activity_of


def record_transfers(runtime: Runtime) -> None:
    """Note copies from here on, for the traces of a runtime that keeps its recording; torch is imported by now."""
    from stalloc.techniques import transfers

    for controller in runtime.controllers:
        if controller.status.settings.keep_recording:
            noted = _Noted(controller.device.index)
            transfers.listeners.append(noted.copied)
            controller.recording.more_tables.append(noted.columns)


class _Noted:
    def __init__(self, device: int) -> None:
        self._device = device
        self._copies: list[tuple[Any, int]] = []  # each with what the host held
        self._base: tuple[Any, int] | None = None  # an event, and the time at which it was

    def copied(self, copy: Any) -> None:
        if copy.device != self._device:
            return
        if self._base is None:
            copy.begin.synchronize()
            self._base = copy.begin, time.monotonic_ns()
        from stalloc.techniques.host_store import held_bytes

        self._copies.append((copy, held_bytes()))

    def columns(self) -> dict[str, Column]:
        if self._base is None:
            return {}
        base, base_ns = self._base
        work, held = [], []
        for copy, host_bytes in self._copies:
            copy.end.synchronize()
            begin, end = (base_ns + int(1e6 * base.elapsed_time(event)) for event in (copy.begin, copy.end))
            link = Link.TO_DEVICE if copy.to_device else Link.TO_HOST
            work.append(Work(begin, max(begin, end), link, copy.num_bytes, copy.phase, pinned=1))
            held.append(Held(begin, MemoryKind.HOST, host_bytes))
        return activity_of(work, held=held).columns()
