"""A recorded program on a device of numbers, under the stalloc that this process has: what it held, hit and called.

Contract: requests go by the entries that torch and CuPy use; controller, planner and compiled core are those that serve
them; pages are counted as the driver would count them, those included that wait to be mapped elsewhere. Searches and
plans are waited for, so that equal runs give equal figures. All requests come from one thread.
"""

import ctypes
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np

from ablation.rows import FREE, MALLOC, Row
from stalloc.core.requests import free_entry, malloc_entry
from stalloc.device.mapped_pages import PAGE_BYTES
from stalloc.replay.offline import let_go, make_controller
from stalloc.runtime.controller import MARK_STEP
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.runtime.statistics import report

_malloc = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(malloc_entry.address)
_free = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(free_entry.address)


@numba.njit  # type: ignore[misc]  # small, since it holds nothing of the core
def ask(device, rows, address):  # type: ignore[no-untyped-def]
    """Make requests and frees; False if one is not served that was when it was recorded."""
    for i in range(len(rows)):
        what, block = rows[i, 0], rows[i, 1]
        if what == FREE:
            _free(device, address[block])
        else:
            address[block] = _malloc(device, rows[i, 2], rows[i, 3])
            if what == MALLOC and address[block] == 0:
                return False
            if what != MALLOC:
                _free(device, address[block])
    return True


class Driver:
    """Counts what a device of numbers is asked for; what is unmapped is held until it is collected, as by a driver."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._kept_bytes = self._peak_bytes = self._waits = 0
        self._map, self._unmap, self._take = device.map, device.unmap, device.take
        device.map, device.unmap, device.take = self.map, self.unmap, self.take
        device.wait, device.collect = self.wait, self.collect

    @property
    def calls(self) -> int:
        return int(self._device.num_allocs + self._device.num_frees + self._waits)

    def _note_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._device.taken + self._kept_bytes)

    def map(self, address: int, count: int, held: dict[int, Any]) -> bool:
        done: bool = self._map(address, count, held)
        if done:
            self._kept_bytes = max(0, self._kept_bytes - count * PAGE_BYTES)
            self._note_peak()
        return done

    def unmap(self, address: int, count: int, held: dict[int, Any]) -> None:
        before = self._device.taken
        self._unmap(address, count, held)
        self._kept_bytes += before - self._device.taken

    def take(self, size_bytes: int) -> Any:
        memory = self._take(size_bytes)
        self._note_peak()
        return memory

    def wait(self) -> None:
        self._waits += 1

    def collect(self) -> None:
        self._kept_bytes = 0

    def take_peak(self) -> int:
        self._note_peak()
        peak, self._peak_bytes = self._peak_bytes, 0
        self._note_peak()
        return peak


@dataclass(frozen=True, eq=False)
class Recording:
    rows: np.ndarray  #: (n, 4) as recording.py writes them
    names: list[str]

    @property
    def step_end(self) -> Row:
        return Row.STEP_END if (self.rows[:, 0] == Row.STEP_END).any() else Row.MARK

    @property
    def step_seconds(self) -> float:
        """Processor time of a step without plans, on average of the later half; 0: unknown."""
        return later_half(self.rows[self.rows[:, 0] == self.step_end, 2] / 1e9)

    @classmethod
    def load(cls, file: Path) -> "list[Recording]":
        with np.load(file) as kept:
            rows, device, names = kept["rows"], kept["device"], kept["names"].tolist()
        found = [rows[device == index] for index in range(int(device.max(initial=0)) + 1)]
        return [cls(one, names) for one in found if (one[:, 0] == MALLOC).any()]


def later_half(times: np.ndarray) -> float:
    return float(np.diff(times[len(times) // 2 :]).mean()) if len(times) > 3 else 0.0


def replay(recording: Recording, capacity_bytes: int) -> dict[str, Any]:
    """Run it on a device of this size: whether it completes, its steps as judging.py reads them, processor time."""
    settings = Settings(plan_wait_seconds=1e6, planning_share=math.inf)
    controller = make_controller(capacity_bytes, settings)
    began, driver, steps = time.process_time(), Driver(controller.device), []
    rows = recording.rows
    address = np.zeros(int(rows[:, 1].max(initial=0)) + 1, np.int64)
    counts, calls, complete, at = (0, 0), 0, True, 0
    for end in [*np.flatnonzero(rows[:, 0] >= Row.MARK).tolist(), len(rows)]:
        if not ask(controller.state.address, rows[at:end], address):
            complete = False
            break
        at = end + 1
        if end == len(rows):
            break
        what, name = int(rows[end, 0]), recording.names[rows[end, 1]]
        _tell(controller, what, name)
        if what != recording.step_end:
            continue
        name = name if what == Row.STEP_END else ""
        total = controller.state.record.total.num_allocs, controller.state.requested_ever_bytes
        told, before, counts = report(controller), counts, total
        steps.append(
            {
                "kind": name or f"{total[0] - before[0]} requests, {total[1] - before[1]} bytes",
                "held": [driver.take_peak()],
                "calls": driver.calls - calls,
                "hits": told.run_hits,
                "misses": told.run_misses,
                "on_plan": told.phase == Phase.PLANNED.value,
                "ended": time.process_time(),
            }
        )
        calls = driver.calls
    peak_bytes = max([driver.take_peak(), *(step["held"][0] for step in steps)])
    result = {
        "completes": complete,
        "peak_bytes": peak_bytes,
        "steps": steps,
        "seconds": time.process_time() - began,
        "step_seconds": later_half(np.array([step["ended"] for step in steps])),
        "note": controller.status.note,
        "plans": controller.status.num_plans,
        "dropped": controller.status.num_dropped,
    }
    let_go(controller)
    return result


def _tell(controller: Any, what: int, name: str) -> None:
    """What comes between requests, as Runtime does it for torch."""
    if what == Row.MARK and controller.state.record.total.num_allocs:
        controller.mark(MARK_STEP, name)
        search = controller.steps.search
        if search is not None:
            search.done.wait()
    elif what == Row.EXPECT_LASTING:
        controller.expect_persistent()
    elif what == Row.END_LASTING:
        with controller.lock:
            controller.persistent.end()
    elif what == Row.EXPECT_MARKS:
        controller.expects_marks = True
    elif what == Row.RELEASE:
        controller.memory.release_unused()
