"""What a run was like, in numbers: for reports, for errors, and for the statistics that torch is asked for."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stalloc.core.records import Peaks
from stalloc.core.snapshot import counts, inactive
from stalloc.core.state import Step
from stalloc.device.known_gpus import shown_name
from stalloc.figures import fragmentation, html_table, human_bytes
from stalloc.runtime.runtime_settings import Observed, Phase

if TYPE_CHECKING:
    from stalloc.runtime.controller import Controller


@dataclass(frozen=True, kw_only=True)
class Report:
    """One device's run. Bytes are rounded up to 512 a request, as torch counts them; None where there is no figure."""

    device: int
    device_name: str
    device_kind: str  #: "cuda" or "virtual"
    phase: str  #: what the device was at in the end
    note: str  #: why, if that is not the plan
    steps: int  #: steps seen: marks of the program, or iterations over the plan where it set none
    watched_steps: int  #: before the last plan was put in force; all of them if none was
    planned_steps: int  #: whole steps while a plan was in force: of all plans where the program marks steps
    requests_per_step: int  #: requests over 512 bytes in a step of the plan, on average of those in its cycle
    planned_passes: int  #: whole iterations over the last plan
    hit_rate: float | None  #: share of those served from the plan, from its second iteration on; else of the whole run
    hits: int  #: since the last plan was put in force
    misses: int
    conflicts: int  #: planned requests whose place was still taken
    dynamic_requests: int  #: those that steps have beside the plan, of sizes that differ; of no hit rate
    run_hits: int  #: of all plans
    run_misses: int  #: what the plans did not serve while they were in force, those included whose place was taken
    run_allocated_peak_bytes: int  #: over the whole run
    run_reserved_peak_bytes: int
    end_allocated_bytes: int  #: when the report is made
    end_reserved_bytes: int
    allocated_peak_bytes: int  #: over the planned steps; over the whole run if there were none
    reserved_peak_bytes: int
    observed_allocated_peak_bytes: int | None  #: over the steps before the plan
    observed_reserved_peak_bytes: int | None
    plan_peak_bytes: int | None  #: the arena
    lower_bound_bytes: int | None  #: of what the arena holds
    plan_method: str | None
    plans_made: int
    plans_dropped: int  #: given up since the program no longer followed them
    dropped_note: str  #: why the last of those was
    step_ms: float | None  #: median host time of a planned step
    observed_step_ms: float | None  #: median host time of a step before the plan
    segment_allocs: int
    segment_frees: int
    retries: int
    out_of_memory_errors: int
    unknown_frees: int

    def __repr__(self) -> str:
        reserved, allocated = human_bytes(self.run_reserved_peak_bytes), human_bytes(self.run_allocated_peak_bytes)
        return f"<Report of device {self.device}: {self.phase}, reserved {reserved}, allocated {allocated} at the peak>"

    def _repr_html_(self) -> str:
        rows = [
            ("state", self.phase),
            ("steps", f"{self.steps:,}, {self.planned_steps:,} of them whole on the plan"),
            ("allocated peak", human_bytes(self.run_allocated_peak_bytes)),
            ("reserved peak", human_bytes(self.run_reserved_peak_bytes)),
            ("reserved now", human_bytes(self.end_reserved_bytes)),
            ("fragmentation", f"{self.fragmentation:.2%}"),
        ]
        return html_table(f"device {self.device}: {shown_name(self.device_kind, self.device_name)}", rows)

    @property
    def fragmentation(self) -> float:
        return fragmentation(self.run_allocated_peak_bytes, self.run_reserved_peak_bytes)


def _planned_steps(controller: "Controller") -> list[Step]:
    state, steps = controller.state, controller.state.steps()
    hits = state.record.follow.hits - state.record.iterations.hits_before
    seen = hits + state.record.iterations.iteration_misses
    length = state.record.follow.cycle_end - state.record.follow.cycle_start
    if state.record.follow.cursor == state.record.follow.cycle_start and seen >= length > 0:
        peaks = state.record.hot.iteration_allocated_peak, state.record.iterations.iteration_reserved_peak
        steps.append(Step(0, hits, state.record.iterations.iteration_misses, *peaks))
    return steps


def _steps_per_iteration(controller: "Controller", num_marks: int, num_iterations: int) -> int:
    """Marked steps in one iteration over the plan; of a plan from a file its iterations and the marks tell."""
    return controller.steps.places.num_in_cycle or max(1, round(num_marks / max(1, num_iterations)))


def _median_ms(times_ns: Sequence[int]) -> float | None:
    gaps = np.diff(np.array(times_ns, np.int64))
    return float(np.median(gaps)) / 1e6 if len(gaps) else None


_SETTLED = "served without a plan, settled"
_LONG = 50  # marked steps after which a plan is hardly to come any more


def _phase(controller: "Controller", num_marks: int) -> str:
    phase = controller.status.phase
    if phase is Phase.OBSERVING and (controller.status.is_settled or num_marks >= _LONG):
        return _SETTLED
    return phase.value


def run_peaks(controller: "Controller") -> tuple[int, int]:
    """The most bytes allocated and reserved over the whole run.

    The peaks of the core begin anew with each plan, and the program may have reset those that torch shows.
    """
    state, observed = controller.state, controller.status.observed or Observed()
    return (
        max(state.told_peak_bytes, state.allocated_peak_bytes, observed.allocated_peak_bytes),
        max(state.record.statistics.reserved_peak.total, state.reserved_peak_bytes, observed.reserved_peak_bytes),
    )


def run_counts(controller: "Controller") -> tuple[int, int]:
    state, status = controller.state, controller.status
    return status.earlier_hits + state.record.follow.hits, status.earlier_misses + state.num_unserved


def report(controller: "Controller") -> Report:
    state, status, device, record = controller.state, controller.status, controller.device, controller.state.record
    plan, observed, counted_by_core = status.plan, status.observed, record.statistics
    steps = _planned_steps(controller) if plan is not None else []
    counted = steps[1:] or steps
    served = sum(step.hits for step in counted)
    asked = served + sum(step.misses for step in counted)
    marks, begin = controller.recording.step_times_ns, status.planned_since_ns
    num_before = len(marks) if begin is None else bisect_left(marks, begin)
    before = marks[:num_before]
    after = marks[num_before:] if marks else [step.end_ns for step in steps if step.end_ns]
    per_cycle = _steps_per_iteration(controller, len(after), len(steps)) if marks else status.steps_per_cycle
    step_ms = _median_ms(after)
    if step_ms is not None and not marks:
        step_ms /= per_cycle
    (run_hits, run_misses), (allocated_peak, reserved_peak) = run_counts(controller), run_peaks(controller)
    if not asked:  # the last plan came late: what those before it served
        served, asked = run_hits, run_hits + run_misses
    return Report(
        device=device.index,
        device_name=device.name,
        device_kind=device.kind,
        phase=_phase(controller, len(marks)),
        note=status.note,
        steps=len(marks) or status.observed_steps + len(steps) * per_cycle,
        watched_steps=len(before) if marks else status.observed_steps,
        planned_steps=controller.recording.num_planned if marks else len(steps) * per_cycle,
        planned_passes=len(steps),
        requests_per_step=(len(plan.schedule_size) - plan.num_prologue) // per_cycle if plan is not None else 0,
        hit_rate=served / asked if asked else None,
        hits=record.follow.hits,
        misses=record.iterations.misses,
        conflicts=record.iterations.conflicts,
        dynamic_requests=record.dynamic.num_dynamic,
        run_hits=run_hits,
        run_misses=run_misses,
        run_allocated_peak_bytes=allocated_peak,
        run_reserved_peak_bytes=reserved_peak,
        end_allocated_bytes=record.total.allocated_bytes,
        end_reserved_bytes=counted_by_core.reserved_bytes,
        allocated_peak_bytes=state.allocated_peak_bytes,
        reserved_peak_bytes=state.reserved_peak_bytes,
        observed_allocated_peak_bytes=observed.allocated_peak_bytes if observed is not None else None,
        observed_reserved_peak_bytes=observed.reserved_peak_bytes if observed is not None else None,
        plan_peak_bytes=plan.peak_bytes if plan is not None else None,
        lower_bound_bytes=plan.lower_bound_bytes if plan is not None else None,
        plan_method=plan.method if plan is not None else None,
        plans_made=status.num_plans,
        plans_dropped=status.num_dropped,
        dropped_note=status.dropped_note,
        step_ms=step_ms,
        observed_step_ms=_median_ms(before),
        segment_allocs=counted_by_core.num_segment_allocs,
        segment_frees=counted_by_core.num_segment_frees,
        retries=counted_by_core.num_retries,
        out_of_memory_errors=counted_by_core.num_ooms,
        unknown_frees=counted_by_core.num_unknown_frees,
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


def _three(peaks: Peaks, others: Sequence[int] = (0, 0, 0)) -> list[int]:
    return [max(pair) for pair in zip((peaks.total, peaks.large, peaks.small), others, strict=True)]


def torch_statistics(controller: "Controller") -> dict[str, Any]:
    """torch.cuda.memory_stats' nested counters, as torch._C._cuda_memoryStats gives them.

    Peaks of what lies free beside live blocks are not kept: those stand for what is free now.
    """
    now, free = counts(controller.state), inactive(controller.state)
    total, large, small, shared, held = now.total, now.large, now.small, now.shared, now.statistics
    byte_peaks = [controller.state.told_peak_bytes, large.allocated_peak, small.allocated_peak]
    block_peaks = [total.live_peak, large.live_peak, small.live_peak]
    bytes_ever = [large.allocated_ever + small.allocated_ever, small.allocated_ever]
    blocks_ever = [total.num_allocs, small.num_allocs]
    return {
        "allocated_bytes": _counters([total.allocated_bytes, small.allocated_bytes], byte_peaks, bytes_ever),
        "active_bytes": _counters(
            [total.allocated_bytes + shared.deferred_bytes, small.allocated_bytes + shared.small_deferred_bytes],
            _three(shared.active_bytes_peak, byte_peaks),
            bytes_ever,
        ),
        "reserved_bytes": _counters(
            [held.reserved_bytes, held.small_reserved_bytes],
            _three(held.reserved_peak),
            [held.reserved_ever, held.small_reserved_ever],
        ),
        "requested_bytes": _counters(
            [total.requested_bytes, small.requested_bytes],
            [total.requested_peak, large.requested_peak, small.requested_peak],
            [large.requested_ever + small.requested_ever, small.requested_ever],
        ),
        "allocation": _counters([total.num_live, small.num_live], block_peaks, blocks_ever),
        "active": _counters(
            [total.num_live + now.hot.num_deferred, small.num_live + shared.small_deferred],
            _three(shared.active_blocks_peak, block_peaks),
            blocks_ever,
        ),
        "segment": _counters(
            [held.num_segments, held.small_segments],
            _three(held.segments_peak),
            [held.segments_ever, held.small_segments_ever],
        ),
        "inactive_split_bytes": _free_ranges(free.size_bytes, free.small_bytes),
        "inactive_split": _free_ranges(free.number, free.small_number),
        "oversize_allocations": _without_history(),
        "oversize_segments": _without_history(),
        "num_alloc_retries": held.num_retries,
        "num_ooms": held.num_ooms,
        "max_split_size": -1,
        "num_sync_all_streams": 0,
        "num_device_alloc": held.segments_ever,
        "num_device_free": held.segments_ever - held.num_segments,
    }
