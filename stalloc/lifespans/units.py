"""Steps that recur in any order: what lies between two marks of the program, taken as one sequence each.

Contract: two steps are of one kind if they ask for the same sizes on the same streams in the same order. The clock of a
step is the position in that sequence, as on a tape; a request that outlives its step ends at the length of the step
plus the position in the next step, of whatever kind, before which it is freed. What lives longer still, or differently
from time to time, has no known end.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from stalloc.lifespans.periods import TINY_BYTES, sequence_rows
from stalloc.trace import MARK_STEP, Trace
from stalloc.trace.record import Column

_LOOKED_AT = 4  # occurrences of a kind whose lifespans count: the last ones
_CARRIED_SHARE = 4  # a request may reach into one in so many parts of the next step


@dataclass(frozen=True, eq=False, kw_only=True)
class StepKind:
    """One kind of step. `start` of request i is i."""

    size: Column  #: (n,) requested bytes
    stream: Column  #: (n,) index into the trace's streams
    end: Column  #: (n,) position after the last request that it lives beside, beyond n: in the next step; 0: not known
    times_seen: int

    @property
    def key(self) -> bytes:
        """The same for steps of one kind."""
        return np.stack([self.size, self.stream]).tobytes()


def recurring_steps(trace: Trace, *, min_repeats: int = 2) -> tuple[list[StepKind], list[int]]:
    """The kinds of marked steps that occur at least `min_repeats` times, in order of first occurrence.

    Also (s,) for each step between two marks the index of its kind, -1 if it does not recur.
    """
    rows = sequence_rows(trace, TINY_BYTES + 1)
    births = trace.start[rows]
    marks = np.unique(trace.mark_event[trace.mark_kind == MARK_STEP])
    bounds = np.searchsorted(births, marks).tolist()
    size, stream = trace.size[rows], trace.stream[rows].astype(np.int64)
    deaths = np.where(trace.end[rows] < trace.num_events, np.searchsorted(births, trace.end[rows]), -1)
    places: dict[bytes, list[int]] = {}
    for step, (begin, end) in enumerate(itertools.pairwise(bounds)):
        places.setdefault(np.stack([size[begin:end], stream[begin:end]]).tobytes(), []).append(step)
    kinds: list[StepKind] = []
    kind_of_step = [-1] * (len(bounds) - 1)
    for steps in places.values():
        begin, end = bounds[steps[0]], bounds[steps[0] + 1]
        if len(steps) < min_repeats or begin == end:
            continue
        for step in steps:
            kind_of_step[step] = len(kinds)
        ends = _ends(bounds, deaths, steps)
        kinds.append(StepKind(size=size[begin:end], stream=stream[begin:end], end=ends, times_seen=len(steps)))
    return kinds, kind_of_step


def _ends(bounds: list[int], deaths: Column, steps: list[int]) -> Column:
    """(n,) the latest end over the last occurrences of one kind of step, 0 where any of them does not tell."""
    length = bounds[steps[0] + 1] - bounds[steps[0]]
    # a step whose successor is not whole does not show what it hands on; the first may be special
    whole = [step for step in steps if step + 2 < len(bounds)]
    told = whole[-_LOOKED_AT:] if len(whole) < 2 else whole[1:][-_LOOKED_AT:]
    latest = np.zeros(length, np.int64)
    known = np.ones(length, bool)
    for step in told:
        begin, end, after = bounds[step], bounds[step + 1], bounds[step + 2]
        death = deaths[begin:end]
        latest = np.maximum(latest, death - begin)
        known &= (death >= 0) & (death - end <= (after - end) // _CARRIED_SHARE)
    return np.where(known & bool(told), latest, 0)
