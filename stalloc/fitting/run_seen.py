"""A run in which every block is computed again, request by request, and from it the peak of every other choice.

Contract: nothing is modelled that was not seen. In that run each operation of a block allocates twice: in the forward
pass, and again in backward. Where a result is kept the first allocation lives on until the second would have been
freed, and the second is not made; a block that is left alone keeps what backward reads of it, and makes nothing a
second time. All steps of the run are looked at, the first included.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.columns import Column

Span = tuple[int, int]
"""Events of the record [begin, end) during an operation."""


@dataclass(frozen=True)
class CallRecorded:
    """One call of a block that was computed again."""

    block: int  #: row of the blocks
    inputs: list[int]  #: requests that hold what it was given; -1: of nothing that was requested
    forward: list[Span]  #: of each operation
    again: list[Span]  #: the same of the second time, which may end early


@dataclass(frozen=True)
class RunSeen:
    """Requests of the run, (n,) events and bytes as the allocator counts them, and the calls of blocks."""

    start: Column
    end: Column
    size: Column
    calls: list[CallRecorded]

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        columns = {name: getattr(self, name).tolist() for name in ("start", "end", "size")}
        return {**columns, "calls": [list(vars(call).values()) for call in self.calls]}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "RunSeen":
        """What `as_json` gave."""
        start, end, size = (np.array(told[name], np.int64) for name in ("start", "end", "size"))
        return cls(start, end, size, [CallRecorded(*call) for call in told["calls"]])


@dataclass(frozen=True)
class _Pairs:
    """Requests of one call that were made in the forward pass and made again, row by row."""

    first: Column
    second: Column
    position: Column  #: of their operation
    is_result: Column  #: whether they outlive it
    is_saved: Column  #: whether the second outlives the second time: backward reads it
    again: Column  #: all requests of the second time
    again_position: Column
    unsaved: Column  #: requests of the first time that are held for the second alone


class Foresight:
    """What other choices would have made of a run.

    What the run held until backward though the program as it is does not: `unsaved` gives, for each block, positions
    of operations with the bytes of what autograd does save of them; `gone`, for each call, places of inputs with the
    event by which they were gone.
    """

    def __init__(
        self, run: RunSeen, unsaved: Sequence[Mapping[int, Collection[int]]], gone: Sequence[Mapping[int, int]]
    ) -> None:
        self._run = run
        self._pairs = _paired(run, unsaved)
        self._holders = _holders(run, gone)

    def peak_bytes(self, kept: Mapping[int, Collection[int]]) -> int:
        """The most that would be allocated, where the blocks of these rows are computed again with operations kept."""
        live, end = self.lifespans(kept)
        run = self._run
        num_events = int(run.end.max(initial=0)) + 1
        change = np.bincount(np.maximum(run.start[live], 0), run.size[live], num_events + 1)
        change -= np.bincount(end[live], run.size[live], num_events + 1)
        return int(np.cumsum(change).max(initial=0))

    def lifespans(self, kept: Mapping[int, Collection[int]]) -> tuple[Column, Column]:
        """Which requests would be made, and where each would end."""
        run = self._run
        end, live = run.end.copy(), np.ones(len(run.end), bool)
        for call, pairs in zip(run.calls, self._pairs, strict=True):
            positions = kept.get(call.block)
            if positions is None:
                held = pairs.is_saved
                live[pairs.again] = False
                end[pairs.unsaved] = np.minimum(end[pairs.unsaved], call.forward[-1][1])
            else:
                wanted = np.fromiter(positions, np.int64)
                held = pairs.is_result & np.isin(pairs.position, wanted)
                live[pairs.again[np.isin(pairs.again_position, wanted)]] = False
            first, second = pairs.first[held], pairs.second[held]
            end[first] = np.maximum(end[first], run.end[second])
        for request, holders in self._holders.items():
            if not any(run.calls[call].block in kept for call, _ in holders):
                end[request] = min(end[request], max(event for _, event in holders))
        return live, end


def _paired(run: RunSeen, unsaved: Sequence[Mapping[int, Collection[int]]]) -> list[_Pairs]:
    spans = [
        (*span, number, phase, position)
        for number, call in enumerate(run.calls)
        for phase, all_spans in enumerate((call.forward, call.again))
        for position, span in enumerate(all_spans)
    ]
    table = np.array(sorted(spans), np.int64).reshape(-1, 5)
    span = np.searchsorted(table[:, 0], run.start, side="right") - 1
    inside = (span >= 0) & (run.start < table[span, 1]) if len(table) else np.zeros(len(span), bool)
    # what is never freed is a library's own (a workspace of cuBLAS for each thread), whoever came first
    rows = np.flatnonzero(inside & (run.end < run.end.max(initial=0)))
    span = span[rows]
    ordinal = np.arange(len(rows)) - np.searchsorted(span, span)  # rows are in the order of their starts
    of_call: list[tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]] = [({}, {}) for _ in run.calls]
    for row, (_, _, number, phase, position), place in zip(
        rows.tolist(), table[span].tolist(), ordinal.tolist(), strict=True
    ):
        of_call[number][phase][position, place] = row
    return [_pairs_of(run, call, *found, unsaved[call.block]) for call, found in zip(run.calls, of_call, strict=True)]


def _pairs_of(
    run: RunSeen,
    call: CallRecorded,
    forward: dict[tuple[int, int], int],
    again: dict[tuple[int, int], int],
    unsaved: Mapping[int, Collection[int]],
) -> _Pairs:
    both = sorted(forward.keys() & again.keys())
    first, second = (np.array([rows[key] for key in both], np.int64) for rows in (forward, again))
    position = np.array([key[0] for key in both], np.int64)
    ends = np.array(call.forward, np.int64).reshape(-1, 2)[:, 1], np.array(call.again, np.int64).reshape(-1, 2)[:, 1]
    outlives = (run.end[first] > ends[0][position]) | (run.end[second] > ends[1][position])
    # what Python held of the second time is let go right after it, before backward asks for anything
    over = int(ends[1][-1]) if len(ends[1]) else 0
    later = np.searchsorted(run.start, over)
    over = int(run.start[later]) if later < len(run.start) else over
    return _Pairs(
        first, second, position, outlives, run.end[second] > over,
        np.array(list(again.values()), np.int64), np.array([key[0] for key in again], np.int64),
        np.array(
            [
                row
                for key, row in forward.items()
                if key[0] in unsaved and key not in again and int(run.size[row]) not in unsaved[key[0]]
            ],
            np.int64,
        ),
    )  # fmt: skip


def _holders(run: RunSeen, gone: Sequence[Mapping[int, int]]) -> dict[int, list[tuple[int, int]]]:
    """Requests that only calls which are computed again hold until backward: those calls, and when it would be gone."""
    holders: dict[int, list[tuple[int, int]]] = {}
    saved: set[int] = set()
    for number, call in enumerate(run.calls):
        for place, request in enumerate(call.inputs):
            if request >= 0:
                holders.setdefault(request, []).append((number, gone[number].get(place, 0)))
                if place not in gone[number]:
                    saved.add(request)
    return {request: calls for request, calls in holders.items() if request not in saved}
