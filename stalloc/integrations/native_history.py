"""What a program allocates under its own allocators: torch's memory history, with CuPy's requests among its events.

Contract: neither library is imported for it, CUDA is not initialised for it, and both go on with the allocator that
they have. Under stalloc torch's history is stalloc's own, which holds CuPy's requests as well. Events of the two
libraries are put in order by their times, in microseconds.
"""

import contextlib
import pickle
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from stalloc.imports import after_import
from stalloc.integrations.cupy_requests import CupyRequests, Event
from stalloc.integrations.step_times import StepTimes
from stalloc.trace import Trace
from stalloc.trace.sources.torch_snapshot import read_torch_snapshot
from stalloc.version import known_release

MAX_EVENTS = 1 << 20  #: of a record, unless somebody asks for other

Block = tuple[int, int]
"""Device and address."""


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
        self._max_events = max_events
        self._stacks = stacks
        self._out_of_memory = out_of_memory
        self._begun = begun
        self._is_observing = False
        self._cupy = CupyRequests(max_events, stacks=stacks, out_of_memory=out_of_memory)
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
        sys.modules["torch"].cuda.memory._record_memory_history(
            enabled="all",
            context="alloc" if self._stacks else None,
            stacks="python",
            max_entries=self._max_events,
            clear_history=True,
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
        self._cupy.restart()
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
        return found | {block: made["size"] for block, made in self._cupy_live().items()}

    def end(self) -> None:
        """Record no more."""
        if self._records_torch:
            sys.modules["torch"].cuda.memory._record_memory_history(enabled=None)
            self._steps.end()
            self._records_torch = False
        if self._watches_cupy:
            self._cupy.end()
            self._watches_cupy = False

    def snapshot(self) -> dict[str, Any] | None:
        """The record as a snapshot of torch, None if nothing was allocated."""
        if self._records_torch:
            found: dict[str, Any] = sys.modules["torch"].cuda.memory._snapshot()
            self._steps.add_to(found)
        elif self._cupy_events() or self._cupy_live():
            found = {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}
        else:
            return None
        _add_cupy(found, self._cupy_events(), self._cupy_live())
        return found

    def traces(self, name: str, snapshot: dict[str, Any] | None = None) -> list[Trace]:
        """The record as traces, one for each device with events; `name` stands for the file it is not from."""
        snapshot = self.snapshot() if snapshot is None else snapshot
        if snapshot is None or not any(map(_says_something, snapshot["device_traces"])):
            return []
        traces = read_torch_snapshot(Path(name), pickle.dumps(snapshot))
        notes = self._notes(snapshot)
        return [
            trace.replace(info=trace.info | known_release() | {"notes": [*trace.info.get("notes", []), *notes]})
            for trace in traces
        ]

    def _notes(self, snapshot: dict[str, Any]) -> list[str]:
        longest = max(map(len, snapshot["device_traces"]), default=0)
        if longest < self._max_events and self._cupy.num_events <= self._max_events:
            return []
        return [f"only the last {self._max_events:,} events were kept: what was before is not in the record"]

    def _cupy_is_ours(self) -> bool:
        """Whether CuPy's requests have to be added to torch's history."""
        from stalloc.integrations.installing import current

        return self._watches_cupy and (current() is None or not self._records_torch)

    def _cupy_events(self) -> Collection[tuple[int, Event]]:
        return self._cupy.events if self._cupy_is_ours() else ()

    def _cupy_live(self) -> dict[Block, Event]:
        return self._cupy.live if self._cupy_is_ours() else {}

    def cached_by_cupy(self) -> int:
        """Bytes that CuPy's default pool keeps on the current device and nobody uses; 0 if CuPy is not noted apart."""
        if not self._cupy_is_ours():
            return 0
        with contextlib.suppress(Exception):  # no device
            return int(sys.modules["cupy"].get_default_memory_pool().free_bytes())
        return 0


def _says_something(history: list[Event]) -> bool:
    return any(event["action"] in ("alloc", "free_completed") for event in history)


def _add_cupy(snapshot: dict[str, Any], events: Collection[tuple[int, Event]], live: dict[Block, Event]) -> None:
    """Put requests of CuPy among the events of a snapshot, each with a segment of its own."""
    devices = [device for device, _ in events] + [device for device, _ in live]
    histories: list[list[Event]] = snapshot["device_traces"]
    while len(histories) <= max(devices, default=-1):
        histories.append([])
    for device in dict.fromkeys(devices):
        own = [event for number, made in events if number == device for event in _with_segment(made)]
        histories[device] = sorted([*histories[device], *own], key=lambda event: event.get("time_us", 0))
    for (device, address), made in live.items():
        snapshot["segments"].append(_segment_of(device, address, made))


def _with_segment(event: Event) -> list[Event]:
    """An event of a block, and that of the segment around it."""
    segment = {"alloc": "segment_alloc", "free_completed": "segment_free"}.get(event["action"])
    if segment is None:
        return [event]
    around = {**event, "action": segment}
    return [around, event] if segment == "segment_alloc" else [event, around]


def _segment_of(device: int, address: int, made: Event) -> dict[str, Any]:
    size, frames = made["size"], made["frames"]
    block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }
