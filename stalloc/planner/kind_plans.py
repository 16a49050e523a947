"""Several kinds of steps in one arena, each with a plan of its own, or two that its steps alternate between.

Contract: whichever kind follows whichever, no two planned requests that are live together share a byte, as long as the
steps are as they were observed; and no two streams share a byte of the arena, in which each has a region. The validator
judges all of this by the plans' own columns (`validate_kinds`).

What a step carries over to the next (gradients until they are zeroed, a batch that is replaced) has places that all
kinds share. Such requests of a stream are ranked by size, and those of one rank have one address in all kinds, with
room for the largest. Every kind keeps it free for as long as what was carried over to a step of that kind has been seen
to live in it. A request that replaces one of an earlier step while that still lives (a batch, a model's output) needs
another address than that one has: its rank is double-buffered. A step switches to the other buffer if its kind carries
over anything of such a rank; so whatever kinds follow one another, one of the two addresses is free when it is asked
for.

Which kind a step is of shows only where it parts from the others, and what it asked for until then lies where the
expected kind has it; so that nothing of the rest is in its way, kinds that begin alike have one place for that.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column, distinct
from stalloc.lifespans.recurring_steps import StepKind
from stalloc.planner import Layout, Plan, plan_arrays
from stalloc.planner.budget import Budget
from stalloc.planner.cycle import cycle_bound
from stalloc.planner.plan_record import program_plan
from stalloc.sizes import ALIGNMENT_BYTES, PAGE_BYTES, aligned

_CELLS = 1 << 16  # pairs of requests and places that are compared at a time
_LEAST = 8  # requests that two kinds have to begin with; fewer are in nobody's way
_RESTARTS = 4  # they take longer than all the rest, while the program runs, and more hardly ever gain anything
_LITTLE = 1.01  # times as much may an arena be, so that steps which begin alike have one place for that


@dataclass(frozen=True, eq=False)
class _Keeping:
    """What one kind of step does with each place, by the buffer that it uses: (p,) columns by place."""

    own: Column  #: (r,) rows of the step that are carried over and have a place, by rank
    home: Column  #: (r,) the place of each
    until: Column  #: position in the step before which what came from earlier steps is gone; -1: there is nothing
    begin: Column  #: the place is needed from here to `end`, which may lie in the next iteration
    end: Column


@dataclass(frozen=True, eq=False)
class _CarriedOver:
    """What all kinds of steps carry over, on one stream; see `_carried_over`."""

    stream: int
    lengths: list[int]  #: of the steps
    rows: list[Column]  #: for each kind, by rank
    kept: Column  #: (kinds, r) position in each kind before which what is carried over to it is gone
    rank_size: Column  #: (r,) bytes
    has_two: NDArray[np.bool_]  #: (r,) ranks that have two places
    switches_buffers: list[bool]  #: the kinds of steps that carry over anything of such a rank, on whichever stream

    @property
    def size(self) -> Column:
        """(p,) bytes of each place: those of all ranks, then the second ones of those that have two."""
        return np.concatenate([self.rank_size, self.rank_size[self.has_two]])

    @property
    def num_buffers(self) -> int:
        """2 if any rank has two places."""
        return 1 + int(self.has_two.any())

    def places(self, buffer: int) -> Column:
        """(r,) the place of each rank for what is carried over by a step that uses this buffer."""
        first = np.arange(len(self.has_two))
        if buffer == 0:
            return first
        return np.where(self.has_two, len(first) - 1 + np.cumsum(self.has_two), first)

    def keeping(self, kind: int, buffer: int) -> _Keeping:
        """What a step of this kind does with the places."""
        length, rows, kept = self.lengths[kind], self.rows[kind], self.kept[kind]
        home, theirs = self.places(buffer), self.places(1 - buffer)
        until, begin = np.full(len(self.size), -1, np.int64), np.zeros(len(self.size), np.int64)
        until[theirs] = kept
        end = np.maximum(until, 0)
        ranks = np.flatnonzero(self.has_two[: len(rows)] | (rows >= kept[: len(rows)]))
        own, home = rows[ranks], home[ranks]
        begin[home] = own
        end[home] += length
        return _Keeping(own, home, until, begin, end)

    def needed_double_buffered(self, kind: int) -> tuple[Column, Column]:
        """(p,) when each place is needed in a cycle of two steps of a kind that carries all such ranks over.

        What is live at a time in any kind of step is so here too.
        """
        length, rows, two = self.lengths[kind], self.rows[kind], np.flatnonzero(self.has_two)
        begin, end = np.zeros(len(self.size), np.int64), np.full(len(self.size), 2 * length)
        first, second = self.places(0)[two], self.places(1)[two]
        last = self.kept[kind][two]
        for own, kept in zip(self.rows, self.kept, strict=True):
            beside = np.flatnonzero(two < len(own))
            meets = kept[two][:, None] > own[two[beside]]  # what is there yet, and what replaces any of it
            last = np.maximum(last, np.where(meets, rows[two[beside]] + 1, 0).max(axis=1, initial=0))
        begin[first], end[first] = rows[two], length + last
        begin[second], end[second] = length + rows[two], 2 * length + last
        return begin, end


def _carried_over(kinds: list[StepKind], streams: list[int], *, double_buffered: bool) -> list[_CarriedOver]:
    """What several kinds of steps carry over, on each stream; `double_buffered`: a rank may have two places."""
    lengths = [len(kind.size) for kind in kinds]
    found: list[_CarriedOver] = []
    for stream in streams:
        rows = [kind.handed_on(stream) for kind in kinds]
        size = np.zeros(max(len(own) for own in rows), np.int64)
        for kind, own in zip(kinds, rows, strict=True):
            size[: len(own)] = np.maximum(size[: len(own)], aligned(kind.size[own]))
        no_second = np.zeros(len(size), bool), [False] * len(kinds)
        found.append(_CarriedOver(stream, lengths, rows, _kept(kinds, stream, len(size)), size, *no_second))
    return _double_buffered(found) if double_buffered else found


def _double_buffered(found: list[_CarriedOver]) -> list[_CarriedOver]:
    """`found` with two places for each rank that can have them, if what is replaced is a page or more."""
    hands = [np.arange(len(one.rank_size)) < np.array([[len(own)] for own in one.rows]) for one in found]
    passes = [one.kept >= np.array(one.lengths)[:, None] for one in found]
    wanted, was = [np.zeros(len(one.rank_size), bool) for one in found], -1
    for one, replaces in zip(found, wanted, strict=True):  # asked for before what was carried over is gone
        for own, until in zip(one.rows, one.kept, strict=True):
            replaces[: len(own)] |= own < until[: len(own)]
    while was != (was := sum(map(np.count_nonzero, wanted))):
        ends = np.any([(does & rank).any(axis=1) for does, rank in zip(hands, wanted, strict=True)], axis=0)
        # what an earlier step carried over has to be gone when such a step is over
        may = [~whole[ends].any(axis=0) for whole in passes]
        wanted = [rank & able for rank, able in zip(wanted, may, strict=True)]
    if not any((one.rank_size[rank] >= PAGE_BYTES).any() for one, rank in zip(found, wanted, strict=True)):
        return found
    two = [able & does.any(axis=0) & ~does[~ends].any(axis=0) for able, does in zip(may, hands, strict=True)]
    return [replace(one, has_two=rank, switches_buffers=ends.tolist()) for one, rank in zip(found, two, strict=True)]


def _kept(kinds: list[StepKind], stream: int, num_ranks: int) -> Column:
    """(kinds, r) the position up to which a step of each kind keeps each place for what was carried over to it.

    Where that was not seen, the same share of the step as in the kind in which it was longest.
    """
    until = np.full((len(kinds), num_ranks), -1, np.int64)
    for row, kind in zip(until, kinds, strict=True):
        if stream in kind.until:
            seen = kind.until[stream][:num_ranks]
            row[: len(seen)] = seen
    length = np.array([[len(kind.size)] for kind in kinds])
    share = (until / length).max(axis=0)
    share[share < 0] = 1.0
    return np.where(until < 0, np.ceil(share * length).astype(np.int64), until)


def _places_of_begin(
    kind: StepKind, rows: Column, placed: Iterable[tuple[StepKind, Column]], kept: tuple[Column, Column, Column, Column]
) -> Column:
    """(m,) bytes: where the `rows` (m,) of a kind lie in the kind placed before that it has most in common with; or -1.

    `placed` are kinds with the offsets of their requests, -1 without one; `kept` are start, end, size and offset of the
    places that are kept for what is carried over to a step, whose ends may lie in the next one.
    """
    length, other, other_offset = 0, kind, np.zeros(0, np.int64)
    for one, its_offset in placed:
        common = _common(kind, one)
        if common > length:
            length, other, other_offset = common, one, its_offset
    places = np.full(len(rows), -1, np.int64)
    if length < _LEAST:
        return places
    begin = rows[rows < length]
    told = (other.end[begin] > 0) & (other.end[begin] <= len(other.size))  # neither carried over nor unknown
    places[: len(begin)] = np.where(told, other_offset[begin], -1)
    found = np.flatnonzero(places >= 0)
    at = rows[found]
    spans = at, kind.end[at], aligned(kind.size[at]), places[found]
    clashes = np.zeros(len(found), bool)
    for row in np.flatnonzero(kind.end[at] > other.end[at]).tolist():  # those that live longer than they did there
        beside = _overlaps(spans, *(column[row : row + 1, None] for column in spans))[0]
        beside[row] = False
        clashes[row] = (beside & ~clashes).any()
    start, end, size, offset = (column[(kept[3] >= 0) & (kept[0] < kept[1]), None] for column in kept)
    carried = np.zeros_like(start), end - len(kind.size), size, offset  # into this iteration from the one before
    at_once = max(1, _CELLS // max(len(found), 1))
    for columns, first in itertools.product(((start, end, size, offset), carried), range(0, len(start), at_once)):
        clashes |= _overlaps(spans, *(column[first : first + at_once] for column in columns)).any(axis=0)
    places[found[clashes]] = -1
    return places


def _common(one: StepKind, other: StepKind) -> int:
    """How many requests two kinds of steps both begin with."""
    most = min(len(one.size), len(other.size))
    differ = (one.size[:most] != other.size[:most]) | (one.stream[:most] != other.stream[:most])
    return int(differ.argmax()) if differ.any() else most


def _overlaps(
    spans: tuple[Column, Column, Column, Column], start: Column, end: Column, size: Column, offset: Column
) -> NDArray[np.bool_]:
    """(k, m) which of m requests are live at a time, and in a place, that each of (k, 1) others is."""
    starts, ends, sizes, offsets = spans
    together: NDArray[np.bool_] = (
        (starts < end) & (start < ends) & (offsets < offset + size) & (offset < offsets + sizes)
    )
    return together


class _RegionPlan:
    """Where the requests of all kinds go on one stream, and the places that they keep for one another."""

    def __init__(self, kinds: list[StepKind], carried: _CarriedOver, made: dict[bytes, Layout]) -> None:
        self._kinds, self.carried, self._made = kinds, carried, made
        buffers = range(carried.num_buffers)
        self.offset = [[np.full(len(kind.size), -1, np.int64) for kind in kinds] for _ in buffers]
        """For each buffer and kind (n,) bytes from where the region begins, -1: not planned there."""
        self.place_offset = np.full(len(carried.size), -1, np.int64)  #: (p,) bytes from where the region begins
        self.peak_bytes = 0
        self.method = ""
        self._least_bytes = 0  # that it would be without a place for what steps begin with alike
        self._done: list[list[tuple[StepKind, Column]]] = [[] for _ in buffers]

    def _own(self, kind: StepKind) -> Column:
        """Rows of a kind that are planned and not carried over."""
        return np.flatnonzero((kind.end > 0) & (kind.end <= len(kind.size)) & (kind.stream == self.carried.stream))

    def _placed(
        self, length: int, own: tuple[Column, Column, Column], kept: tuple[Column, Column], begins: Column, aim: int
    ) -> Layout:
        """Where it lies that a cycle asks for: start, end and size of m requests, then p places kept from begin to end.

        The requests lie at `begins` (m,), -1: free to be chosen. A peak of `aim` will do where something is fixed.
        """
        start, end = (np.concatenate(columns) for columns in zip(own[:2], kept, strict=True))
        size, fixed = np.concatenate([own[2], self.carried.size]), np.concatenate([begins, self.place_offset])
        some = bool((fixed >= 0).any())
        aim *= some
        asked = np.concatenate([[length, aim], start, end, size, fixed]).tobytes()
        if asked not in self._made:
            budget = Budget(aim_bytes=aim, num_restarts=_RESTARTS)
            options: dict[str, Any] = {"alignment": ALIGNMENT_BYTES, "cycle": (0, length), "budget": budget}
            self._made[asked] = plan_arrays(start, end, size, fixed=fixed if some else None, **options)
        return self._made[asked]

    def place_double_buffered(self, index: int) -> None:
        """Place the steps of both buffers of one kind, and the places, which are free to be chosen."""
        kind = self._kinds[index]
        length, own = len(kind.size), self._own(kind)
        both = (
            np.concatenate([own, own + length]),
            np.concatenate([kind.end[own], kind.end[own] + length]),
            np.tile(aligned(kind.size[own]), 2),
        )
        kept = self.carried.needed_double_buffered(index)
        layout = self._placed(2 * length, both, kept, np.full(2 * len(own), -1, np.int64), 0)
        for buffer in range(2):
            self._note(index, buffer, own, layout.offset[buffer * len(own) :], layout)
        self._least_bytes = self.peak_bytes

    def place(self, index: int, buffer: int) -> None:
        """Place a step of one kind."""
        kind, keeping, places = self._kinds[index], self.carried.keeping(index, buffer), self.place_offset
        rows, length = self._own(kind), len(kind.size)
        never = (places < 0).any() & (keeping.end <= keeping.begin)  # other kinds need all places at a time
        own = rows, kind.end[rows], aligned(kind.size[rows])
        kept = np.where(never, length - 1, keeping.begin), np.where(never, length, keeping.end)
        around = keeping.begin, keeping.end, self.carried.size, places
        alike = _places_of_begin(kind, rows, self._done[buffer], around)
        layout = self._placed(length, own, kept, alike, self.peak_bytes)
        least_bytes = layout.peak_bytes
        if least_bytes > max(self._least_bytes, layout.lower_bound_bytes) and (alike >= 0).any():
            without = self._placed(length, own, kept, np.full(len(rows), -1, np.int64), self._least_bytes)
            least_bytes = max(self._least_bytes, without.peak_bytes)
            layout = layout if layout.peak_bytes <= _LITTLE * least_bytes else without
        self._least_bytes = max(self._least_bytes, least_bytes)
        self._note(index, buffer, rows, layout.offset, layout)

    def _note(self, index: int, buffer: int, own: Column, offset: Column, layout: Layout) -> None:
        """A step of a kind has been placed: its `own` requests at the first of the offsets, the places at the last."""
        keeping, placed = self.carried.keeping(index, buffer), self.offset[buffer][index]
        self.place_offset = layout.offset[len(layout.offset) - len(self.place_offset) :]
        self.peak_bytes = max(self.peak_bytes, layout.peak_bytes)
        self.method = self.method or layout.method
        placed[own] = offset[: len(own)]
        placed[keeping.own] = self.place_offset[keeping.home]
        self._done[buffer].append((self._kinds[index], placed))


def _plan_region(kinds: list[StepKind], carried: _CarriedOver, made: dict[bytes, Layout]) -> _RegionPlan:
    needs = [int(aligned(kind.size[(kind.end > 0) & (kind.stream == carried.stream)]).sum()) for kind in kinds]
    order = [index for index in np.argsort(needs, kind="stable")[::-1].tolist() if needs[index] > 0]
    region, buffers = _RegionPlan(kinds, carried, made), range(carried.num_buffers)
    later = order
    if carried.num_buffers > 1:
        first = max(order, key=lambda index: len(carried.rows[index]) if carried.switches_buffers[index] else -1)
        region.place_double_buffered(first)
        later = [index for index in order if index != first]
    for index, buffer in itertools.product(later, buffers):
        region.place(index, buffer)
    return region


@dataclass(frozen=True, eq=False, kw_only=True)
class KindPlans:
    """The plans of several kinds of steps, and what goes into their arena."""

    kinds: list[StepKind]
    num_buffers: int  #: plans that each kind has
    switches_buffers: list[bool]  #: for each kind, whether those of the other buffer are followed after a step of it
    plans: list[Plan]
    """One a kind for each buffer, those of the first buffer first; of one peak. The cycle is a step, with one entry a
    request; its clock begins at 1 and ends one after the last request. The prologue holds the places that are kept for
    what earlier steps carry over, for each buffer one a rank (of size 0: the one of the first buffer)."""
    begins: list[int]  #: where each plan's rows begin, if the cycles of all are laid one after the other

    @property
    def size(self) -> Column:
        """(k,) requested bytes, over all kinds."""
        return self._cycles("schedule_size")

    @property
    def stream(self) -> Column:
        """(k,) stream indices."""
        return self._cycles("schedule_stream")

    @property
    def offset(self) -> Column:
        """(k,) bytes; -1: not planned, since the end is not known, or what it replaces is not gone yet."""
        return self._cycles("schedule_offset")

    def _cycles(self, name: str) -> Column:
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
        largest = max(self.plans, key=lambda plan: len(plan.schedule_size))
        return replace(largest, lower_bound_bytes=self.lower_bound_bytes)


def plan_steps(
    kinds: list[StepKind], made: dict[bytes, Layout], device: int = 0, *, double_buffered: bool = False
) -> KindPlans:
    """Plan several kinds of steps for one arena, in which every stream has a region that no other stream uses.

    `made` holds the layouts of earlier calls, and gets those of this one, so that a kind that is added is all there is
    to plan. With `double_buffered` each kind gets two plans where that gives more requests a place; whoever serves them
    has to know when a step ends.
    """
    streams = distinct(np.concatenate([kind.stream[kind.end > 0] for kind in kinds]))
    carried = _carried_over(kinds, streams.tolist(), double_buffered=double_buffered)
    regions = [_plan_region(kinds, one, made) for one in carried]
    num_buffers = max(one.num_buffers for one in carried)
    plans = [
        _plan_of(kinds, index, buffer, num_buffers, regions, device)
        for buffer in range(num_buffers)
        for index in range(len(kinds))
    ]
    begins = [0, *np.cumsum([len(kind.size) for kind in kinds] * num_buffers)[:-1].tolist()]
    return KindPlans(
        kinds=kinds, num_buffers=num_buffers, switches_buffers=carried[0].switches_buffers, plans=plans, begins=begins
    )


def _plan_of(
    kinds: list[StepKind], index: int, buffer: int, num_buffers: int, regions: list[_RegionPlan], device: int
) -> Plan:
    """The plan of one kind of step in the arena of all: the places kept for it, then its requests."""
    kind, peak = kinds[index], sum(region.peak_bytes for region in regions)
    length = len(kind.size)
    offset, left_until = np.full(length, -1, np.int64), np.zeros(length, np.int64)
    places: list[tuple[Column, ...]] = []  # stream, size, offset and end of what is kept
    begin = 0
    for region in regions:
        carried = region.carried
        own, keeping = region.offset[min(buffer, carried.num_buffers - 1)][index], carried.keeping(index, buffer)
        offset[own >= 0] = own[own >= 0] + begin
        left_until[keeping.own] = np.maximum(keeping.until[keeping.home], 0)
        ends = np.where(keeping.until >= length, length + 2, keeping.until + 1)
        for number in range(num_buffers):
            rows = carried.places(number)
            size = np.where(carried.has_two | (number == 0), carried.size[rows], 0)
            places.append((np.full(len(rows), carried.stream), size, region.place_offset[rows] + begin, ends[rows]))
        begin += region.peak_bytes
    stream, size, place, end = (np.concatenate(columns) for columns in zip(*places, strict=True))
    # a step lasts one tick longer than its requests, in which what it carries over lives still
    cycle_start, cycle_end, rows = 1, length + 2, np.arange(length, dtype=np.int64)
    last = np.where(kind.end > length, np.minimum(cycle_end + left_until, cycle_end + rows), kind.end + 1)
    schedule_start = np.concatenate([np.zeros(len(end), np.int64), rows + 1])
    schedule_end = np.concatenate([end, np.where(kind.end > 0, last, rows + 1)])
    schedule_size, schedule_offset = np.concatenate([size, kind.size]), np.concatenate([place, offset])
    counted = (schedule_offset >= 0) & (schedule_start < schedule_end) & (schedule_size > 0)
    times = schedule_start[counted], schedule_end[counted]
    bound = cycle_bound(*times, aligned(schedule_size[counted]), cycle_start, cycle_end) if counted.any() else 0
    return program_plan(
        offset=schedule_offset,
        size=schedule_size,
        start=schedule_start,
        end=schedule_end,
        stream=np.concatenate([stream, kind.stream]),
        device=device,
        alignment=ALIGNMENT_BYTES,
        peak_bytes=peak,
        lower_bound_bytes=bound,
        optimal=False,
        method=f"{len(kinds)} kinds of steps, {next((region.method for region in regions if region.method), '')}",
        provenance={},
        num_prologue=len(end),
        cycle_start=cycle_start,
        cycle_end=cycle_end,
    )
