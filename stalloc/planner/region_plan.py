"""What all kinds of steps ask for on one stream, placed in one region of their arena.

Contract: as kind_plans.py. The kind that needs most decides where the places are that all kinds share. Where these are
double-buffered it is one that carries over the most, and its steps with both buffers are planned as one cycle.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np

from stalloc.columns import Column
from stalloc.lifespans.units import StepKind
from stalloc.planner import Layout, plan_arrays
from stalloc.planner.budget import Budget
from stalloc.planner.carried_over import CarriedOver
from stalloc.planner.shared_starts import places_of_begin
from stalloc.sizes import ALIGNMENT_BYTES, aligned

_RESTARTS = 4  # they take longer than all the rest, while the program runs, and more hardly ever gain anything
_LITTLE = 1.01  # times as much may an arena be, so that steps which begin alike have one place for that


@dataclass(frozen=True, eq=False)
class _Asked:
    """What is to be placed in a step, or two: requests, then the places that are kept for what is carried over."""

    length: int  # of the cycle
    start: Column  # (n,)
    end: Column
    size: Column
    places: Column  # (p,) offsets of the last p rows, -1 where they are free to be chosen
    enough_bytes: int  # a peak that will do where something is fixed

    def placed(self, begins: Column, made: dict[bytes, Layout]) -> Layout:
        """Where it lies with its first rows at `begins` (n - p,), -1 where that is free to be chosen."""
        fixed = np.concatenate([begins, self.places])
        aim = self.enough_bytes if (fixed >= 0).any() else 0
        asked = np.concatenate([[self.length, aim], self.start, self.end, self.size, fixed]).tobytes()
        if asked not in made:
            made[asked] = plan_arrays(
                self.start,
                self.end,
                self.size,
                alignment=ALIGNMENT_BYTES,
                cycle=(0, self.length),
                fixed=fixed if (fixed >= 0).any() else None,
                budget=Budget(aim_bytes=aim, num_restarts=_RESTARTS),
            )
        return made[asked]


class RegionPlan:
    """Where the requests of all kinds go on one stream, and the places that they keep for one another."""

    def __init__(self, kinds: list[StepKind], carried: CarriedOver, made: dict[bytes, Layout]) -> None:
        self._kinds, self.carried, self._made = kinds, carried, made
        buffers = range(carried.num_buffers)
        self.offset = [[np.full(len(kind.size), -1, np.int64) for kind in kinds] for _ in buffers]
        """For each buffer and kind (n,) bytes from where the region begins, -1: not planned there."""
        self.place_offset = np.full(len(carried.size), -1, np.int64)  #: (p,) bytes from where the region begins
        self.peak_bytes = self.lower_bound_bytes = 0
        self.method = ""
        self._least_bytes = 0  # that it would be without a place for what steps begin with alike
        self._done: list[list[tuple[StepKind, Column]]] = [[] for _ in buffers]

    def _own(self, kind: StepKind) -> Column:
        """Rows of a kind that are planned and not carried over."""
        return np.flatnonzero((kind.end > 0) & (kind.end <= len(kind.size)) & (kind.stream == self.carried.stream))

    def place_double_buffered(self, index: int) -> None:
        """Place the steps of both buffers of one kind, and the places, which are free to be chosen."""
        kind, carried = self._kinds[index], self.carried
        length, own = len(kind.size), self._own(kind)
        begin, end = carried.needed_double_buffered(index)
        asked = _Asked(
            2 * length,
            np.concatenate([own, own + length, begin]),
            np.concatenate([kind.end[own], kind.end[own] + length, end]),
            np.concatenate([aligned(kind.size[own])] * 2 + [carried.size]),
            self.place_offset,
            0,
        )
        layout = asked.placed(np.full(2 * len(own), -1, np.int64), self._made)
        for buffer in range(2):
            self._note(index, buffer, own, layout.offset[buffer * len(own) :], layout)
        self._least_bytes = self.peak_bytes

    def place(self, index: int, buffer: int) -> None:
        """Place a step of one kind."""
        kind, carried, keeping = self._kinds[index], self.carried, self.carried.keeping(index, buffer)
        own, places = self._own(kind), self.place_offset
        length, decides = len(kind.size), (places < 0).any()
        never = decides & (keeping.end <= keeping.begin)  # other kinds need all places at a time
        asked = _Asked(
            length,
            np.concatenate([own, np.where(never, length - 1, keeping.begin)]),
            np.concatenate([kind.end[own], np.where(never, length, keeping.end)]),
            np.concatenate([aligned(kind.size[own]), carried.size]),
            places,
            self.peak_bytes,
        )
        kept = keeping.begin, keeping.end, carried.size, places
        alike = places_of_begin(kind, own, self._done[buffer], kept)
        layout = asked.placed(alike, self._made)
        least_bytes = layout.peak_bytes
        if least_bytes > max(self._least_bytes, layout.lower_bound_bytes) and (alike >= 0).any():
            asked = replace(asked, enough_bytes=self._least_bytes)
            without = asked.placed(np.full(len(own), -1, np.int64), self._made)
            least_bytes = max(self._least_bytes, without.peak_bytes)
            layout = layout if layout.peak_bytes <= _LITTLE * least_bytes else without
        self._least_bytes = max(self._least_bytes, least_bytes)
        self._note(index, buffer, own, layout.offset, layout)

    def _note(self, index: int, buffer: int, own: Column, offset: Column, layout: Layout) -> None:
        """A step of a kind has been placed: its `own` requests at the first of the offsets, the places at the last."""
        keeping, placed = self.carried.keeping(index, buffer), self.offset[buffer][index]
        self.place_offset = layout.offset[len(layout.offset) - len(self.place_offset) :]
        self.peak_bytes = max(self.peak_bytes, layout.peak_bytes)
        self.lower_bound_bytes = max(self.lower_bound_bytes, layout.lower_bound_bytes)
        self.method = self.method or layout.method
        placed[own] = offset[: len(own)]
        placed[keeping.own] = self.place_offset[keeping.home]
        self._done[buffer].append((self._kinds[index], placed))


def plan_region(kinds: list[StepKind], carried: CarriedOver, made: dict[bytes, Layout]) -> RegionPlan:
    """Plan what all kinds ask for on one stream, for one region."""
    needs = [int(aligned(kind.size[(kind.end > 0) & (kind.stream == carried.stream)]).sum()) for kind in kinds]
    order = [index for index in np.argsort(needs, kind="stable")[::-1].tolist() if needs[index] > 0]
    region, buffers = RegionPlan(kinds, carried, made), range(carried.num_buffers)
    later = order
    if carried.num_buffers > 1:
        first = max(order, key=lambda index: len(carried.rows[index]) if carried.switches_buffers[index] else -1)
        region.place_double_buffered(first)
        later = [index for index in order if index != first]
    for index, buffer in itertools.product(later, buffers):
        region.place(index, buffer)
    return region
