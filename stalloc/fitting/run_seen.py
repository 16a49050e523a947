"""Two runs, one as it is and one in which every block is recomputed: from these, the peak of every other choice.

Contract: nothing is modelled that was not seen. In the second run each operation of a block allocates twice: in the
forward pass, and again in backward. Where a result is kept the first allocation lives on until the second would have
been freed, and the second is not made; what a block makes that is left alone lives as long as in the first run. All
steps of the runs are looked at, the first included.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.fitting.alignment import aligned
from stalloc.fitting.foreseen_activations import ActivationsRecorded, as_rows, from_rows
from stalloc.fitting.foreseen_paging import UpdateRecorded, paged, peak_bytes
from stalloc.fitting.foreseen_streaming import LayerRecorded, Pass
from stalloc.techniques.technique_settings import TierSettings

Span = tuple[int, int]
"""Events of the record [begin, end) during an operation."""


@dataclass(frozen=True)
class CallRecorded:
    """One call of a block that was recomputed."""

    block: int  #: row of the blocks
    inputs: list[int]  #: requests that hold its inputs; -1: no request holds one
    forward: list[Span]  #: of each operation
    again: list[Span]  #: of each operation that is made again, which may end early


@dataclass(frozen=True)
class RunSeen:
    """Requests of the run, (n,) events and bytes as the allocator counts them, and the calls of blocks."""

    start: Column
    end: Column
    size: Column
    calls: list[CallRecorded]
    updates: list[UpdateRecorded] = field(default_factory=list)
    layers: list[LayerRecorded] = field(default_factory=list)
    activations: ActivationsRecorded = field(default_factory=ActivationsRecorded)

    @property
    def passes(self) -> list[Pass]:
        """When each block that was recomputed was called, and when backward reached it."""
        return [
            Pass(call.block, call.forward[0][0], call.forward[-1][1], call.again[0][0] if call.again else -1)
            for call in self.calls
            if call.forward
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values (JSON) for another process."""
        columns = {name: getattr(self, name).tolist() for name in ("start", "end", "size")}
        rows = {
            name: [list(vars(one).values()) for one in getattr(self, name)] for name in ("calls", "updates", "layers")
        }
        return {**columns, **rows, "activations": as_rows(self.activations)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "RunSeen":
        """The run of which `as_json` gave the values."""
        start, end, size = (np.array(told[name], np.int64) for name in ("start", "end", "size"))
        updates = [UpdateRecorded(*update) for update in told["updates"]]
        layers = [LayerRecorded(*layer) for layer in told["layers"]]
        calls = [CallRecorded(*call) for call in told["calls"]]
        return cls(start, end, size, calls, updates, layers, from_rows(told["activations"]))


@dataclass(frozen=True)
class _Call:
    """Requests of one call, rows of the run."""

    made: Column  #: in the forward pass
    first: Column  #: requests of the forward pass that are made again
    second: Column  #: the requests that make them again
    position: Column  #: of the operation that makes them
    is_result: Column  #: whether they outlive that operation
    again: Column  #: all requests of the second time
    again_position: Column


class Foresight:
    """What other choices would have made of a run in which every block is recomputed."""

    def __init__(self, run: RunSeen, as_is: RunSeen) -> None:
        self._run, self._as_is = run, as_is
        self._calls = _calls_of(run)
        self._end_as_is, self._is_extra, num_pairs = _as_is(run, as_is, self._calls)
        self.unlike = 1 - num_pairs / max(len(as_is.size), 1)  #: share of the program's requests that the run lacks
        self._holders: dict[int, list[int]] = {}  # calls that hold an input
        for number, call in enumerate(run.calls):
            for request in call.inputs:
                if request >= 0:
                    self._holders.setdefault(request, []).append(number)

    @property
    def calls(self) -> list[CallRecorded]:
        """The calls of the run in which every block is recomputed."""
        return self._run.calls

    @property
    def layer_bytes(self) -> dict[int, int]:
        """The parameters of each block that could be streamed, by its row."""
        return {one.block: int(self._run.size[one.requests].sum()) for one in self._run.layers if one.requests}

    def peak_bytes(self, kept: Mapping[int, Collection[int]]) -> int:
        """The most that would be allocated, where the blocks of these rows are recomputed with operations kept."""
        return int(self.load(kept).max(initial=0))

    def load(self, kept: Mapping[int, Collection[int]]) -> Column:
        """What would be allocated after each event of the run; where nothing is recomputed, of the first run."""
        if not kept:
            return _load(self._as_is.start, self._as_is.end, self._as_is.size)
        live, end = self.lifespans(kept)
        return _load(self._run.start[live], end[live], self._run.size[live])

    def peak_bytes_with(self, kept: Mapping[int, Collection[int]], tiers: TierSettings) -> int:
        """The most that would be allocated, as `peak_bytes`, with state and layers in the tiers."""
        run, end, size = self._as_is, self._as_is.end, self._as_is.size
        if kept or tiers.streamed_window:  # passes are known of the run in which blocks are recomputed
            run = self._run
            live, end = self.lifespans(kept)
            size = np.where(live, run.size, 0)
        return peak_bytes(paged((run.start, end, size), run.updates, tiers, run.layers, run.passes).lifespans)

    def lifespans(self, kept: Mapping[int, Collection[int]]) -> tuple[Column, Column]:
        """Which requests would be made, and where each would end."""
        run = self._run
        end, live = run.end.copy(), np.ones(len(run.end), bool)
        for recorded, call in zip(run.calls, self._calls, strict=True):
            positions = kept.get(recorded.block)
            if positions is None:
                live[call.again] = False
                live[call.made] = ~self._is_extra[call.made]
                end[call.made] = self._end_as_is[call.made]
            else:
                wanted = np.fromiter(positions, np.int64)
                held = call.is_result & np.isin(call.position, wanted)
                live[call.again[np.isin(call.again_position, wanted)]] = False
                end[call.first[held]] = np.maximum(end[call.first[held]], run.end[call.second[held]])
        for request, holders in self._holders.items():
            if any(run.calls[number].block in kept for number in holders):
                end[request] = max(end[request], run.end[request])
            else:
                end[request] = self._end_as_is[request]
        return live, end


def _load(start: Column, end: Column, size: Column) -> Column:
    num_events = int(end.max(initial=0)) + 1
    change = np.bincount(np.maximum(start, 0), size, num_events + 1) - np.bincount(end, size, num_events + 1)
    return np.cumsum(change).astype(np.int64)


def _calls_of(run: RunSeen) -> list[_Call]:
    spans = [
        (*span, number, phase, position)
        for number, call in enumerate(run.calls)
        for phase, all_spans in enumerate((call.forward, call.again))
        for position, span in enumerate(all_spans)
    ]
    table = np.array(sorted(spans), np.int64).reshape(-1, 5)
    span = np.searchsorted(table[:, 0], run.start, side="right") - 1
    inside = (span >= 0) & (run.start < table[span, 1]) if len(table) else np.zeros(len(span), bool)
    rows = np.flatnonzero(inside & _is_freed(run))
    span = span[rows]
    ordinal = np.arange(len(rows)) - np.searchsorted(span, span)  # rows are in the order of their starts
    of_call: list[tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]] = [({}, {}) for _ in run.calls]
    for row, (_, _, number, phase, position), place in zip(
        rows.tolist(), table[span].tolist(), ordinal.tolist(), strict=True
    ):
        of_call[number][phase][position, place] = row
    return [_call_of(run, call, *found) for call, found in zip(run.calls, of_call, strict=True)]


def _call_of(
    run: RunSeen, call: CallRecorded, forward: dict[tuple[int, int], int], again: dict[tuple[int, int], int]
) -> _Call:
    both = sorted(forward.keys() & again.keys())
    first, second = (np.array([rows[key] for key in both], np.int64) for rows in (forward, again))
    position = np.array([key[0] for key in both], np.int64)
    over, over_again = (np.array(spans, np.int64).reshape(-1, 2)[:, 1] for spans in (call.forward, call.again))
    return _Call(
        made=np.array(list(forward.values()), np.int64),
        first=first,
        second=second,
        position=position,
        is_result=(run.end[first] >= over[position]) | (run.end[second] >= over_again[position]),
        again=np.array(list(again.values()), np.int64),
        again_position=np.array([key[0] for key in again], np.int64),
    )


def _is_freed(run: RunSeen) -> Column:
    """Whether a request is freed: one that never is may be a library's (a cuBLAS workspace for each thread)."""
    return run.end < run.end.max(initial=0)


def _as_is(run: RunSeen, as_is: RunSeen, calls: list[_Call]) -> tuple[Column, Column, int]:
    """For each request of the run, where it would end in the program as it is and whether that makes no such request;
    and how many requests both make.

    Both make the same requests in the same order, but for those of the second time, and for some of PyTorch's own that
    it makes because operations are looked at. What the program as it is frees before a request is freed before it here.
    Whether they are freed at all says nothing of that: at the end of a program a model goes at once, or when Python
    looks for cycles.
    """
    once = np.ones(len(run.size), bool)
    for call in calls:
        once[call.again] = False
    rows = np.flatnonzero(once)
    pairs = np.array(list(aligned(run.size[rows].tolist(), as_is.size.tolist())), np.int64).reshape(-1, 2)
    same, other = rows[pairs[:, 0]], pairs[:, 1]
    end, is_extra = run.end.copy(), once
    following = np.searchsorted(as_is.start[other], as_is.end[other])
    end[same] = np.append(run.start[same], run.end.max(initial=0))[following]
    is_extra[same] = False
    return end, is_extra, len(same)
