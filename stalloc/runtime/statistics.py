"""What a run was like, in numbers: for reports, for errors, and for the statistics that torch is asked for."""

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalloc.runtime.state import Step

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
    seen = state["STEP_HITS"] + state["STEP_MISSES"]
    length = state["TAPE_LENGTH"] - state["RING_START"]
    if state["CURSOR"] == state["RING_START"] and seen >= length > 0:
        peaks = state["STEP_ALLOCATED_PEAK"], state["STEP_RESERVED_PEAK"]
        steps.append(Step(0, state["STEP_HITS"], state["STEP_MISSES"], *peaks))
    return steps


def _median_ms(times_ns: list[int]) -> float | None:
    gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(times_ns)]
    return statistics.median(gaps) if gaps else None


def report(controller: "Controller") -> Report:
    """The figures of a device so far."""
    state, plan, observed = controller.state, controller.plan, controller.observed
    steps = _planned_steps(controller) if plan is not None else []
    counted = steps[1:] or steps
    served = sum(step.hits for step in counted)
    asked = served + sum(step.misses for step in counted)
    marks, begin = controller.step_times_ns, controller.planned_since_ns
    before = [time for time in marks if begin is None or time < begin]
    after = [time for time in marks if begin is not None and time >= begin]
    if not marks:
        after = [step.end_ns for step in steps if step.end_ns]
    per_ring = controller.steps_per_ring
    step_ms = _median_ms(after)
    if step_ms is not None and not marks:
        step_ms /= per_ring
    return Report(
        device=controller.device.index,
        device_name=controller.device.name,
        phase=controller.phase.value,
        note=controller.note,
        steps=len(marks) or controller.observed_steps + len(steps) * per_ring,
        planned_steps=len(steps) * per_ring,
        requests_per_step=(len(plan.tape_size) - plan.num_prologue) // per_ring if plan is not None else 0,
        hit_rate=served / asked if asked else None,
        hits=state["HITS"],
        misses=state["MISSES"],
        conflicts=state["CONFLICTS"],
        allocated_peak_bytes=state.span_peak("ALLOCATED"),
        reserved_peak_bytes=state.span_peak("RESERVED"),
        observed_allocated_peak_bytes=observed.allocated_peak_bytes if observed is not None else None,
        observed_reserved_peak_bytes=observed.reserved_peak_bytes if observed is not None else None,
        plan_peak_bytes=plan.peak_bytes if plan is not None else None,
        lower_bound_bytes=plan.lower_bound_bytes if plan is not None else None,
        plan_method=plan.method if plan is not None else None,
        plans_made=controller.num_plans,
        step_ms=step_ms,
        observed_step_ms=_median_ms(before),
        segment_allocs=state["NUM_SEGMENT_ALLOCS"],
        segment_frees=state["NUM_SEGMENT_FREES"],
        retries=state["NUM_RETRIES"],
        out_of_memory_errors=state["NUM_OOMS"],
        unknown_frees=state["NUM_UNKNOWN_FREES"],
    )


def out_of_memory_text(controller: "Controller", size_bytes: int) -> str:
    """What an out-of-memory error says: what was asked for, what there is, what to try."""
    state = controller.state
    free, total = controller.device.memory_info()
    largest = ", ".join(f"{size / GIB:.2f} GiB" for _, size in state.live_blocks(5))
    arena = f", {state['ARENA_BYTES'] / GIB:.2f} GiB of it the plan's arena" if state["ARENA_BYTES"] else ""
    return (
        f"stalloc: out of memory on device {controller.device.index} "
        f"({controller.device.name}, {total / GIB:.2f} GiB): "
        f"tried to allocate {size_bytes / GIB:.2f} GiB ({size_bytes} bytes). "
        f"Allocated {state['ALLOCATED'] / GIB:.2f} GiB, reserved {state['RESERVED'] / GIB:.2f} GiB{arena}, "
        f"free on the device {free / GIB:.2f} GiB, largest free block {state.largest_free_bytes() / GIB:.2f} GiB"
        f"{f', largest live blocks {largest}' if largest else ''}. "
        "To see what the program needs, run it on a virtual GPU: stalloc dryrun SCRIPT."
    )


def torch_statistics(controller: "Controller") -> dict[str, Any]:
    """torch.cuda.memory_stats' nested counters, as torch._C._cuda_memoryStats gives them."""
    state = controller.state

    def counter(current: int, peak: int | None = None, allocated: int = 0, freed: int = 0) -> dict[str, int]:
        return {
            "current": current,
            "peak": current if peak is None else peak,
            "allocated": allocated,
            "freed": freed,
        }

    def split(whole: dict[str, int]) -> dict[str, dict[str, int]]:
        # stalloc does not part small from large: the pools of one plan are one arena
        return {"all": whole, "small_pool": counter(0), "large_pool": whole}

    allocs, frees = state["NUM_ALLOCS"], state["NUM_FREES"]
    allocated = counter(state["ALLOCATED"], state["ALLOCATED_PEAK"])
    reserved = counter(state["RESERVED"], state["RESERVED_PEAK"])
    live = counter(state["NUM_LIVE"], None, allocs, frees)
    segments = counter(
        state["NUM_SEGMENT_ALLOCS"] - state["NUM_SEGMENT_FREES"] + int(state["ARENA_BYTES"] > 0),
        None,
        state["NUM_SEGMENT_ALLOCS"],
        state["NUM_SEGMENT_FREES"],
    )
    return {
        "allocated_bytes": split(allocated),
        "active_bytes": split(allocated),
        "reserved_bytes": split(reserved),
        "requested_bytes": split(counter(state["REQUESTED"], state["REQUESTED_PEAK"])),
        "inactive_split_bytes": split(counter(max(0, state["RESERVED"] - state["ALLOCATED"]))),
        "allocation": split(live),
        "active": split(live),
        "segment": split(segments),
        "inactive_split": split(counter(0)),
        "oversize_allocations": counter(0),
        "oversize_segments": counter(0),
        "num_alloc_retries": state["NUM_RETRIES"],
        "num_ooms": state["NUM_OOMS"],
        "max_split_size": -1,
        "num_sync_all_streams": 0,
        "num_device_alloc": state["NUM_SEGMENT_ALLOCS"],
        "num_device_free": state["NUM_SEGMENT_FREES"],
    }
