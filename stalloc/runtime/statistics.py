"""What a run was like, in numbers: for reports, for errors, and for the statistics that torch is asked for."""

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalloc.core.constants import BLOCK_FREE
from stalloc.core.records import Peaks
from stalloc.core.snapshot import counts, inactive, segments
from stalloc.core.state import DeviceState, Step
from stalloc.device import Device

if TYPE_CHECKING:
    from stalloc.runtime.controller import Controller

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Report:
    """One device's run. Bytes are rounded up to 512 a request, as torch counts them; None where there is no figure."""

    device: int
    device_name: str
    phase: str  #: what the device was at in the end
    note: str  #: why, if that is not the plan
    steps: int  #: steps seen: marks of the program, or passes over the plan where it set none
    planned_steps: int  #: whole steps served from the plan
    requests_per_step: int  #: requests over 512 bytes in a step of the plan
    hit_rate: float | None  #: share of those served from the plan, from the second planned step on
    hits: int
    misses: int
    conflicts: int  #: planned requests whose place was still taken
    allocated_peak_bytes: int  #: over the planned steps; over the whole run if there were none
    reserved_peak_bytes: int
    observed_allocated_peak_bytes: int | None  #: over the steps before the plan
    observed_reserved_peak_bytes: int | None
    plan_peak_bytes: int | None  #: the arena
    lower_bound_bytes: int | None  #: of what the arena holds
    plan_method: str | None
    plans_made: int
    step_ms: float | None  #: median host time of a planned step
    observed_step_ms: float | None  #: median host time of a step before the plan
    segment_allocs: int
    segment_frees: int
    retries: int
    out_of_memory_errors: int
    unknown_frees: int

    @property
    def fragmentation(self) -> float:
        """1 - allocated / reserved, at their peaks."""
        return 1 - self.allocated_peak_bytes / self.reserved_peak_bytes if self.reserved_peak_bytes else 0.0


def _planned_steps(controller: "Controller") -> list[Step]:
    """The whole passes over the ring, the one that just ended included."""
    state, steps = controller.state, controller.state.steps()
    hits = state.record.hits - state.record.hits_before
    seen = hits + state.record.step_misses
    length = state.record.ring_end - state.record.ring_start
    if state.record.cursor == state.record.ring_start and seen >= length > 0:
        peaks = state.record.step_allocated_peak, state.record.step_reserved_peak
        steps.append(Step(0, hits, state.record.step_misses, *peaks))
    return steps


def _median_ms(times_ns: list[int]) -> float | None:
    gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(times_ns)]
    return statistics.median(gaps) if gaps else None


def report(controller: "Controller") -> Report:
    """The figures of a device so far."""
    state, plan, observed = controller.state, controller.status.plan, controller.status.observed
    steps = _planned_steps(controller) if plan is not None else []
    counted = steps[1:] or steps
    served = sum(step.hits for step in counted)
    asked = served + sum(step.misses for step in counted)
    marks, begin = controller.recording.step_times_ns, controller.status.planned_since_ns
    before = [time for time in marks if begin is None or time < begin]
    after = [time for time in marks if begin is not None and time >= begin]
    if not marks:
        after = [step.end_ns for step in steps if step.end_ns]
    per_ring = controller.status.steps_per_ring
    step_ms = _median_ms(after)
    if step_ms is not None and not marks:
        step_ms /= per_ring
    return Report(
        device=controller.device.index,
        device_name=controller.device.name,
        phase=controller.status.phase.value,
        note=controller.status.note,
        steps=len(marks) or controller.status.observed_steps + len(steps) * per_ring,
        planned_steps=len(steps) * per_ring,
        requests_per_step=(len(plan.tape_size) - plan.num_prologue) // per_ring if plan is not None else 0,
        hit_rate=served / asked if asked else None,
        hits=state.record.hits,
        misses=state.record.misses,
        conflicts=state.record.conflicts,
        allocated_peak_bytes=state.allocated_peak_bytes,
        reserved_peak_bytes=state.reserved_peak_bytes,
        observed_allocated_peak_bytes=observed.allocated_peak_bytes if observed is not None else None,
        observed_reserved_peak_bytes=observed.reserved_peak_bytes if observed is not None else None,
        plan_peak_bytes=plan.peak_bytes if plan is not None else None,
        lower_bound_bytes=plan.lower_bound_bytes if plan is not None else None,
        plan_method=plan.method if plan is not None else None,
        plans_made=controller.status.num_plans,
        step_ms=step_ms,
        observed_step_ms=_median_ms(before),
        segment_allocs=state.record.num_segment_allocs,
        segment_frees=state.record.num_segment_frees,
        retries=state.record.num_retries,
        out_of_memory_errors=state.record.num_ooms,
        unknown_frees=state.record.num_unknown_frees,
    )


def out_of_memory_text(device: Device, state: DeviceState, size_bytes: int) -> str:
    """What an out-of-memory error says: what was asked for, what there is, what to try."""
    record = state.record
    free, total = device.memory_info()
    blocks = [block for segment in segments(state) for block in segment.blocks]
    live = sorted((block.requested_bytes for block in blocks), reverse=True)[:5]
    largest = ", ".join(f"{size / GIB:.2f} GiB" for size in live if size)
    largest_free = max((block.size_bytes for block in blocks if block.state == BLOCK_FREE), default=0)
    arena = f", {state.record.arena_bytes / GIB:.2f} GiB of it the plan's arena" if state.record.arena_bytes else ""
    return (
        f"stalloc: out of memory on device {device.index} "
        f"({device.name}, {total / GIB:.2f} GiB): "
        f"tried to allocate {size_bytes / GIB:.2f} GiB ({size_bytes} bytes). "
        f"Allocated {record.total.allocated_bytes / GIB:.2f} GiB, "
        f"reserved {record.reserved_bytes / GIB:.2f} GiB{arena}, "
        f"free on the device {free / GIB:.2f} GiB, largest free range {largest_free / GIB:.2f} GiB"
        f"{f', largest live blocks {largest}' if largest else ''}. "
        "To see what the program needs, run it on a virtual GPU: stalloc dryrun SCRIPT."
    )


_POOLS = ("all", "large_pool", "small_pool")
_Counters = dict[str, dict[str, int]]  # by pool: current, peak, allocated, freed


def _counters(current: list[int], peak: list[int], ever: list[int]) -> _Counters:
    """From what is counted now and was ever in both pools and in the small one; peaks of both, the large, the small."""
    (both, small), (both_ever, small_ever) = current, ever
    rows = zip((both, both - small, small), peak, (both_ever, both_ever - small_ever, small_ever), strict=True)
    return {
        pool: {"current": now, "peak": max(now, peak), "allocated": total, "freed": total - now}
        for pool, (now, peak, total) in zip(_POOLS, rows, strict=True)
    }


def _without_history(current: int = 0) -> dict[str, int]:
    return {"current": current, "peak": current, "allocated": 0, "freed": 0}


def _free_ranges(both: int, small: int) -> _Counters:
    return {pool: _without_history(now) for pool, now in zip(_POOLS, (both, both - small, small), strict=True)}


def _three(peaks: Peaks) -> list[int]:
    return [peaks.total, peaks.large, peaks.small]


def _highest(first: list[int], second: list[int]) -> list[int]:
    return [max(pair) for pair in zip(first, second, strict=True)]


def torch_statistics(controller: "Controller") -> dict[str, Any]:
    """torch.cuda.memory_stats' nested counters, as torch._C._cuda_memoryStats gives them.

    Peaks of what lies free beside live blocks are not kept: those stand for what is free now.
    """
    now, free = counts(controller.state), inactive(controller.state)
    total, large, small = now.total, now.large, now.small
    byte_peaks = [total.allocated_peak, large.allocated_peak, small.allocated_peak]
    block_peaks = [total.live_peak, large.live_peak, small.live_peak]
    bytes_ever = [large.allocated_ever + small.allocated_ever, small.allocated_ever]
    blocks_ever = [total.num_allocs, small.num_allocs]
    return {
        "allocated_bytes": _counters([total.allocated_bytes, small.allocated_bytes], byte_peaks, bytes_ever),
        "active_bytes": _counters(
            [total.allocated_bytes + now.deferred_bytes, small.allocated_bytes + now.small_deferred_bytes],
            _highest(byte_peaks, _three(now.active_bytes_peak)),
            bytes_ever,
        ),
        "reserved_bytes": _counters(
            [now.reserved_bytes, now.small_reserved_bytes],
            _three(now.reserved_peak),
            [now.reserved_ever, now.small_reserved_ever],
        ),
        "requested_bytes": _counters(
            [total.requested_bytes, small.requested_bytes],
            [total.requested_peak, large.requested_peak, small.requested_peak],
            [large.requested_ever + small.requested_ever, small.requested_ever],
        ),
        "allocation": _counters([total.num_live, small.num_live], block_peaks, blocks_ever),
        "active": _counters(
            [total.num_live + now.num_deferred, small.num_live + now.small_deferred],
            _highest(block_peaks, _three(now.active_blocks_peak)),
            blocks_ever,
        ),
        "segment": _counters(
            [now.num_segments, now.small_segments],
            _three(now.segments_peak),
            [now.segments_ever, now.small_segments_ever],
        ),
        "inactive_split_bytes": _free_ranges(free.size_bytes, free.small_bytes),
        "inactive_split": _free_ranges(free.number, free.small_number),
        "oversize_allocations": _without_history(),
        "oversize_segments": _without_history(),
        "num_alloc_retries": now.num_retries,
        "num_ooms": now.num_ooms,
        "max_split_size": -1,
        "num_sync_all_streams": 0,
        "num_device_alloc": now.segments_ever,
        "num_device_free": now.segments_ever - now.num_segments,
    }
