"""Steps that recur in any order: what lies between two marks of the program, taken as one sequence each.

Contract: two steps are of one kind if they ask for the same sizes on the same streams in the same order. The clock of a
step is the position in that sequence, as on a schedule. A request that outlives its step is handed on, perhaps through
several steps of whatever kind: those of one stream are ranked by size, and each kind of step knows of every stream and
rank how long what was handed on to it has lived in it. What lives longer than the record shows, or for very long, has
no known end.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column, distinct
from stalloc.lifespans.periods import TINY_BYTES, sequence_rows
from stalloc.trace import MARK_STEP, Trace

_LOOKED_AT = 4  # occurrences of a kind whose lifespans count: the last ones
_MAX_STEPS = 16  # through which a request may be handed on

_NOTHING: Column = np.zeros(0, np.int64)

_Until = dict[int, Column]  # as `StepKind.until`


@dataclass(frozen=True, eq=False, kw_only=True)
class StepKind:
    """One kind of step. `start` of request i is i."""

    size: Column  #: (n,) requested bytes
    stream: Column  #: (n,) index into the trace's streams
    end: Column  #: (n,) position after the last request that it lives beside; beyond n: handed on; 0: not known
    until: dict[int, Column]
    """By stream, (r,) for each rank of what is handed on to this step: the position before which it is gone, n if the
    step after gets it too, -1 if that was not seen."""
    times_seen: int

    @property
    def key(self) -> bytes:
        """Sizes and streams of its requests as bytes: equal for all steps of one kind."""
        return np.stack([self.size, self.stream]).tobytes()

    def with_what_was_known(self, before: "StepKind") -> "StepKind":
        """This kind, completed by what an earlier record told of it: the longest lifespans that either shows."""
        streams = self.until.keys() | before.until.keys()
        until = {one: _longest(self.until.get(one, _NOTHING), before.until.get(one, _NOTHING)) for one in streams}
        times_seen = max(self.times_seen, before.times_seen)
        return replace(self, end=np.maximum(self.end, before.end), until=until, times_seen=times_seen)

    def handed_on(self, stream: int) -> Column:
        """Rows of a stream that outlive the step, by rank: the largest first."""
        return _ranked(self.size, self.end, self.stream == stream)


def recurring_steps(trace: Trace) -> list[StepKind]:
    """The kinds of steps between two marks, in order of first occurrence."""
    rows = sequence_rows(trace, TINY_BYTES + 1)
    births = trace.start[rows]
    marks = distinct(trace.mark_event[trace.mark_kind == MARK_STEP])
    bounds = np.searchsorted(births, marks)
    size, stream = trace.size[rows], trace.stream[rows].astype(np.int64)
    deaths = np.where(trace.end[rows] < trace.num_events, np.searchsorted(births, trace.end[rows]), -1)
    places: dict[bytes, list[int]] = {}
    for step, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        if begin < end:
            places.setdefault(np.stack([size[begin:end], stream[begin:end]]).tobytes(), []).append(step)
    until: dict[int, _Until] = {step: {} for steps in places.values() for step in steps[:1]}
    first_of = {step: steps[0] for steps in places.values() for step in steps}
    ends: list[Column] = []
    for steps in places.values():
        begin, length = int(bounds[steps[0]]), int(bounds[steps[0] + 1] - bounds[steps[0]])
        whole, told = _told(bounds, steps)
        end = _ends(bounds, deaths, told, length)
        ends.append(np.where(end > 0, end, _ends(bounds, deaths, whole, length)))
        own_stream = stream[begin : begin + length]
        for name in distinct(own_stream).tolist():
            ranked = _ranked(size[begin : begin + length], ends[-1], own_stream == name)
            for step in told:
                _note_arrivals(bounds, deaths[bounds[step] + ranked], step, name, first_of, until)
    kinds: list[StepKind] = []
    for steps, end in zip(places.values(), ends, strict=True):
        own, seen = slice(int(bounds[steps[0]]), int(bounds[steps[0] + 1])), until[steps[0]]
        kinds.append(StepKind(size=size[own], stream=stream[own], end=end, until=seen, times_seen=len(steps)))
    return kinds


def _longest(seen: Column, known: Column) -> Column:
    """(r,) what was seen of each rank or was known of it, whichever is longer; -1: neither."""
    both = np.full((2, max(len(seen), len(known))), -1, np.int64)
    both[0, : len(seen)], both[1, : len(known)] = seen, known
    return both.max(axis=0)


def _ranked(size: Column, end: Column, chosen: NDArray[np.bool_]) -> Column:
    rows = np.flatnonzero((end > len(size)) & chosen)
    return rows[np.argsort(-size[rows], kind="stable")]


def _told(bounds: Column, steps: list[int]) -> tuple[list[int], list[int]]:
    """Occurrences that tell how long requests live: the step after them is whole; and those without the first.

    The first may be special. It counts where only it is so long ago that what it made is gone.
    """
    whole = [step for step in steps if step + 2 < len(bounds)]
    return whole[-_LOOKED_AT:], (whole if len(whole) < 2 else whole[1:])[-_LOOKED_AT:]


def _step_of(bounds: Column, death: Column) -> Column:
    """The step in which something is freed; what is freed between two belongs to the one before."""
    return np.searchsorted(bounds, death) - 1


def _ends(bounds: Column, deaths: Column, told: list[int], length: int) -> Column:
    """(n,) the latest end over occurrences of one kind of step, 0 where they do not tell it."""
    latest, through = np.zeros((2, length), np.int64)
    unseen = np.zeros(length, np.int64)  # steps for which a request has lived on, its end not being seen
    for step in told:
        begin = int(bounds[step])
        death = deaths[begin : begin + length]
        dead = death >= 0
        steps_later = _step_of(bounds, death) - step
        latest = np.maximum(latest, np.where(dead, death - begin, 0))
        through = np.maximum(through, np.where(dead, steps_later, 0))
        unseen = np.maximum(unseen, np.where(dead, 0, len(bounds) - 2 - step))
    known = (latest > 0) & (through <= _MAX_STEPS) & (unseen <= through)
    handed = np.minimum(latest, length + np.maximum(np.arange(length), 1))  # at most as long as an iteration
    return np.where(known, np.where(latest > length, handed, latest), 0)


def _note_arrivals(
    bounds: Column, death: Column, step: int, stream: int, first_of: dict[int, int], until: dict[int, _Until]
) -> None:
    """Note in the steps after `step` how long what it handed on lived in them; `death` is (r,), by rank of a stream."""
    last = np.where(death >= 0, _step_of(bounds, death), len(bounds) - 2)
    for after in range(step + 1, min(step + 1 + _MAX_STEPS, len(bounds) - 1)):
        alive, kind = np.flatnonzero(last >= after), first_of.get(after)
        if not len(alive):
            return
        if kind is None:
            continue
        length, ranks = int(bounds[after + 1] - bounds[after]), np.arange(alive[-1] + 1)
        stays = (death[ranks] < 0) | (last[ranks] > after)
        position = np.where(stays, length, death[ranks] - bounds[after])
        position[last[ranks] < after] = -1
        until[kind][stream] = _longest(until[kind].get(stream, _NOTHING), position)
