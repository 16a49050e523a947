"""Several kinds of steps in one arena, each with a plan of its own, or two that its steps alternate between.

Contract: whichever kind follows whichever, no two planned requests that are live together share a byte, as long as the
steps are as they were observed; and no two streams share a byte of the arena, in which each has a region. What a step
carries over (gradients until they are zeroed, a batch that is replaced) has places that all kinds share
(carried_over.py). The validator judges all of this by the plans' own columns (planner/kinds_check.py).
"""

from dataclasses import dataclass, replace

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.lifespans.units import StepKind
from stalloc.planner import Layout, Plan
from stalloc.planner.carried_over import carried_over
from stalloc.planner.cycle import cycle_bound
from stalloc.planner.region_plan import RegionPlan, plan_region
from stalloc.sizes import ALIGNMENT_BYTES, aligned


@dataclass(frozen=True, eq=False, kw_only=True)
class KindPlans:
    """The plans of several kinds of steps, and what goes into their arena."""

    kinds: list[StepKind]
    num_buffers: int  #: plans that each kind has
    switches_buffers: list[bool]  #: for each kind, whether those of the other buffer are followed after a step of it
    plans: list[Plan]
    """One a kind for each buffer, those of the first buffer first; of one peak. The cycle is a step, with one entry a
    request; its clock begins at 1 and ends one after the last request. The prologue holds the places that are kept for
    what earlier steps carry over, for each buffer one a rank (of size 0: the one of the first buffer)."""
    begins: list[int]  #: where each plan's rows begin, if the cycles of all are laid one after the other

    @property
    def size(self) -> Column:
        """(k,) requested bytes, over all kinds."""
        return self._cycles("schedule_size")

    @property
    def stream(self) -> Column:
        """(k,) stream indices."""
        return self._cycles("schedule_stream")

    @property
    def offset(self) -> Column:
        """(k,) bytes; -1: not planned, since the end is not known, or what it replaces is not gone yet."""
        return self._cycles("schedule_offset")

    def _cycles(self, name: str) -> Column:
        return np.concatenate([getattr(plan, name)[plan.num_prologue :] for plan in self.plans])

    @property
    def peak_bytes(self) -> int:
        """The size of the arena."""
        return self.plans[0].peak_bytes

    @property
    def lower_bound_bytes(self) -> int:
        """The largest maximum load of any kind."""
        return max(plan.lower_bound_bytes for plan in self.plans)

    @property
    def largest_plan(self) -> Plan:
        """The plan of the kind with the most requests, for reports; its lower bound is that of the whole arena."""
        largest = max(self.plans, key=lambda plan: len(plan.schedule_size))
        return replace(largest, lower_bound_bytes=self.lower_bound_bytes)


def plan_steps(
    kinds: list[StepKind], made: dict[bytes, Layout], device: int = 0, *, double_buffered: bool = False
) -> KindPlans:
    """Plan several kinds of steps for one arena, in which every stream has a region that no other stream uses.

    `made` holds the layouts of earlier calls, and gets those of this one, so that a kind that is added is all there is
    to plan. With `double_buffered` each kind gets two plans where that gives more requests a place; whoever serves them
    has to know when a step ends.
    """
    streams = distinct(np.concatenate([kind.stream[kind.end > 0] for kind in kinds]))
    carried = carried_over(kinds, streams.tolist(), double_buffered=double_buffered)
    regions = [plan_region(kinds, one, made) for one in carried]
    num_buffers = max(one.num_buffers for one in carried)
    plans = [
        _plan_of(kinds, index, buffer, num_buffers, regions, device)
        for buffer in range(num_buffers)
        for index in range(len(kinds))
    ]
    begins = [0, *np.cumsum([len(kind.size) for kind in kinds] * num_buffers)[:-1].tolist()]
    return KindPlans(
        kinds=kinds, num_buffers=num_buffers, switches_buffers=carried[0].switches_buffers, plans=plans, begins=begins
    )


def _plan_of(
    kinds: list[StepKind], index: int, buffer: int, num_buffers: int, regions: list[RegionPlan], device: int
) -> Plan:
    """The plan of one kind of step in the arena of all: the places kept for it, then its requests."""
    kind, peak = kinds[index], sum(region.peak_bytes for region in regions)
    length = len(kind.size)
    offset, left_until = np.full(length, -1, np.int64), np.zeros(length, np.int64)
    places: list[tuple[Column, ...]] = []  # stream, size, offset and end of what is kept
    begin = 0
    for region in regions:
        carried = region.carried
        own, keeping = region.offset[min(buffer, carried.num_buffers - 1)][index], carried.keeping(index, buffer)
        offset[own >= 0] = own[own >= 0] + begin
        left_until[keeping.own] = np.maximum(keeping.until[keeping.home], 0)
        ends = np.where(keeping.until >= length, length + 2, keeping.until + 1)
        for number in range(num_buffers):
            rows = carried.places(number)
            size = np.where(carried.has_two | (number == 0), carried.size[rows], 0)
            places.append((np.full(len(rows), carried.stream), size, region.place_offset[rows] + begin, ends[rows]))
        begin += region.peak_bytes
    stream, size, place, end = (np.concatenate(columns) for columns in zip(*places, strict=True))
    # a step lasts one tick longer than its requests, in which what it carries over lives still
    cycle_start, cycle_end, rows = 1, length + 2, np.arange(length, dtype=np.int64)
    last = np.where(kind.end > length, np.minimum(cycle_end + left_until, cycle_end + rows), kind.end + 1)
    schedule_start = np.concatenate([np.zeros(len(end), np.int64), rows + 1])
    schedule_end = np.concatenate([end, np.where(kind.end > 0, last, rows + 1)])
    schedule_size, schedule_offset = np.concatenate([size, kind.size]), np.concatenate([place, offset])
    counted = (schedule_offset >= 0) & (schedule_start < schedule_end) & (schedule_size > 0)
    times = schedule_start[counted], schedule_end[counted]
    bound = cycle_bound(*times, aligned(schedule_size[counted]), cycle_start, cycle_end) if counted.any() else 0
    schedule_stream = np.concatenate([stream, kind.stream])
    return Plan(
        offset=schedule_offset,
        size=schedule_size,
        start=schedule_start,
        end=schedule_end,
        stream=schedule_stream,
        device=device,
        alignment=ALIGNMENT_BYTES,
        peak_bytes=peak,
        lower_bound_bytes=bound,
        optimal=False,
        method=f"{len(kinds)} kinds of steps, {next((region.method for region in regions if region.method), '')}",
        kind="program",
        provenance={},
        num_prologue=len(end),
        cycle_start=cycle_start,
        cycle_end=cycle_end,
        schedule_row=np.arange(len(schedule_size), dtype=np.int64),
        schedule_size=schedule_size,
        schedule_stream=schedule_stream,
        schedule_start=schedule_start,
        schedule_end=schedule_end,
        schedule_offset=schedule_offset,
    )
