"""Addresses over time as another allocator would have given them, by its model in the replay lab."""

import itertools

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.replay.compacting import Compacting
from stalloc.replay.model import TableModel
from stalloc.replay.model_events import events_of
from stalloc.replay.planned import Planned
from stalloc.replay.protocol import Events
from stalloc.replay.registry import make
from stalloc.replay.simulation import Candidate
from stalloc.trace import Trace
from stalloc.writers.page.address_map import AddressMap, side_by_side

_MAX_MOMENTS = 1000  # at which the segments are looked at


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
    segments = _segments(_model(candidate), events, looked_at, max(trace.num_events, 1) + 1)
    name = ", ".join(filter(None, (candidate.allocator, candidate.settings)))
    return side_by_side(f"{name} (model)", trace, address, segments, note)


def _model(candidate: Candidate) -> TableModel | Planned:
    model = make(candidate.allocator, candidate.settings)
    if not isinstance(model, TableModel | Planned) or isinstance(model, Compacting):
        raise BadInputError(
            f"the model of {candidate.allocator} gives no fixed addresses, so there is no map of it: leave it out."
        )
    return model


def _segments(
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
