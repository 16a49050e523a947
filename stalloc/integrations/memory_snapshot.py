"""torch.cuda.memory_snapshot and the memory history under stalloc: the same record, from stalloc's own books.

Contract: segments are what the device holds now, blocks cover them without a gap, and sizes add up to what
torch.cuda.memory_stats says. The history is stalloc's recording, written by stalloc.writers, with the Python stacks of
what was requested since the program asked for a history.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import Any

from stalloc.core import constants
from stalloc.core.snapshot import HeapBlock, HeapSegment, live_addresses, segments
from stalloc.runtime import Controller, Phase, Runtime
from stalloc.runtime.call_sites import CallSites, Stack

_STATES = {
    constants.BLOCK_FREE: "inactive",
    constants.BLOCK_LIVE: "active_allocated",
    constants.BLOCK_SHARED: "active_allocated",
    constants.BLOCK_DEFERRED: "active_pending_free",
    constants.BLOCK_IN_HANDOVER: "active_pending_free",
}


class History:
    """Whether the program asked for a history, and what it gets."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.enabled = False
        self.metadata = ""  #: what the program noted for its memory (torch.cuda.memory._set_memory_metadata)
        self._begin_us = 0  # monotonic time since when the program wants it
        self._max_entries = sys.maxsize

    def record(
        self,
        enabled: Any = "all",
        context: Any = "all",
        stacks: Any = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        *options: Any,
        **more: Any,
    ) -> None:
        """Begin or, with None, end recording on all devices (torch.cuda.memory._record_memory_history).

        Stacks are those of Python, whatever `stacks` says; and the last four million events are kept at most. With a
        `context` of None there are no stacks, and once a plan is in force times are exact to a few milliseconds.
        """
        was_enabled = self.enabled
        self.enabled = enabled is not None and enabled is not False
        self._max_entries = max_entries
        is_exact = context is not None
        if not was_enabled or clear_history:
            clock = constants.CLOCK if is_exact else constants.COARSE_CLOCK
            self._begin_us = time.clock_gettime_ns(clock) // 1000
        if self.enabled and context is not None:
            self._runtime.begin_call_sites()
        elif not self.enabled:
            self._runtime.end_call_sites()
        for controller in self._runtime.controllers:
            settings = dataclasses.replace(
                controller.status.settings,
                keep_recording=self.enabled,
                keep_events=max_entries,
                exact_times=is_exact,
            )
            controller.status.settings = settings
            controller.state.write(events_wrap=int(self.enabled))
            if self.enabled:
                controller.steady.end()
                controller.recording.go_on(settings)
            elif was_enabled and controller.status.phase in (Phase.PLANNED, Phase.RESTING):
                controller.recording.end(settings)

    def record_legacy(
        self, enabled: bool, record_context: Any = True, max_entries: int = 1, *options: Any, **more: Any
    ) -> None:
        """As `record`, for callers that give a bool, as torch's function once took."""
        self.record(enabled, record_context, "all", max_entries)

    def set_metadata(self, metadata: str) -> None:
        """Keep what the program notes."""
        self.metadata = metadata

    def snapshot(self, pool: Any = (0, 0), include_traces: bool | None = None) -> dict[str, Any]:
        """What torch._C._cuda_memorySnapshot gives; of one memory pool only if its id is not (0, 0)."""
        if isinstance(pool, tuple) and len(pool) == 3:
            pool, include_traces = pool[:2], pool[2]
        if pool is not None and tuple(pool) != (0, 0):
            return {"segments": [], "device_traces": [], "external_annotations": [], "allocator_settings": {}}
        controllers = self._runtime.controllers
        found = [entry for controller in controllers for entry in _segments(controller, self._runtime.call_sites)]
        traces: list[list[Any]] = [[] for _ in controllers]
        annotations: list[Any] = []
        if self.enabled and include_traces is not False:
            from stalloc.writers.snapshot_writer import snapshot_of

            recorded, _ = snapshot_of(self._runtime.recorded())
            for index, history in enumerate(recorded["device_traces"]):
                wanted = [event for event in history if event["time_us"] >= self._begin_us]
                traces[index] = [_completed(event) for event in wanted[max(0, len(wanted) - self._max_entries) :]]
                left_out = len(history) - len(traces[index])
                marks = [one for one in recorded["external_annotations"] if one["device"] == index]
                annotations += _moved(marks, left_out)
        return {
            "segments": found,
            "device_traces": traces,
            "external_annotations": annotations,
            "allocator_settings": {},
            "stalloc": {"devices": {str(index): _OURS for index in range(len(controllers))}},
        }


def _moved(annotations: list[dict[str, Any]], num_events: int) -> list[dict[str, Any]]:
    """Marks of the events after the first so many, which count from there."""
    return [
        {**one, "mark": [event - num_events, kind]}
        for one in annotations
        for event, kind in [one["mark"]]
        if event >= num_events
    ]


_OURS = {"notes": [], "source": "stalloc recorder"}  # so that nobody takes the addresses for those of torch's allocator


def _completed(event: dict[str, Any]) -> dict[str, Any]:
    """An event with the keys that torch's have besides; stalloc records nothing for them."""
    return {**event, "compile_context": "N/A", "user_metadata": ""}


def _segments(controller: Controller, call_sites: CallSites) -> list[dict[str, Any]]:
    found = segments(controller.state)
    stacks = {}
    if call_sites.is_on:
        addresses = live_addresses(controller.state)
        stacks = dict(zip(addresses, call_sites.stacks_at(controller.state.address, addresses), strict=True))
    return [_segment(controller.device.index, segment, stacks) for segment in found]


def _segment(device: int, segment: HeapSegment, stacks: Mapping[int, Stack]) -> dict[str, Any]:
    live = [block for block in segment.blocks if block.state in (constants.BLOCK_LIVE, constants.BLOCK_SHARED)]
    active = [block for block in segment.blocks if block.state != constants.BLOCK_FREE]
    return {
        "device": device,
        "address": segment.address,
        "total_size": segment.size_bytes,
        "allocated_size": sum(block.size_bytes for block in live),
        "active_size": sum(block.size_bytes for block in active),
        "requested_size": sum(block.requested_bytes for block in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.kind == constants.SMALL_KIND else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [_block(block, stacks.get(block.address, [])) for block in segment.blocks],
    }


def _block(block: HeapBlock, stack: Stack) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size_bytes,
        "requested_size": block.requested_bytes,
        "state": _STATES[block.state],
        "frames": stack,
    }
