"""Watching a run in which blocks are recomputed: which events of the record belong to which operation.

Contract: a note costs no memory of the device and changes nothing; the clock is the number of events in the record of
the runtime.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from stalloc.fitting.activation_watch import ActivationWatch
from stalloc.fitting.run_seen import CallRecorded, RunSeen, Span
from stalloc.fitting.update_watch import UpdateWatch
from stalloc.sizes import aligned
from stalloc.techniques.block_tape import BlockTape, Wanted
from stalloc.techniques.recompute import MakeTape
from stalloc.trace import Trace


@dataclass
class _Call:
    block: tuple[int, str]
    given_at: int
    addresses: list[int]
    forward: list[Span] = field(default_factory=list)
    again: list[Span] = field(default_factory=list)
    num_times: int = 0


class RunWatch:
    """The calls of a run. `clock` gives the number of events so far."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._calls: list[_Call] = []

    def of_model(self, model: int) -> MakeTape:
        """Makes the tapes of the blocks of a model."""

        def make(block: str, wanted: Wanted, inputs: Sequence[Any] = ()) -> BlockTape:
            call = _Call((model, block), self._clock(), [address_of(one) for one in inputs])
            self._calls.append(call)
            return _WatchedTape(block, wanted, inputs, call, self._clock)

        return make

    def seen(
        self,
        trace: Trace,
        rows: Mapping[tuple[int, str], int],
        updates: UpdateWatch | None = None,
        activations: ActivationWatch | None = None,
    ) -> RunSeen:
        """The run, of the record's trace; `rows` are those of blocks by model and name."""
        sizes = aligned(trace.size).tolist()
        by_address: dict[int, list[int]] = {}
        addresses = trace.address[trace.start.clip(0)].tolist()
        for row, address in enumerate(addresses):
            by_address.setdefault(address, []).append(row)
        start, end = trace.start.tolist(), trace.end.tolist()

        def request(address: int, moment: int) -> int:
            found = [row for row in by_address.get(address, ()) if start[row] < moment <= end[row]]
            return found[-1] if found else -1

        calls = [
            CallRecorded(
                rows[call.block],
                [request(address, call.given_at) for address in call.addresses],
                call.forward,
                call.again,
            )
            for call in self._calls
            if call.block in rows
        ]
        run = RunSeen(trace.start, trace.end, np.array(sizes, np.int64), calls)
        if updates is not None:
            run = replace(run, updates=updates.seen(request), layers=updates.layers(request, rows))
        if activations is not None:
            run = replace(run, activations=activations.seen(request))
        return run


class _WatchedTape(BlockTape):
    """A tape that notes when its operations begin and end."""

    def __init__(
        self, block: str, wanted: Wanted, inputs: Sequence[Any], call: _Call, clock: Callable[[], int]
    ) -> None:
        super().__init__(block, wanted, inputs)
        self._call, self._clock = call, clock

    def begin_again(self) -> None:
        super().begin_again()
        self._call.num_times += 1

    def record(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        begin = self._clock()
        results = super().record(operator, args, kwargs)
        self._call.forward.append((begin, self._clock()))
        return results

    def repeat(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        begin, before = self._clock(), self._position
        results = super().repeat(operator, args, kwargs)
        if self._call.num_times == 1 and self._position > before:  # else a weight was cast that was cast before
            self._call.again += [(begin, begin)] * (self._position - before - 1)
            self._call.again.append((begin, self._clock()))
        return results


def address_of(tensor: Any) -> int:
    """Where the memory of a tensor of the device begins; 0 for another."""
    return tensor.untyped_storage().data_ptr() if tensor.is_cuda and tensor.layout == torch.strided else 0
