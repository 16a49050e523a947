"""Several kinds of steps in one arena, each with a plan of its own.

Contract: whichever kind follows whichever, no two planned requests that are live together share a byte, as long as the
steps are as they were observed; and no two streams share a byte of the arena, in which each has a region. What a step
hands on (gradients until they are zeroed, a batch that is replaced) has a place that all kinds share: handed-on
requests of a stream are ranked by size, those of one rank get one place, and every kind keeps it free for as long as
what was handed on to a step of that kind has been seen to live in it. The validator judges all of this by the plans'
own columns (planner/kinds_check.py).
"""

from dataclasses import dataclass, replace

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.core.constants import ALIGNMENT
from stalloc.core.regions import rounded
from stalloc.lifespans.units import StepKind
from stalloc.planner import Layout, Plan, plan_arrays
from stalloc.planner.budget import Budget
from stalloc.planner.ring import ring_bound
from stalloc.runtime.shared_begins import places_of_begin

_LITTLE = 1.01  # times as much may an arena be, so that steps which begin alike have one place for that
_NOTHING: Column = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Tapes:
    """The plans of several kinds of steps, and what goes into their arena."""

    kinds: list[StepKind]
    plans: list[Plan]
    """One a kind, of one peak. The ring is a step, with one entry a request; its clock begins at 1 and ends one after
    the last request. The prologue holds the places that are kept for what earlier steps hand on."""
    begins: list[int]  #: where each kind's rows begin, if the rings of all plans are laid one after the other

    @property
    def size(self) -> Column:
        """(k,) requested bytes, over all kinds."""
        return self._rings("tape_size")

    @property
    def stream(self) -> Column:
        """(k,) stream indices."""
        return self._rings("tape_stream")

    @property
    def offset(self) -> Column:
        """(k,) bytes; -1: not planned, since the end is not known, or what it replaces is not gone yet."""
        return self._rings("tape_offset")

    def _rings(self, name: str) -> Column:
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
        largest = max(self.plans, key=lambda plan: len(plan.tape_size))
        return replace(largest, lower_bound_bytes=self.lower_bound_bytes)


@dataclass(frozen=True, eq=False)
class _Region:
    """What all kinds have of one stream: where their requests go, and the places that they keep for one another."""

    stream: int
    offset: list[Column]  # for each kind (n,) bytes from where the region begins, -1: not planned there
    place_size: Column  # (r,) bytes, by rank
    place_offset: Column  # (r,) bytes from where the region begins
    kept_until: Column  # (kinds, r) position in a step of each kind before which a place is free again
    peak_bytes: int
    method: str


@dataclass(frozen=True, eq=False)
class _Asked:
    """What one kind of step asks for on one stream: its requests, then the places that are kept for others."""

    length: int  # of the step
    start: Column  # (n,)
    end: Column
    size: Column
    places: Column  # (r,) offsets of the last r rows, -1 where they are free to be chosen
    enough_bytes: int  # a peak that will do where something is fixed

    def placed(self, begins: Column, made: dict[bytes, Layout]) -> Layout:
        """Where it lies with its first rows at `begins` (n - r,), -1 where that is free to be chosen."""
        fixed = np.concatenate([begins, self.places])
        aim = self.enough_bytes if (fixed >= 0).any() else 0
        asked = np.concatenate([[self.length, aim], self.start, self.end, self.size, fixed]).tobytes()
        if asked not in made:
            made[asked] = plan_arrays(
                self.start,
                self.end,
                self.size,
                alignment=ALIGNMENT,
                ring=(0, self.length),
                fixed=fixed if (fixed >= 0).any() else None,
                budget=Budget(aim_bytes=aim),
            )
        return made[asked]


def plan_steps(kinds: list[StepKind], made: dict[bytes, Layout], device: int = 0) -> Tapes:
    """Plan several kinds of steps for one arena, in which every stream has a region that no other stream uses.

    `made` holds the layouts of earlier calls, and gets those of this one, so that a kind that is added is all there is
    to plan.
    """
    streams = distinct(np.concatenate([kind.stream[kind.end > 0] for kind in kinds]))
    regions = [_plan_stream(kinds, stream, made) for stream in streams.tolist()]
    plans = [_plan_of(kinds, index, regions, device) for index in range(len(kinds))]
    lengths = [len(kind.size) for kind in kinds]
    return Tapes(kinds=kinds, plans=plans, begins=[0, *np.cumsum(lengths)[:-1].tolist()])


def _plan_of(kinds: list[StepKind], index: int, regions: list[_Region], device: int) -> Plan:
    """The plan of one kind of step in the arena of all: the places kept for it, then its requests."""
    kind, peak = kinds[index], sum(region.peak_bytes for region in regions)
    length = len(kind.size)
    offset, left_until = np.full(length, -1, np.int64), np.zeros(length, np.int64)
    places: list[tuple[Column, ...]] = []  # stream, size, offset and end of what is kept
    begin = 0
    for region in regions:
        own, until = region.offset[index], region.kept_until[index]
        offset[own >= 0] = own[own >= 0] + begin
        handed = kind.handed_on(region.stream)
        left_until[handed] = until[: len(handed)]
        ends = np.where(until >= length, length + 2, until + 1)
        streams = np.full(len(until), region.stream, np.int64)
        places.append((streams, region.place_size, region.place_offset + begin, ends))
        begin += region.peak_bytes
    stream, size, place, end = (np.concatenate(columns) for columns in zip(*places, strict=True))
    # a step lasts one tick longer than its requests, in which what it hands on lives still
    ring_start, ring_end, rows = 1, length + 2, np.arange(length, dtype=np.int64)
    last = np.where(kind.end > length, np.minimum(ring_end + left_until, ring_end + rows), kind.end + 1)
    tape_start = np.concatenate([np.zeros(len(end), np.int64), rows + 1])
    tape_end = np.concatenate([end, np.where(kind.end > 0, last, rows + 1)])
    tape_size, tape_offset = np.concatenate([size, kind.size]), np.concatenate([place, offset])
    counted = (tape_offset >= 0) & (tape_start < tape_end) & (tape_size > 0)
    times = tape_start[counted], tape_end[counted]
    bound = ring_bound(*times, rounded(tape_size[counted]), ring_start, ring_end) if counted.any() else 0
    tape_stream = np.concatenate([stream, kind.stream])
    return Plan(
        offset=tape_offset,
        size=tape_size,
        start=tape_start,
        end=tape_end,
        stream=tape_stream,
        device=device,
        alignment=ALIGNMENT,
        peak_bytes=peak,
        lower_bound_bytes=bound,
        optimal=False,
        method=f"{len(kinds)} kinds of steps, {next((region.method for region in regions if region.method), '')}",
        kind="program",
        provenance={},
        num_prologue=len(end),
        ring_start=ring_start,
        ring_end=ring_end,
        tape_row=np.arange(len(tape_size), dtype=np.int64),
        tape_size=tape_size,
        tape_stream=tape_stream,
        tape_start=tape_start,
        tape_end=tape_end,
        tape_offset=tape_offset,
    )


def _plan_stream(kinds: list[StepKind], stream: int, made: dict[bytes, Layout]) -> _Region:
    """Plan what all kinds ask for on one stream, for one region."""
    handed = [kind.handed_on(stream) for kind in kinds]
    num_places = max(len(rows) for rows in handed)
    place_size = np.zeros(num_places, np.int64)
    for kind, rows in zip(kinds, handed, strict=True):
        place_size[: len(rows)] = np.maximum(place_size[: len(rows)], rounded(kind.size[rows]))
    kept = _kept_until(kinds, stream, num_places)
    offsets = [np.full(len(kind.size), -1, np.int64) for kind in kinds]
    places, peak, method = np.full(num_places, -1, np.int64), 0, ""
    done: list[tuple[StepKind, Column]] = []
    # the one that needs most decides where the shared places are
    needs = [int(rounded(kind.size[(kind.end > 0) & (kind.stream == stream)]).sum()) for kind in kinds]
    for index in np.argsort(needs, kind="stable")[::-1].tolist():
        if needs[index] == 0:
            continue
        kind, rows = kinds[index], handed[index]
        length = len(kind.size)
        own = np.flatnonzero((kind.end > 0) & (kind.end <= length) & (kind.stream == stream))
        until, begin = kept[index].copy(), np.zeros(num_places, np.int64)
        fits = np.flatnonzero(rows >= until[: len(rows)])  # ranks whose place is empty when it is asked for
        begin[fits] = rows[fits]
        until[fits] += length
        start, end = np.concatenate([own, begin]), np.concatenate([kind.end[own], until])
        size = np.concatenate([rounded(kind.size[own]), place_size])

        asked = _Asked(length, start, end, size, places, peak)
        alike = places_of_begin(kind, own, done, (begin, until, place_size, places))
        layout = asked.placed(alike, made)
        if layout.peak_bytes > max(peak, layout.lower_bound_bytes) and (alike >= 0).any():
            without = asked.placed(np.full(len(own), -1, np.int64), made)
            layout = layout if layout.peak_bytes <= _LITTLE * max(peak, without.peak_bytes) else without
        places, peak = layout.offset[len(own) :], max(peak, layout.peak_bytes)
        method = method or layout.method
        offsets[index][own] = layout.offset[: len(own)]
        offsets[index][rows[fits]] = places[fits]
        done.append((kind, offsets[index]))
    return _Region(stream, offsets, place_size, places, kept, peak, method)


def _kept_until(kinds: list[StepKind], stream: int, num_places: int) -> Column:
    """(kinds, places) the position up to which a step of each kind keeps each place for what was handed on to it.

    Where that was not seen, the same share of the step as in the kind in which it was longest.
    """
    until = np.full((len(kinds), num_places), -1, np.int64)
    for row, kind in zip(until, kinds, strict=True):
        seen = kind.until.get(stream, _NOTHING)[:num_places]
        row[: len(seen)] = seen
    length = np.array([[len(kind.size)] for kind in kinds])
    share = (until / length).max(axis=0)
    share[share < 0] = 1.0
    return np.where(until < 0, np.ceil(share * length).astype(np.int64), until)
