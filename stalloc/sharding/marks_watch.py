"""Records the marks of the first steps of a program that is not sharded, in the process that runs it.

Contract: the program computes what it would, and allocates what it would. The last of the steps is one that makes no
optimizer state. What is asked of PyTorch's caching allocator is in its own history; a moment is the number of events
before it. Source of what is marked: the hooks of FSDP2 (torch.distributed.fsdp.fully_shard).
"""

from bisect import bisect_right
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from stalloc.allocator_conf import conf_in_force, conf_text
from stalloc.errors import SetupError
from stalloc.sharding.step_marks import Mark, MarkKind, Parameter, Program, StateTensor, StepMarks
from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.repeated_blocks import Block
from stalloc.techniques.sharding import units_within

WATCHED_STEP = 2  #: from 0: the first makes the state, the second has found it made
_COUNTED = ("alloc", "free_completed")  # actions of the allocator's history


class StepWatch:
    """To be made before the program makes its model."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.num_steps = 0
        torch.cuda._lazy_call(lambda: torch.cuda.memory._record_memory_history(context=None, max_entries=1 << 40))
        self._model: Any = None
        self._optimizer: Any = None
        self._units: list[tuple[str, Any]] = []
        self._parameters: list[tuple[str, int, Any]] = []
        self._marks: list[Mark] = []
        self._gradients: dict[int, int] = {}  # row of a mark: address of the gradient
        self._addresses: tuple[int, list[int]] = (0, [])  # of the parameters when the model was called first
        self._state: list[tuple[int, int, StateTensor]] = []  # when it was seen, and its address
        self._is_ending = False  # a backward pass of which the end will be marked
        self._entered: set[int] = set()
        when_models_appear(self._appeared)
        register_optimizer_step_pre_hook(self._update)
        register_optimizer_step_post_hook(self._updated)

    def told(self) -> StepMarks:
        """What was recorded; without marks if there were too few steps. Raises SetupError for a model elsewhere."""
        state, found = getattr(self._optimizer, "state", {}), _Requests()
        marks = [
            replace(mark, request=found.at(mark.event, self._gradients[row])) if row in self._gradients else mark
            for row, mark in enumerate(self._marks)
        ]
        ends = [row + 1 for row, mark in enumerate(marks) if mark.kind == "updated"]
        if len(ends) <= WATCHED_STEP:
            marks = []
        called, addresses = self._addresses
        program = Program(
            events=tuple(found.events[: marks[-1].event if marks else 0]),
            sizes=tuple(found.sizes),
            streams=tuple(found.streams),
            parameters=tuple({found.at(called, address) for address in addresses} - {-1}),
            state={row: one for seen, address, one in self._state if (row := found.at(seen, address)) >= 0},
            conf=conf_text(conf_in_force()[1]),
        )
        if marks and not program.parameters:
            raise SetupError(
                "its model has no parameters on the GPU at its first call: move it there before (model.cuda())"
            )
        return StepMarks(
            units=tuple(name for name, _ in self._units),
            parameters=tuple(_parameter(name, unit, one, state.get(one, {})) for name, unit, one in self._parameters),
            program=program,
            marks=tuple(marks),
            steady=ends[-2] if marks else 0,
            block_kind=type(self._units[0][1]).__name__ if len(self._units) > 1 else "",
        )

    def _appeared(self, number: int, blocks: list[Block], model: Any) -> None:
        if number:
            return
        self._model = model
        blocks = units_within(model, blocks)
        self._units = [*((block.name, block.module) for block in blocks), ("", model)]
        names, known = {id(one): name for name, one in model.named_parameters()}, set[int]()
        for unit, (_, module) in enumerate(self._units):
            owned = [one for one in module.parameters() if id(one) not in known]  # last what lies in no block
            known.update(map(id, owned))
            self._parameters += [(names.get(id(one), ""), unit, one) for one in owned]
        self._addresses = _moment(), [_address(one) for _, _, one in self._parameters]
        self.mark("called")
        for row, (_, module) in enumerate(self._units):
            module.register_forward_pre_hook(partial(self._forward, row), with_kwargs=True)
            module.register_forward_hook(partial(self._forwarded, row))
        for row, (_, _, one) in enumerate(self._parameters):
            if one.requires_grad:
                one.register_post_accumulate_grad_hook(lambda one, row=row: self._gradient(row, one))

    def mark(self, kind: MarkKind, place: int = -1) -> None:
        if self.num_steps <= WATCHED_STEP:
            has_gradients = any(one.grad is not None for _, _, one in self._parameters)
            self._marks.append(Mark(kind, place, _moment(), has_gradients))

    def _gradient(self, row: int, parameter: Any) -> None:
        self._gradients[len(self._marks)] = _address(parameter.grad)
        self.mark("gradient", row)

    def _forward(self, row: int, _: Any, args: Any, kwargs: Any) -> Any:
        self.mark("forward", row)
        if not torch.is_grad_enabled() or self._units[row][1] is self._model:
            return args, kwargs  # of the whole, the gradients are there when backward is over
        flat, form = tree_flatten((args, kwargs))
        places = [at for at, one in enumerate(flat) if torch.is_tensor(one) and one.requires_grad]
        if not places:
            return args, kwargs
        for at, one in zip(places, _Inputs.apply(self, row, *(flat[at] for at in places)), strict=True):
            flat[at] = one
        return tree_unflatten(flat, form)

    def _forwarded(self, row: int, _: Any, __: Any, output: Any) -> None:
        self.mark("forwarded", row)
        self._entered.discard(row)
        for one in tree_flatten(output)[0]:
            if torch.is_tensor(one) and one.requires_grad:
                one.register_hook(lambda _: self._backward(row))

    def _backward(self, row: int) -> None:
        if not self._is_ending:
            self._is_ending = True
            Variable._execution_engine.queue_callback(self._finished)
        if row not in self._entered:
            self._entered.add(row)
            self.mark("backward", row)

    def _finished(self) -> None:
        self._is_ending = False
        self._entered.clear()
        self.mark("finished")

    def _update(self, optimizer: Any, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self.mark("update")

    def _updated(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._optimizer:
            self.mark("updated")
            moment = self._marks[-1].event
            for row, (*_named, one) in enumerate(self._parameters):
                for value in _on_device(self._optimizer.state.get(one, {})):
                    self._state.append((moment, _address(value), StateTensor(row, value.shape == one.shape)))
            self.num_steps += 1


def _moment() -> int:
    """How many allocations and frees there were."""
    told = torch.cuda.memory_stats_as_nested_dict().get("allocation", {}).get("all", {})
    return int(told.get("allocated", 0) + told.get("freed", 0))


class _Requests:
    """Allocations of the history so far, in order; a request's row is its place among them. Raises SetupError where the
    program itself began counts or history anew."""

    def __init__(self) -> None:
        traces = torch.cuda.memory._snapshot()["device_traces"] if torch.cuda.is_initialized() else []
        done = [one for one in (traces[torch.cuda.current_device()] if traces else []) if one["action"] in _COUNTED]
        if len(done) != _moment():
            raise SetupError(
                "it records memory history or resets PyTorch's accumulated statistics by itself: leave that out here"
            )
        numbers: dict[int, int] = {0: 0}
        self.sizes: list[int] = []
        self.streams: list[int] = []  #: of each request; the default stream is 0
        self.events: list[int] = []  #: the row of an allocation, -1 - row where its memory was free again
        self._at: dict[int, tuple[list[int], list[int]]] = {}  # address: when it was allocated, and those rows
        live: dict[int, int] = {}
        for moment, one in enumerate(done):
            address = one["addr"]
            if one["action"] == "alloc":
                live[address] = row = len(self.sizes)
                times, rows = self._at.setdefault(address, ([], []))
                times.append(moment)
                rows.append(row)
                self.sizes.append(one["size"])
                self.streams.append(numbers.setdefault(one["stream"], len(numbers)))
                self.events.append(row)
            else:
                self.events.append(-1 - live.pop(address))

    def at(self, moment: int, address: int) -> int:
        """The last request before a moment that was given an address; -1: none."""
        times, rows = self._at.get(address, ([], []))
        found = bisect_right(times, moment - 1)
        return rows[found - 1] if found else -1


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, watch: StepWatch, row: int, *inputs: Any) -> Any:
        ctx.left = lambda: watch.mark("backwarded", row)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.left()
        return (None, None, *gradients)


def _address(one: Any) -> int:
    return int(one.untyped_storage().data_ptr())


def _on_device(state: Any) -> list[Any]:
    return [value for value in state.values() if torch.is_tensor(value) and value.is_cuda]


def _parameter(name: str, unit: int, one: Any, state: Any) -> Parameter:
    tensors = _on_device(state)
    alike = tuple(value.nbytes for value in tensors if value.shape == one.shape)
    return Parameter(
        name=name,
        unit=unit,
        shape=tuple(one.shape),
        item_bytes=one.element_size(),
        is_trained=one.requires_grad,
        state_bytes=alike,
        rest_bytes=sum(value.nbytes for value in tensors) - sum(alike),
    )
