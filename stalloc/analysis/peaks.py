"""The peaks of a trace: when most is allocated, and when most is reserved.

Upheld: of the moments when most is reserved, the one with the most allocated counts, so that fragmentation is never
overstated. Event -1 is the start of the recording.
"""

from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.lifespans import fullest, load_curve
from stalloc.trace import Trace


class AllocatedPeak(NamedTuple):
    """The most bytes live, and the first event after which they are; -1 in a trace without requests."""

    num_bytes: int
    event: int


class ReservedPeak(NamedTuple):
    """The moment when most is reserved."""

    event: int
    reserved_bytes: int
    allocated_bytes: int


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
