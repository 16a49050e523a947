"""Watching a recorded run for what could be kept in host memory: the steps of optimizers, and layers with parameters.

Contract: a look costs no memory of the device and changes nothing; the clock is the number of events in the record of
the runtime.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stalloc.fitting.foreseen_paging import UpdateRecorded
from stalloc.fitting.foreseen_streaming import LayerRecorded
from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.parameters import has_gradient, why_not_one_by_one
from stalloc.techniques.repeated_blocks import Block
from stalloc.techniques.state_pager import is_large
from stalloc.techniques.streamed_forward import streamable


@dataclass
class _Update:
    begin: int
    end: int = -1
    parameter_bytes: list[int] = field(default_factory=list)
    is_updated: list[bool] = field(default_factory=list)
    addresses: list[list[int]] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)


@dataclass
class _Layer:
    block: tuple[int, str]
    appeared: int
    addresses: list[int]
    accumulated: list[int] = field(default_factory=list)


class UpdateWatch:
    """The steps of a run. `clock` gives the number of events so far."""

    def __init__(self, clock: Callable[[], int]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._clock = clock
        self._updates: list[_Update] = []
        self._layers: list[_Layer] = []
        when_models_appear(self._appeared)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._end(optimizer))

    def _appeared(self, number: int, blocks: list[Block], model: Any) -> None:
        moment = self._clock()
        for block in blocks:
            parameters = [one for one in streamable(model, block)[0] if one.is_cuda]
            layer = _Layer((number, block.name), moment, [_address_of(one) for one in parameters])
            self._layers.append(layer)
            for one in parameters:
                is_trained = one.requires_grad
                if one.is_floating_point() or one.is_complex():
                    one.requires_grad_(True)  # it may be later
                    one.register_post_accumulate_grad_hook(
                        lambda _, layer=layer: layer.accumulated.append(self._clock())
                    )
                    one.requires_grad_(is_trained)

    def _begin(self, optimizer: Any) -> None:
        if not why_not_one_by_one(optimizer):
            self._updates.append(_Update(self._clock()))

    def _end(self, optimizer: Any) -> None:
        if why_not_one_by_one(optimizer) or not self._updates or self._updates[-1].end >= 0:
            return
        update = self._updates[-1]
        update.end = self._clock()
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            values = optimizer.state.get(parameter, {}).values()
            large = [one for one in values if is_large(one) and one.is_cuda]
            update.parameter_bytes.append(parameter.nbytes)
            update.is_updated.append(has_gradient(parameter))
            update.addresses.append([_address_of(one) for one in large])
            update.parameters.append(_address_of(parameter) if parameter.is_cuda else 0)

    def seen(self, request: Callable[[int, int], int]) -> list[UpdateRecorded]:
        """The whole steps; `request` gives the row of what lies at an address at a moment."""
        return [
            UpdateRecorded(
                one.begin,
                one.end,
                one.parameter_bytes,
                one.is_updated,
                [[request(address, one.end) for address in addresses] for addresses in one.addresses],
                [request(address, one.end) for address in one.parameters],
            )
            for one in self._updates
            if one.end >= 0
        ]

    def layers(self, request: Callable[[int, int], int], rows: Mapping[tuple[int, str], int]) -> list[LayerRecorded]:
        """Blocks whose parameters are all known requests; `rows` are those of blocks by model and name."""
        found = []
        for layer in self._layers:
            requests = [request(address, layer.appeared) for address in layer.addresses]
            if layer.block in rows and requests and min(requests) >= 0:
                found.append(LayerRecorded(rows[layer.block], layer.appeared, requests, layer.accumulated))
        return found


def _address_of(tensor: Any) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address
