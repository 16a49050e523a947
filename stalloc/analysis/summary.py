"""One device of a trace in figures: requests, peaks, fragmentation, the lower bound of every plan, steps and classes.

Contract: bytes are integers, and what the source does not tell is None. Fields are in the order in which they are
shown, and have the names that JSON gives them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.analysis.moments import allocated_peak, count_events, recorded
from stalloc.lifespans import Total, classify, find_period, find_step_period, fold, sequence_keys, sequence_rows
from stalloc.lifespans.roles import repeated_blocks
from stalloc.lifespans.steady_step import outermost
from stalloc.trace import Trace
from stalloc.trace.operations import Role, read_operations

_MIN_REPEATS, _MIN_PERIOD = 3, 32  # of a period worth the name: runs of equal layers are shorter


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one device of a trace."""

    device: int
    source: str
    complete: bool
    """Whether recording began before the first allocation."""
    events: int
    requests: int
    baseline_requests: int
    """Requests that were live before recording began."""
    distinct_sizes: int
    lower_bound_bytes: int
    """The allocated peak, below which no plan can be."""
    allocated_peak_bytes: int
    allocated_peak_event: int | None
    allocated_peak_requested_bytes: int
    """The allocated peak of sizes as they were requested, without rounding."""
    reserved_peak_bytes: int | None
    reserved_peak_event: int | None
    """-1: before the first event."""
    unseen_bytes: int
    """Live throughout, told only as a total: no request stands for it."""
    fragmentation: float | None
    """1 - allocated peak / reserved peak, what is told only as a total among the allocated."""
    out_of_memory_event: int | None
    """The last out-of-memory error, None if there was none."""
    out_of_memory_bytes: int | None
    """The bytes that were asked for at that error."""
    streams: int
    period_requests: int | None
    """Requests in a period of the sequence that repeats at the end of the record."""
    period_repeats: int | None
    step_requests: int | None
    """Requests in the step that the runtime would plan."""
    step_repeats: int | None
    classes: dict[str, Total]
    """By the lower-case name of the class."""
    operations: int | None
    """Outermost operations with kernels of their own; None where the record has no operations."""
    modules: int | None
    blocks: dict[str, int]
    """Repeated blocks of the program's models, by class."""
    roles: dict[str, Total]
    """By the name of the role, as people read it."""
    has_history: bool
    """Whether the file tells what happened over time, not only the state at one moment."""
    notes: list[str]


def summarize(trace: Trace, alignment: int = 512) -> Summary:
    """Describe one device, with sizes rounded up to `alignment` bytes."""
    size = trace.aligned_size(alignment)
    peak, told = allocated_peak(trace, size), recorded(trace, alignment)
    everything = sequence_keys(trace, sequence_rows(trace, 0))
    period = find_period(everything, _MIN_REPEATS, _MIN_PERIOD, at_end=True)
    step = find_step_period(trace)
    return Summary(
        device=trace.device,
        source=str(trace.info.get("source", "")),
        complete=bool(trace.info.get("complete", False)),
        events=count_events(trace),
        requests=trace.num_requests,
        baseline_requests=trace.num_baseline_requests,
        distinct_sizes=len(np.unique(trace.size)),
        lower_bound_bytes=peak.num_bytes,
        allocated_peak_event=peak.event if trace.num_requests else None,
        allocated_peak_requested_bytes=allocated_peak(trace, trace.size).num_bytes,
        **vars(told),
        streams=len(trace.streams),
        period_requests=period.length if period else None,
        period_repeats=period.repeats if period else None,
        step_requests=step.length if step else None,
        step_repeats=step.repeats if step else None,
        classes=classify(trace, fold(trace, period=step) if step else None).totals(trace.size),
        **_known_of_operations(trace),
        has_history=trace.info.get("history") is not False,
        notes=list(trace.info.get("notes", [])),
    )


def _known_of_operations(trace: Trace) -> dict[str, Any]:
    operations = read_operations(trace)
    if operations is None:
        return {"operations": None, "modules": None, "blocks": {}, "roles": {}}
    roles = {}
    for role in Role:
        rows = np.flatnonzero(operations.role == role)
        if len(rows):
            roles[role.text] = Total(len(rows), int(trace.size[rows].sum()))
    return {
        "operations": int(np.count_nonzero(outermost(operations))),
        "modules": len(operations.modules),
        "blocks": {blocks.kind: len(blocks.rows) for blocks in repeated_blocks(operations)},
        "roles": roles,
    }
