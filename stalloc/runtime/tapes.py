"""Several kinds of steps in one arena, each with a plan of its own.

Contract: whichever kind follows whichever, no two planned requests that are live together share a byte, as long as the
steps are as they were observed; and no two streams share a byte of the arena, in which each has a region. What a step
hands on (gradients until they are zeroed, a batch that is replaced) has a place that all kinds share: handed-on
requests of a stream are ranked by size, those of one rank get one place, and every kind keeps it free for as long as
what was handed on to a step of that kind has been seen to live in it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.lifespans.units import StepKind
from stalloc.planner import Layout, Plan, plan_arrays
from stalloc.planner.ring import ring_bound
from stalloc.runtime.layout import ALIGNMENT
from stalloc.runtime.segments import round_up
from stalloc.trace.record import Column

_NOTHING: Column = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Tapes:
    """The plans of several kinds of steps, one after the other in columns."""

    kinds: list[StepKind]
    size: Column  #: (k,) requested bytes
    stream: Column  #: (k,)
    offset: Column  #: (k,) bytes; -1: not planned, since the end is not known, or what it replaces is not gone yet
    begins: list[int]  #: where each kind's begin
    peak_bytes: int  #: of the arena
    lower_bound_bytes: int  #: the largest maximum load of any kind
    method: str

    @property
    def arena(self) -> tuple[int, tuple[Any, ...]]:
        """Bytes of the arena, and what goes into it: see `DeviceState.install_tape`."""
        return round_up(self.peak_bytes), (self.size, self.stream, self.offset, 0, 0)

    def largest_plan(self, device: int) -> Plan:
        """The plan of the kind with the most requests, for reports; its peak is the arena's."""
        index = int(np.argmax([len(kind.size) for kind in self.kinds]))
        kind, first = self.kinds[index], self.begins[index]
        length = len(kind.size)
        offset, start = self.offset[first : first + length], np.arange(length, dtype=np.int64)
        return Plan(
            offset=offset,
            size=kind.size,
            start=start,
            end=np.minimum(kind.end, start + length),
            stream=kind.stream,
            device=device,
            alignment=ALIGNMENT,
            peak_bytes=self.peak_bytes,
            lower_bound_bytes=self.lower_bound_bytes,
            optimal=self.peak_bytes == self.lower_bound_bytes,
            method=f"{len(self.kinds)} kinds of steps, {self.method}",
            kind="program",
            provenance={},
            ring_end=length,
            tape_row=start,
            tape_size=kind.size,
            tape_stream=kind.stream,
            tape_start=start,
            tape_end=np.minimum(kind.end, start + length),
            tape_offset=offset,
        )


def plan_steps(kinds: list[StepKind], made: dict[bytes, Layout]) -> Tapes:
    """Plan several kinds of steps for one arena, in which every stream has a region that no other stream uses.

    `made` holds the layouts of earlier calls, and gets those of this one, so that a kind that is added is all there is
    to plan.
    """
    streams = np.unique(np.concatenate([kind.stream[kind.end > 0] for kind in kinds]))
    offsets = [np.full(len(kind.size), -1, np.int64) for kind in kinds]
    planned: list[list[_Placed]] = [[] for _ in kinds]
    peak, methods = 0, []
    for stream in streams.tolist():
        placed = _plan_stream(kinds, stream, made)
        for offset, own, all_of_kind in zip(offsets, placed, planned, strict=True):
            offset[own.rows] = peak + own.offset
            all_of_kind.append(own)
        peak += max(own.peak_bytes for own in placed)
        methods += [own.method for own in placed if own.method]
    lengths = [len(kind.size) for kind in kinds]
    return Tapes(
        kinds=kinds,
        size=np.concatenate([kind.size for kind in kinds]),
        stream=np.concatenate([kind.stream for kind in kinds]),
        offset=np.concatenate(offsets),
        begins=[0, *np.cumsum(lengths)[:-1].tolist()],
        peak_bytes=peak,
        lower_bound_bytes=max(_bound(placed, length) for placed, length in zip(planned, lengths, strict=True)),
        method=methods[0],
    )


@dataclass(frozen=True, eq=False)
class _Placed:
    """What one kind of step has of one stream: rows with their places in the region, and what they were planned with.

    `start`, `end` and `size` (bytes) are those of all that is kept free there, what is handed on to the step too.
    """

    rows: Column
    offset: Column
    start: Column
    end: Column
    size: Column
    peak_bytes: int
    method: str


def _plan_stream(kinds: list[StepKind], stream: int, made: dict[bytes, Layout]) -> list[_Placed]:
    """Plan what all kinds ask for on one stream, for one region."""
    handed = [kind.handed_on(stream) for kind in kinds]
    num_places = max(len(rows) for rows in handed)
    place_size = np.zeros(num_places, np.int64)
    for kind, rows in zip(kinds, handed, strict=True):
        place_size[: len(rows)] = np.maximum(place_size[: len(rows)], _rounded(kind.size[rows]))
    kept = _kept_until(kinds, stream, num_places)
    placed = [_Placed(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, 0, "")] * len(kinds)
    places = np.full(num_places, -1, np.int64)
    # the one that needs most decides where the shared places are
    needs = [int(_rounded(kind.size[(kind.end > 0) & (kind.stream == stream)]).sum()) for kind in kinds]
    for index in np.argsort(needs, kind="stable")[::-1].tolist():
        if needs[index] == 0:
            continue
        kind, rows = kinds[index], handed[index]
        length = len(kind.size)
        own = np.flatnonzero((kind.end > 0) & (kind.end <= length) & (kind.stream == stream))
        until, begin = kept[index], np.zeros(num_places, np.int64)
        fits = np.flatnonzero(rows >= until[: len(rows)])  # ranks whose place is empty when it is asked for
        begin[fits] = rows[fits]
        until = np.where(begin > 0, until + length, until)
        fixed = np.concatenate([np.full(len(own), -1, np.int64), places])
        start, end = np.concatenate([own, begin]), np.concatenate([kind.end[own], until])
        size = np.concatenate([_rounded(kind.size[own]), place_size])
        asked = np.concatenate([[length], start, end, size, fixed]).tobytes()
        if asked not in made:
            given = fixed if (fixed >= 0).any() else None
            made[asked] = plan_arrays(start, end, size, alignment=ALIGNMENT, ring=(0, length), fixed=given)
        layout = made[asked]
        places = layout.offset[len(own) :]
        placed[index] = _Placed(
            rows=np.concatenate([own, rows[fits]]),
            offset=np.concatenate([layout.offset[: len(own)], places[fits]]),
            start=start,
            end=end,
            size=size,
            peak_bytes=layout.peak_bytes,
            method=layout.method,
        )
    return placed


def _bound(placed: list[_Placed], length: int) -> int:
    """The maximum load of a kind of step of so many requests, over all streams."""
    start, end, size = (np.concatenate([getattr(own, name) for own in placed]) for name in ("start", "end", "size"))
    counted = start < end
    return ring_bound(start[counted], end[counted], size[counted], 0, length) if counted.any() else 0


def _rounded(size: Column) -> Column:
    return (size + (ALIGNMENT - 1)) & -ALIGNMENT


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
