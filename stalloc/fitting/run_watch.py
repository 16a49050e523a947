"""Watching a run: which events of its record belong to which operation, update, layer with parameters and activation.

Contract: a note costs no memory of the device and changes nothing; the clock is the number of events in the record of
the runtime, or for activations estimated seconds since a step began.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stalloc.cost.gpu_rates import GpuRates
from stalloc.fitting.foreseen_host import ActivationsRecorded, Kind, LayerRecorded, UpdateRecorded
from stalloc.fitting.observer import Timing
from stalloc.fitting.run_seen import CallRecorded, RunSeen
from stalloc.sizes import aligned
from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.block_tape import BlockTape, Wanted
from stalloc.techniques.gradient_access import has_gradient
from stalloc.techniques.layer_streaming import streamable
from stalloc.techniques.optimizer_facts import why_not_one_by_one
from stalloc.techniques.recompute import MakeTape
from stalloc.techniques.repeated_blocks import Block
from stalloc.techniques.state_pager import is_large
from stalloc.trace import Trace

_Request = Callable[[int, int], int]
"""Gives the request that an address is of at a moment; -1: none."""


class UpdateWatch:
    """The optimizers' steps of a run, and its layers. `clock` gives the number of events so far."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._begun = -1
        self._updates: list[UpdateRecorded] = []  # addresses in the place of requests, as in layers
        self._layers: list[tuple[tuple[int, str], LayerRecorded]] = []
        when_models_appear(self._appeared)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._end(optimizer))

    def _appeared(self, number: int, blocks: list[Block], model: Any) -> None:
        moment = self._clock()
        for block in blocks:
            parameters = [one for one in streamable(model, block)[0] if one.is_cuda]
            layer = LayerRecorded(-1, moment, [_address_of(one) for one in parameters], [])
            self._layers.append(((number, block.name), layer))
            for one in parameters:
                if one.is_floating_point() or one.is_complex():
                    is_trained = one.requires_grad
                    one.requires_grad_(True)  # it may be later
                    one.register_post_accumulate_grad_hook(lambda _, to=layer: to.accumulated.append(self._clock()))
                    one.requires_grad_(is_trained)

    def _begin(self, optimizer: Any) -> None:
        if not why_not_one_by_one(optimizer):
            self._begun = self._clock()

    def _end(self, optimizer: Any) -> None:
        if why_not_one_by_one(optimizer) or self._begun < 0:
            return
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        states = (optimizer.state.get(one, {}).values() for one in parameters)
        update = UpdateRecorded(
            self._begun,
            self._clock(),
            [one.nbytes for one in parameters],
            [has_gradient(one) for one in parameters],
            [[_address_of(one) for one in state if is_large(one) and one.is_cuda] for state in states],
            [_address_of(one) for one in parameters],
        )
        self._updates.append(update)
        self._begun = -1

    def seen(self, request: _Request) -> list[UpdateRecorded]:
        """The whole steps."""
        return [
            replace(
                one,
                states=[[request(address, one.end) for address in addresses] for addresses in one.states],
                parameters=[request(address, one.end) for address in one.parameters],
            )
            for one in self._updates
        ]

    def layers(self, request: _Request, rows: Mapping[tuple[int, str], int]) -> list[LayerRecorded]:
        """Blocks whose parameters are all known requests; `rows` are those of blocks by model and name."""
        found = []
        for block, layer in self._layers:
            requests = [request(address, layer.appeared) for address in layer.requests]
            if block in rows and requests and min(requests) >= 0:
                found.append(replace(layer, block=rows[block], requests=requests))
        return found


class ActivationWatch:
    """A `Watcher` that records what becomes of activations, and when by its clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._events: list[tuple[float, int, int]] = []
        self._number: dict[int, int] = {}  # of each activation, in the order of the record
        self._sizes: list[int] = []
        self._saved_at: list[tuple[int, int]] = []  # address, moment
        self._back_at: list[tuple[int, int]] = []  # address and moment when it was first needed; 0: never

    def saved(self, number: int, storage: Any) -> None:
        self._number[number] = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._saved_at.append((storage.data_ptr(), int(self._clock())))
        self._back_at.append((0, 0))
        self._note(Kind.SAVED, number)

    def needed(self, number: int, storage: Any) -> None:
        if number in self._number:
            row = self._number[number]
            if not self._back_at[row][0]:
                self._back_at[row] = storage.data_ptr(), int(self._clock())
            self._note(Kind.NEEDED, number)

    def gone(self, number: int) -> None:
        if number in self._number:
            self._note(Kind.GONE, number)

    def _note(self, kind: Kind, number: int) -> None:
        self._events.append((self._clock(), int(kind), self._number[number]))

    def seen(self, request: _Request = lambda *_: -1) -> ActivationsRecorded:
        held = [request(*one) for one in self._saved_at]
        back = [request(*one) if one[0] else -1 for one in self._back_at]
        returns = [-1 if one == other else other for one, other in zip(held, back, strict=True)]
        return ActivationsRecorded(list(self._events), list(self._sizes), held, returns)


class TimedStep:
    """Estimates when activations are saved and needed in the second step, in seconds since it began."""

    def __init__(self, rates: GpuRates) -> None:
        self._rates, self._seconds, self._num_steps = rates, 0.0, 0
        self.watch = ActivationWatch(lambda: self._seconds)
        self._mode = Timing(rates, self._took)
        self._seen: dict[str, Any] = {}

    def step_ended(self) -> None:
        self._num_steps += 1
        if self._num_steps == 1:
            self.watch.begin()
            self._seconds = 0.0
            self._mode.__enter__()
        elif self._num_steps == 2:
            self._mode.__exit__(None, None, None)
            self._seen = {"activations": list(vars(self.watch.seen()).values()), "step_seconds": self._seconds}

    def seen(self) -> dict[str, Any]:
        return self._seen

    def _took(self, seconds: float, *_: Any) -> None:
        self._seconds += seconds


class RunWatch:
    """The calls of a run. `clock` gives the number of events so far."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._calls: list[tuple[tuple[int, str], int, CallRecorded]] = []  # block, moment, addresses as inputs

    def of_model(self, model: int) -> MakeTape:
        def make(block: str, wanted: Wanted, inputs: Sequence[Any] = ()) -> BlockTape:
            addresses = [_address_of(one) if one.layout == torch.strided else 0 for one in inputs]
            call = CallRecorded(-1, addresses, [], [])
            self._calls.append(((model, block), self._clock(), call))
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
        by_address: dict[int, list[int]] = {}
        for row, address in enumerate(trace.address[trace.start.clip(0)].tolist()):
            by_address.setdefault(address, []).append(row)
        start, end = trace.start.tolist(), trace.end.tolist()

        def request(address: int, moment: int) -> int:
            found = [row for row in by_address.get(address, ()) if start[row] < moment <= end[row]]
            return found[-1] if found else -1

        calls = [
            replace(call, block=rows[block], inputs=[request(address, moment) for address in call.inputs])
            for block, moment, call in self._calls
            if block in rows
        ]
        run = RunSeen(trace.start, trace.end, aligned(trace.size).astype(np.int64), calls)
        if updates is not None:
            run = replace(run, updates=updates.seen(request), layers=updates.layers(request, rows))
        if activations is not None:
            run = replace(run, activations=activations.seen(request))
        return run


class _WatchedTape(BlockTape):
    def __init__(
        self, block: str, wanted: Wanted, inputs: Sequence[Any], call: CallRecorded, clock: Callable[[], int]
    ) -> None:
        super().__init__(block, wanted, inputs)
        self._call, self._clock, self._num_times = call, clock, 0

    def begin_again(self) -> None:
        super().begin_again()
        self._num_times += 1

    def record(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        begin = self._clock()
        results = super().record(operator, args, kwargs)
        self._call.forward.append((begin, self._clock()))
        return results

    def repeat(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        begin, before = self._clock(), self._position
        results = super().repeat(operator, args, kwargs)
        if self._num_times == 1 and self._position > before:  # else a weight was cast that was cast before
            self._call.again.extend([(begin, begin)] * (self._position - before - 1))
            self._call.again.append((begin, self._clock()))
        return results


def _address_of(tensor: Any) -> int:
    """Where the memory of a tensor of the device begins; 0 for another."""
    return int(tensor.untyped_storage().data_ptr()) if tensor.is_cuda else 0
