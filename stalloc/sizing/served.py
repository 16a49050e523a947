"""What an inference server's memory is for: weights, activations, and the cache that takes what is left.

Contract: the cache is what grows with the card. The program is run on its card and on a larger one, both recorded with
call sites, and the call sites that hold more at the larger one's peak hold the cache; so any program is read alike, and
one that takes the same on both has none. Sizes are those of requests, rounded up to 512 bytes.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from stalloc.analysis.holders import site_keys, site_text
from stalloc.analysis.moments import allocated_peak
from stalloc.columns import Column
from stalloc.lifespans import load_curve
from stalloc.trace import Trace
from stalloc.trace.sites import UNKNOWN, site_names


@dataclass(frozen=True, kw_only=True)
class Served:
    """One device of a server. Places are call sites, as `model.py:57 forward`."""

    weights_bytes: int  #: bytes live when the cache is made: weights, and what lasts beside them
    activation_bytes: int
    """The most that was live above these before the cache was made, as engines measure it with a first batch."""
    activation_at: str
    cache_bytes: int  #: bytes of the cache, with what else grows with the card, such as buffers as long as the cache
    cache_at: list[tuple[str, int]]  #: the cache's call sites and the bytes that each holds, most first
    serving_bytes: int  #: the most that was live above weights and cache once the cache was made, CUDA graphs included
    serving_at: str


def read_served(trace: Trace, larger: Trace) -> Served | None:
    """Divide what a program holds, recorded on a card and on a larger one; None if it takes the same on both."""
    size = trace.aligned_size()
    rows, keys, held = _at_peak(trace)
    grown = {site for site, num_bytes in _at_peak(larger)[2].items() if num_bytes > held[site] > 0}
    if not grown:
        return None
    sites = sorted(((site_text(site), held[site]) for site in grown), key=lambda one: -one[1])
    cache = rows[[key in grown for key in keys]]
    largest = cache[size[cache] * 2 > size[cache].max()]  # small ones, such as tables of blocks, may come before
    made, done = int(trace.start[largest].min()), int(trace.start[cache].max())
    cache_bytes = int(size[cache].sum())
    lasting = (trace.start < made) & (trace.end > made)
    lasting[cache] = False
    weights = int(size[lasting].sum())
    events, live = load_curve(np.maximum(trace.start, 0), trace.end, size)
    before, activation_at = _highest(trace, events, live, 0, made)
    after, serving_at = _highest(trace, events, live, done, trace.num_events)
    return Served(
        weights_bytes=weights,
        activation_bytes=max(before - weights, 0),
        activation_at=activation_at,
        cache_bytes=cache_bytes,
        cache_at=sites,
        serving_bytes=max(after - weights - cache_bytes, 0),
        serving_at=serving_at,
    )


def _at_peak(trace: Trace) -> tuple[Column, list[Hashable], Counter[Hashable]]:
    """The requests that are live when most is allocated, their call sites, and the bytes of each site."""
    size = trace.aligned_size()
    event = allocated_peak(trace, size).event
    rows = np.flatnonzero((np.maximum(trace.start, 0) <= event) & (trace.end > event))
    keys, held = site_keys(trace, rows), Counter[Hashable]()
    for key, num_bytes in zip(keys, size[rows].tolist(), strict=True):
        held[key] += num_bytes
    return rows, keys, held


def _highest(trace: Trace, events: Column, live: Column, begin: int, end: int) -> tuple[int, str]:
    """The most that is live in [begin, end), and the line that asked for the last of it."""
    within = np.flatnonzero((events >= begin) & (events < end))
    if not len(within):
        return 0, UNKNOWN
    at = within[np.argmax(live[within])]
    row = np.flatnonzero(trace.start == events[at])
    return int(live[at]), site_names(trace, row[:1])[0] if len(row) else UNKNOWN
