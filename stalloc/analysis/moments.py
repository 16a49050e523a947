"""The moments of a trace that people ask about: its peaks, its out-of-memory errors, the event that --at names.

Upheld: of the moments when most is reserved, the one with the most allocated counts. Event -1 is the start of the
recording.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.figures import fragmentation
from stalloc.lifespans import fullest, load_curve
from stalloc.trace import Action, Trace
from stalloc.trace.sites import UNKNOWN, read_sites, site_name

_NO_DEVICE_FREE = ("kineto", "rmm log")  # sources of traces


def moment_text(event: int) -> str:
    """The moment after an event as people read it; -1: before the first."""
    return f"after event {event:,}" if event >= 0 else "when recording began"


def is_oom(trace: Trace, event: int) -> bool:
    return 0 <= event < len(trace.action) and trace.action[event] == Action.OOM


def last_oom(trace: Trace) -> int | None:
    found = np.flatnonzero(trace.action == Action.OOM)
    return int(found[-1]) if len(found) else None


def device_free(trace: Trace, event: int) -> int | None:
    """What was free on the device at an out-of-memory error; None where such files do not say."""
    return None if trace.info.get("source") in _NO_DEVICE_FREE else int(trace.address[event])


def event_at(trace: Trace, at: int | str, others: str) -> int:
    """The event of an index or of "oom"; `others` names what else --at may be.

    Raises BadInputError for one that the trace does not have.
    """
    if at == "oom":
        event = last_oom(trace)
        if event is None:
            raise BadInputError(
                f"device {trace.device} has no out-of-memory event: use --at {others} or the index of an event."
            )
        return event
    try:
        event = int(at)
    except ValueError:
        raise BadInputError(f"--at is {at!r}: give {others}, oom or the index of an event.") from None
    if not 0 <= event < trace.num_events:
        raise BadInputError(f"device {trace.device} has events 0 to {trace.num_events - 1}: there is no event {event}.")
    return event


def asked_by(trace: Trace, event: int) -> str:
    """The call site of an event that asks for memory."""
    sites = read_sites(trace)
    if sites is None or sites.event_site[event] < 0:
        return UNKNOWN
    return site_name(sites.stack(int(sites.event_site[event])))


class AllocatedPeak(NamedTuple):
    """The most bytes live, and the first event after which they are; -1 in a trace without requests."""

    num_bytes: int
    event: int


class ReservedPeak(NamedTuple):
    """The moment when most is reserved."""

    event: int
    reserved_bytes: int
    allocated_bytes: int


def live_rows(trace: Trace, event: int) -> Column:
    """The requests that live after an event; none for -1."""
    return np.flatnonzero((np.maximum(trace.start, 0) <= event) & (trace.end > event))


def allocated_peak(trace: Trace, size: Column) -> AllocatedPeak:
    """The allocated peak, given (n,) bytes."""
    events, live = load_curve(np.maximum(trace.start, 0), trace.end, size)
    return AllocatedPeak(int(live.max()), int(events[np.argmax(live)])) if len(events) else AllocatedPeak(0, -1)


def reserved_peak(trace: Trace, size: Column, unseen_bytes: int = 0) -> ReservedPeak | None:
    """The moment when most is reserved, given (n,) bytes and those that are live throughout without a request.

    None where the trace does not say what was reserved.
    """
    if not len(trace.action):
        return None
    reserved = np.append(trace.reserved_start_bytes, trace.reserved_bytes())
    allocated = trace.live_bytes(size) + unseen_bytes
    at = fullest(reserved, allocated)
    return ReservedPeak(at - 1, int(reserved[at]), int(allocated[at])) if reserved[at] else None


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a file itself says of the allocator that it was recorded under, without any model."""

    reserved_peak_bytes: int | None
    """None where the source does not say."""
    reserved_peak_event: int | None
    allocated_peak_bytes: int
    """With sizes rounded up to the alignment."""
    unseen_bytes: int
    """Live throughout, told only as a total: no request stands for it."""
    fragmentation: float | None
    """1 - (allocated peak + unseen) / reserved peak."""
    out_of_memory_event: int | None
    """The last error, None if there was none."""
    out_of_memory_bytes: int | None
    """The bytes that were asked for at the last error."""


def recorded(trace: Trace, alignment: int = 512) -> Recorded:
    """The peaks that a trace records, with sizes rounded up to `alignment` bytes."""
    size, unseen = trace.aligned_size(alignment), unseen_bytes(trace)
    peak, reserved = allocated_peak(trace, size), reserved_peak(trace, size, unseen)
    error = last_oom(trace)
    return Recorded(
        reserved_peak_bytes=reserved.reserved_bytes if reserved else None,
        reserved_peak_event=reserved.event if reserved else None,
        allocated_peak_bytes=peak.num_bytes,
        unseen_bytes=unseen,
        fragmentation=fragmentation(peak.num_bytes + unseen, reserved.reserved_bytes) if reserved else None,
        out_of_memory_event=error,
        out_of_memory_bytes=int(trace.event_size[error]) if error is not None else None,
    )


def count_events(trace: Trace) -> int:
    """The number of events of a trace; a trace of bare lifespans has two for each."""
    return len(trace.action) or 2 * trace.num_requests


def unseen_bytes(trace: Trace) -> int:
    """Bytes that a profiler's trace gives only as a total: live throughout, without requests of their own."""
    unseen = trace.info.get("unseen_bytes", 0)
    return unseen if isinstance(unseen, int) and 0 <= unseen < 1 << 62 else 0
