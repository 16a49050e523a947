"""Programs for the models: what a trace says was asked for, without what its own allocator made of it.

Upheld: what was live before recording is allocated first, in the order of its addresses where they are known.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.replay.protocol import Events, Kind
from stalloc.trace.record import MARK_STEP, Action, Trace

_MAX_LOAD_BYTES = 1 << 47
_OF_TORCH = ("torch snapshot", "memory_viz page")
_KINDS = np.full(len(Action), -1, np.int8)
_KINDS[[Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED]] = (
    Kind.ALLOC,
    Kind.FREE_REQUESTED,
    Kind.FREE_COMPLETED,
)


def recorded_kinds(trace: Trace) -> Column:
    """(m,) int8 Kind of each event that the program asked for, -1 for what its allocator did by itself."""
    return np.where(trace.event_request >= 0, _KINDS[trace.action], -1)


def recorded_conf(trace: Trace) -> str:
    """The allocator settings that a snapshot says it was recorded with, as torch's variable holds them."""
    settings = trace.info.get("allocator_settings") or {}
    return str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or "")


def of_torchs_allocator(trace: Trace) -> bool:
    """Whether the addresses and segments of a trace are those that torch's caching allocator chose.

    They are not in a recording of stalloc's own, in whatever format, or where a conversion made them up.
    """
    source = trace.info.get("converted_from") or trace.info.get("source")
    return source in _OF_TORCH and bool(len(trace.segment_address))


def events_of(trace: Trace) -> Events:
    """The requests of a trace as events, the baseline before all others.

    A trace of bare lifespans gets its frees before the allocs of the same moment. Raises BadInputError where more
    lives at a time than any device holds: models map such memory page by page.
    """
    old = trace.num_baseline_requests
    marks = np.sort(trace.mark_event[trace.mark_kind == MARK_STEP]).astype(np.int64)
    if len(trace.action):
        kinds = recorded_kinds(trace)
        rows = np.flatnonzero(kinds >= 0)
        kinds, request, event = kinds[rows], trace.event_request[rows], rows
    else:
        count = trace.num_requests
        at = np.concatenate([trace.end, trace.start])
        is_alloc = np.concatenate([np.zeros(count, np.int8), np.ones(count, np.int8)])
        row = np.concatenate([np.arange(count), np.arange(count)])
        order = np.lexsort((row, is_alloc, at))
        order = order[(at[order] >= 0) & (is_alloc[order].astype(bool) | (at[order] < trace.num_events))]
        kinds = np.where(is_alloc[order], Kind.ALLOC, Kind.FREE_COMPLETED).astype(np.int8)
        request, event = row[order], at[order]
    events = Events(
        kind=np.concatenate([np.full(old, Kind.ALLOC, np.int8), kinds]),
        request=np.concatenate([np.arange(old), request]).astype(np.int64),
        event=np.concatenate([np.full(old, -1), event]).astype(np.int64),
        size=trace.size,
        stream=trace.stream,
        step_marks=marks if len(marks) else None,
    )
    _check_load(events)
    return events


def _check_load(events: Events) -> None:
    sign = (events.kind == int(Kind.ALLOC)).astype(np.int64) - (events.kind == int(Kind.FREE_COMPLETED))
    load = int(np.cumsum(sign * events.size[events.request]).max(initial=0))
    if load > _MAX_LOAD_BYTES:
        raise BadInputError(f"{load} bytes live at a time, which no device holds: correct the sizes of the trace.")
