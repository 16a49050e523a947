"""Two runs, one as it is and one in which every block is recomputed: from these, the peak of every other choice.

Contract: nothing is modelled that was not seen. In the second run each operation of a block allocates twice: in the
forward pass, and again in backward. Where a result is kept the first allocation lives on until the second would have
been freed, and the second is not made; what a block makes that is left alone lives as long as in the first run. All
steps of the runs are looked at, the first included.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.fitting.foreseen_host import ActivationsRecorded, LayerRecorded, Pass, UpdateRecorded, paged, peak_bytes
from stalloc.techniques.tier_settings import TierSettings

Span = tuple[int, int]
"""Events of the record [begin, end) during an operation."""
_Rows = dict[tuple[int, int], int]
"""Requests by the position of their operation, and their place in it."""
_AGREE, _MOST_APART = 6, 64  # values that have to agree again; values that may have no pair before they do
_PIECE = 2048  # values of each that are compared where none agree again


@dataclass(frozen=True)
class CallRecorded:
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
        return [
            Pass(call.block, call.forward[0][0], call.forward[-1][1], call.again[0][0] if call.again else -1)
            for call in self.calls
            if call.forward
        ]

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {name: getattr(self, name).tolist() for name in ("start", "end", "size")}
        for name in ("calls", "updates", "layers"):
            told[name] = [list(vars(one).values()) for one in getattr(self, name)]
        return told | {"activations": list(vars(self.activations).values())}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "RunSeen":
        start, end, size = (np.array(told[name], np.int64) for name in ("start", "end", "size"))
        updates = [UpdateRecorded(*update) for update in told["updates"]]
        layers = [LayerRecorded(*layer) for layer in told["layers"]]
        calls = [CallRecorded(*call) for call in told["calls"]]
        return cls(start, end, size, calls, updates, layers, ActivationsRecorded(*told["activations"]))


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
        self.calls = run.calls
        self._calls = _calls_of(run)
        self._end_as_is, self._is_extra, num_pairs = _as_is(run, as_is, self._calls)
        self.unlike = 1 - num_pairs / max(len(as_is.size), 1)  #: share of the program's requests that the run lacks
        self._holders: dict[int, list[int]] = {}  # calls that hold an input
        for number, call in enumerate(run.calls):
            for request in call.inputs:
                if request >= 0:
                    self._holders.setdefault(request, []).append(number)

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
    is_freed = run.end < run.end.max(initial=0)  # one that never is may be a library's, such as a cuBLAS workspace
    rows = np.flatnonzero(inside & is_freed)
    span = span[rows]
    ordinal = np.arange(len(rows)) - np.searchsorted(span, span)  # rows are in the order of their starts
    of_call: list[tuple[_Rows, _Rows]] = [({}, {}) for _ in run.calls]
    found = zip(rows.tolist(), table[span].tolist(), ordinal.tolist(), strict=True)
    for row, (_, _, number, phase, position), place in found:
        of_call[number][phase][position, place] = row
    return [_call_of(run, call, *both) for call, both in zip(run.calls, of_call, strict=True)]


def _call_of(run: RunSeen, call: CallRecorded, forward: _Rows, again: _Rows) -> _Call:
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


def _as_is(run: RunSeen, as_is: RunSeen, calls: list[_Call]) -> tuple[Column, Column, int]:
    """For each request of the run, where it would end in the program as it is and whether that makes no such request;
    and how many requests both make. Both make the same requests in the same order, but for those of the second time,
    and for some of PyTorch's own that it makes because operations are looked at. What the program as it is frees before
    a request is freed before it here. Whether they are freed at all says nothing of that: at the end of a program a
    model goes at once, or when Python looks for cycles."""
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


def aligned(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The places of equal values in two sequences that are nearly the same, pair by pair; both ascend. Where the
    sequences part, they are joined at the nearest place from which a few values agree again, and as many values as
    possible between are paired; if there is no such place near, as many as possible of a longer piece."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            yield i, j
            i, j = i + 1, j + 1
            continue
        gap = _gap(one, other, i, j)
        a, b = gap or (_PIECE, _PIECE)
        pairs = _most_pairs(one[i : i + a], other[j : j + b])
        if gap is None and (i + a < len(one) or j + b < len(other)):  # the end of a piece is paired with what is left
            a, b = a // 2, b // 2
            pairs = [pair for pair in pairs if pair[0] < a and pair[1] < b]
            a, b = (pairs[-1][0] + 1, pairs[-1][1] + 1) if pairs else (a, b)
        yield from ((i + k, j + m) for k, m in pairs)
        i, j = i + a, j + b


def _gap(one: Sequence[int], other: Sequence[int], i: int, j: int) -> tuple[int, int] | None:
    """How many values to leave out of each sequence, as few as possible, so that the sequences agree again."""
    for total in range(1, _MOST_APART):
        for left_out in range(total, -1, -1):
            a, b = i + left_out, j + total - left_out
            if a < len(one) and b < len(other) and one[a : a + _AGREE] == other[b : b + _AGREE]:
                return left_out, total - left_out
    return None


def _most_pairs(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    """The longest common subsequence of two sequences, by places (Hyyrö 2004, a column of the table in each number). A
    bit of a column is 0 where the subsequence becomes longer with that value of `one`."""
    all_places = (1 << len(one)) - 1
    places: dict[int, int] = {}
    for place, value in enumerate(one):
        places[value] = places.get(value, 0) | 1 << place
    columns = [all_places]
    for value in other:
        longer = columns[-1] & places.get(value, 0)
        columns.append(((columns[-1] + longer) | (columns[-1] - longer)) & all_places)
    pairs = []
    i, j = len(one) - 1, len(other)
    while i >= 0 and j > 0:
        if columns[j] >> i & 1:
            i -= 1
        else:
            j -= 1
            if columns[j] >> i & 1:
                pairs.append((i, j))
                i -= 1
    return pairs[::-1]
