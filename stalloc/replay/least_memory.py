"""The least memory of a device on which a program completes under an allocator, by replay.

Contract: with what is returned the replay was seen to complete; with much less it was seen to run out, or nothing less
can be since so much is live at a time. An allocator that takes much when there is plenty may need little.
"""

from stalloc.lifespans import lower_bound
from stalloc.replay.simulation import Candidate, run_one
from stalloc.sizes import PAGE_BYTES, whole_pages
from stalloc.trace import Trace

_CLOSE = 1000  # within one part in so many


def least_memory(trace: Trace, candidate: Candidate) -> int:
    """About the least bytes, in multiples of 2 MiB, with which the allocator serves a trace."""
    high = whole_pages(run_one(trace, candidate).peak_reserved_bytes)
    low = whole_pages(lower_bound(trace))  # no less can do
    if low >= high or run_one(trace, candidate, low).fits:
        return min(low, high)
    while high - low > max(PAGE_BYTES, high // _CLOSE):
        middle = whole_pages((low + high) // 2)
        if run_one(trace, candidate, middle).fits:
            high = middle
        else:
            low = middle
    return high
