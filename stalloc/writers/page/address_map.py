"""Addresses over time for a picture: what was never reserved is left out, so that segments lie side by side.

So that a million requests stay fluid, each has a level of detail. At zoom L a column of pixels shows about 2^L events.
A request is drawn there if it lives as long as that, or if it is among the largest that begin within the same 2^L
events: what is drawn then depends on the width of the picture, not on the length of the record.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.planner import plan
from stalloc.replay.compacting import Compacting
from stalloc.replay.model import TableModel
from stalloc.replay.model_events import events_of
from stalloc.replay.planned import Planned
from stalloc.replay.protocol import Events
from stalloc.replay.registry import make
from stalloc.replay.simulation import Candidate
from stalloc.sizes import ALIGNMENT_BYTES
from stalloc.trace import Action, Trace
from stalloc.writers.placing import covered_ranges, recorded_addresses

_MAX_SECONDS = 5.0
_MAX_SEARCHED = 200_000  # requests; a plan of more takes one order of them, and no search


@dataclass(frozen=True, eq=False, kw_only=True)
class AddressMap:
    """Where each request lives, in units of 512 bytes from the bottom of the picture."""

    name: str
    place: Column  #: (n,) the lowest unit of each request
    height: int  #: the height of the map, in units
    segments: Column
    """(s, 4) moment at which a segment begins and ends, lowest and highest unit; moment 0 is before the first event."""
    note: str = ""


def recorded_map(trace: Trace) -> AddressMap | None:
    """The addresses of the record, None if it has none."""
    address = recorded_addresses(trace)
    if address is None:
        return None
    segments = _segments(trace)
    note = "" if len(segments[0]) else "segments are not in the file"
    return side_by_side("as recorded", trace, address, segments, note)


def side_by_side(
    name: str, trace: Trace, address: Column, segments: tuple[Column, Column, Column, Column], note: str = ""
) -> AddressMap:
    """The map of requests at (n,) addresses (uint64), without the ranges that were never used.

    `segments` are (s,) columns: address ranges [low, high) (uint64) that were reserved in the moments [begin, end).
    """
    low, high, begin, end = segments
    sizes = np.concatenate([np.maximum(trace.size, 1), (high - low).astype(np.int64)])
    covered, size = covered_ranges(np.concatenate([address, low]), sizes)
    bottom = np.cumsum(size) - size

    def unit(at: Column) -> Column:
        row = np.searchsorted(covered, at, side="right") - 1
        return (bottom[row] + (at - covered[row]).astype(np.int64)) // ALIGNMENT_BYTES

    top = unit(high - np.uint64(1)) + 1 if len(high) else np.zeros(0, np.int64)
    rows = np.stack([begin, end, unit(low), top], axis=1) if len(low) else np.zeros((0, 4), np.int64)
    height = int(size.sum()) // ALIGNMENT_BYTES
    return AddressMap(name=name, place=unit(address), height=height, segments=rows, note=note)


def planned_map(trace: Trace) -> AddressMap:
    """A plan of the whole record by stalloc, all streams in one arena: a real run does not know what is to come."""
    method = "auto" if trace.num_requests <= _MAX_SEARCHED else "greedy"
    lifespans = trace.start, trace.end, np.maximum(trace.size, 1)
    made = plan(lifespans, alignment=ALIGNMENT_BYTES, method=method, time_budget_seconds=_MAX_SECONDS)
    height = max(-(-made.peak_bytes // ALIGNMENT_BYTES), 1)
    arena = np.array([[0, max(trace.num_events, 1) + 1, 0, height]], np.int64)
    place = made.offset // ALIGNMENT_BYTES
    return AddressMap(name="stalloc's plan, in hindsight", place=place, height=height, segments=arena)


def _segments(trace: Trace) -> tuple[Column, Column, Column, Column]:
    """Address ranges [low, high) (uint64) that were reserved in the moments [begin, end), by the record."""
    grows = np.isin(trace.action, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP))
    rows = np.flatnonzero(grows | np.isin(trace.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)))
    low = np.concatenate([trace.address[rows], trace.segment_address])
    size = np.concatenate([trace.event_size[rows], trace.segment_size])
    high = low + size.astype(np.uint64)
    edges = np.unique(np.concatenate([low, high]))
    first, last = np.searchsorted(edges, low), np.searchsorted(edges, high)
    cells = max(len(edges) - 1, 0)
    since = np.full(cells, _UNSEEN)
    found: list[tuple[int, int, int, int]] = []
    breaks = np.zeros(cells + 1, bool)  # where another segment begins, though it was reserved as early

    def close(begin: int, end: int, event: int) -> None:
        """What is reserved of the cells [begin, end) goes at an event."""
        cells = np.arange(begin, end)
        starts = cells[(cells == begin) | breaks[cells] | (since[cells] != since[cells - 1])].tolist()
        for at, until in itertools.pairwise([*starts, end]):
            if since[at] != _GONE:
                found.append((at, until, max(int(since[at]) + 1, 0), event + 1))

    for number, row in enumerate(rows.tolist()):
        cell_begin, cell_end = int(first[number]), int(last[number])
        if grows[row]:
            since[cell_begin:cell_end] = row
        else:
            close(cell_begin, cell_end, row)
            since[cell_begin:cell_end] = _GONE
    held = np.zeros(cells, bool)  # at the end
    for begin, end in zip(first[len(rows) :].tolist(), last[len(rows) :].tolist(), strict=True):
        held[begin:end] = True
    since[~held & (since == _UNSEEN)] = _GONE
    breaks[first[len(rows) :]] = True
    close(0, cells, trace.num_events)
    columns = np.array(found, np.int64).reshape(-1, 4).T
    return edges[columns[0]], edges[columns[1]], columns[2], columns[3]


_UNSEEN, _GONE = -1, -2
_MAX_MOMENTS = 1000  # at which the segments of a model are looked at


def replayed_map(trace: Trace, candidate: Candidate) -> AddressMap:
    """Where an allocator would have placed each request, on an empty device without limit.

    Raises BadInputError for an allocator whose model gives no fixed addresses.
    """
    events = events_of(trace)
    model = _model(candidate)
    fed = model.feed(events)
    address = model.addresses().astype(np.uint64)
    placed = address > 0  # the others have no bytes
    address[~placed] = address[placed].min(initial=1 << 62)
    changes = np.flatnonzero(np.diff(fed.reserved_bytes, prepend=0)) + 1
    if isinstance(model, Planned):  # whose pages move without a change of what is reserved
        changes = np.arange(1, len(events.kind) + 1)
    looked_at = changes[np.unique(np.linspace(0, len(changes) - 1, min(len(changes), _MAX_MOMENTS)).astype(np.int64))]
    note = f"{human_bytes(int(fed.reserved_bytes.max(initial=0)))} reserved at the peak"
    if len(looked_at) < len(changes):
        note += f", segments as of {len(looked_at):,} moments"
    segments = _model_segments(_model(candidate), events, looked_at, max(trace.num_events, 1) + 1)
    name = ", ".join(filter(None, (candidate.allocator, candidate.settings)))
    return side_by_side(f"{name} (model)", trace, address, segments, note)


def _model(candidate: Candidate) -> TableModel | Planned:
    model = make(candidate.allocator, candidate.settings)
    if not isinstance(model, TableModel | Planned) or isinstance(model, Compacting):
        raise BadInputError(
            f"the model of {candidate.allocator} gives no fixed addresses, so there is no map of it: leave it out."
        )
    return model


def _model_segments(
    model: TableModel | Planned, events: Events, looked_at: Column, num_moments: int
) -> tuple[Column, Column, Column, Column]:
    """Address ranges [low, high) (uint64) that the model has reserved in the moments [begin, end).

    The model is fed up to each of the positions `looked_at`.
    """
    moments, held = [], []
    for begin, end in itertools.pairwise([0, *looked_at.tolist()]):
        part = slice(begin, end)
        model.feed(events._replace(kind=events.kind[part], request=events.request[part], event=events.event[part]))
        blocks = model.blocks()
        moments.append(int(events.event[end - 1]) + 1)
        held.append((blocks.segment_address, blocks.segment_address + blocks.segment_size))
    edges = np.unique(np.concatenate([bound for pair in held for bound in pair] or [np.zeros(1, np.int64)]))
    since = np.full(len(edges) - 1, -1)  # the moment from which on each stretch between two edges is reserved
    found: list[tuple[int, int, int, int]] = []
    nothing = np.zeros(0, np.int64)
    for moment, (low, high) in zip([*moments, num_moments], [*held, (nothing, nothing)], strict=True):
        change = np.zeros(len(edges), np.int64)
        np.add.at(change, np.searchsorted(edges, low), 1)
        np.add.at(change, np.searchsorted(edges, high), -1)
        reserved = np.cumsum(change)[:-1] > 0
        gone = np.where(~reserved & (since >= 0), since, -1)
        bounds = np.flatnonzero(np.diff(gone, prepend=-1, append=-1))
        for first, last in itertools.pairwise(bounds.tolist()):
            if gone[first] >= 0:
                found.append((int(edges[first]), int(edges[last]), int(gone[first]), moment))
        since[~reserved] = -1
        since[reserved & (since < 0)] = moment
    low, high, begin, end = np.array(found, np.int64).reshape(-1, 4).T
    return low.astype(np.uint64), high.astype(np.uint64), begin, end


LARGEST_IN_COLUMN = 16  #: requests of one column that are drawn however short they live


def detail_levels(start: Column, end: Column, size: Column) -> Column:
    """(n,) uint8: the highest zoom level at which each request is drawn.

    `start`, `end` (n,) are event indices, `size` (n,) bytes. A request of level l lives less than 2^(l+1) events, so
    that those around an event are found by their start.
    """
    level = np.frexp(np.maximum(end - start, 1).astype(float))[1] - 1  # floor(log2(duration))
    begin = np.maximum(start, 0)
    rows = np.flatnonzero(size > 0)
    for zoom in range(1, int(end.max(initial=1)).bit_length() + 1):
        column = begin[rows] >> zoom
        order = np.lexsort((-size[rows], column))
        sorted_column = column[order]
        first = np.searchsorted(sorted_column, sorted_column)
        rows = rows[order[np.arange(len(rows)) - first < LARGEST_IN_COLUMN]]
        level[rows] = np.maximum(level[rows], zoom)
    return level.astype(np.uint8)
