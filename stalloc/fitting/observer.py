"""Watching a program in a trial: while it runs unchanged, or which events of its record belong to what.

Contract: the program computes the same as without. In the third step of one that runs unchanged observing allocates,
keeps and frees nothing; nor does a note in a recorded run, whose clock is the number of events in the record of the
runtime, or for activations estimated seconds since a step began.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.operator_seconds import operator_seconds
from stalloc.errors import RecomputeError
from stalloc.fitting.foreseen_host import ActivationsRecorded, Kind, LayerRecorded, UpdateRecorded
from stalloc.fitting.observation import MEMORY_STEP, OPERATIONS_STEP, BlockSeen, CallSeen, OperationSeen, ProgramSeen
from stalloc.fitting.run_seen import CallRecorded, RunSeen
from stalloc.sizes import aligned
from stalloc.techniques import repeated_blocks
from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.appearing_optimizers import when_optimizers_are_made
from stalloc.techniques.block_tape import BlockTape, Wanted
from stalloc.techniques.gradient_access import has_gradient
from stalloc.techniques.layer_streaming import streamable
from stalloc.techniques.optimizer_facts import why_not_one_by_one
from stalloc.techniques.program_checkpoints import in_program_checkpoint
from stalloc.techniques.recompute import MakeTape, in_transform
from stalloc.techniques.repeated_blocks import Block, is_compiled, layers_of, why_not
from stalloc.techniques.state_pager import is_large
from stalloc.techniques.tensor_memory import sizes_of, storages_of
from stalloc.trace import Trace

_TRANSFORM = "a transform of torch.func, which lets nobody exchange what is saved for backward"
_OF_OTHERS = (
    "saves for backward only what it is given, its weights and what it returns, so computing it again would free "
    "nothing"
)


class Observer:
    """Observes the program's blocks; to be made before the program begins, and told of every step that has ended."""

    def __init__(self, rates: GpuRates) -> None:
        self._step = 0
        self._blocks: list[BlockSeen] = []
        self._calls: list[CallSeen] = []
        self._seconds: list[float] = []  # of the operations of the step
        self._mode = Timing(rates, self.took)
        self._early = _EarlyReads()
        self._models: list[Model] = []
        self._repeated = RepeatedCalls()
        when_models_appear(lambda number, blocks, model: self._models.append((number, blocks, weakref.ref(model))))

    def step_ended(self) -> None:
        self._step += 1
        if self._step == 1:
            for model, block in self._repeated.blocks(self._models):
                self._blocks.append(BlockSeen(model, block.name, block.kind, why_not(block)))
                self._watch(len(self._blocks) - 1, block)
        if self._step == OPERATIONS_STEP:
            self._mode.__enter__()
        elif self._step == OPERATIONS_STEP + 1:
            self._mode.__exit__(None, None, None)

    def seen(self) -> dict[str, Any]:
        compiled = sys.modules.get("torch._dynamo.utils")
        is_compiled = compiled is not None and compiled.counters["stats"]["unique_graphs"] > 0
        reads_early, seconds = self._early.reason, sum(self._seconds)
        seen = ProgramSeen(self._blocks, self._calls, seconds, self._step, is_compiled, reads_early)
        return seen.as_json()

    def took(self, seconds: float, args: Any, kwargs: Any) -> None:
        self._seconds.append(seconds)
        self._early.look(args, kwargs)

    def _watch(self, row: int, block: Block) -> None:
        forward = block.module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or self._step not in (OPERATIONS_STEP, MEMORY_STEP):
                return forward(*args, **kwargs)
            if torch._C._current_graph_task_id() != -1:
                self._refuse(row, f"{block.name} is recomputed by the program itself")
                return forward(*args, **kwargs)
            if in_transform():
                self._refuse(row, f"{block.name} is called in {_TRANSFORM}")
                return forward(*args, **kwargs)
            look = self._look_at_operations if self._step == OPERATIONS_STEP else self._look_at_memory
            return look(row, block, forward, args, kwargs)

        block.module.forward = watched

    def _refuse(self, row: int, reason: str) -> None:
        if not self._blocks[row].why_not:
            self._blocks[row] = replace(self._blocks[row], why_not=reason)

    def _look_at_operations(self, row: int, block: Block, forward: Any, args: Any, kwargs: Any) -> Any:
        if self._blocks[row].operations:  # a second call in the step
            return forward(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        checkpointed = False

        def wanted(*_: Any) -> bool:
            nonlocal checkpointed
            checkpointed = checkpointed or in_program_checkpoint() or _in_reentrant_checkpoint()
            return True

        tape = BlockTape(block.name, wanted, given)
        del given
        first, num_needed = len(self._seconds), 0
        storages: set[int] = set()

        def needed(tensor: Any) -> Any:
            nonlocal num_needed
            num_needed = tape.num_operations
            if tensor.layout == torch.strided and tensor.untyped_storage().nbytes():
                storages.add(tensor.untyped_storage()._cdata)
            return tensor.detach()

        try:
            with torch.autograd.graph.saved_tensors_hooks(needed, lambda tensor: tensor), tape.recording():
                results = forward(*args, **kwargs)
            tape.finish(results)
            if not tape.own(storages) - storages_of(results):
                self._refuse(row, f"{block.name} {_why_nothing(results, storages, checkpointed=checkpointed)}")
        except RecomputeError as error:
            self._refuse(row, str(error))
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            self._refuse(row, f"{block.name} calls {_TRANSFORM}")
            return forward(*args, **kwargs)
        names, kept, lasting, random = tape.names, tape.kept_bytes, tape.lasting, tape.random
        seconds, saved = self._seconds[first:], tape.positions_of(storages)
        seen = [
            OperationSeen(name, time, kept.get(place, 0), place in lasting, place in random, place in saved)
            for place, (name, time) in enumerate(zip(names, seconds, strict=True))
        ]
        self._blocks[row] = replace(self._blocks[row], operations=seen, num_needed=min(num_needed, len(seen)))
        return results

    def _look_at_memory(self, row: int, block: Block, forward: Any, args: Any, kwargs: Any) -> Any:
        begin = torch.cuda.memory_allocated()
        results = forward(*args, **kwargs)
        end = torch.cuda.memory_allocated()
        given, made = (
            sizes_of([one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.is_cuda])
            for values in ((args, kwargs), results)
        )
        new = sum(size for key, size in made.items() if key not in given)
        self._calls.append(CallSeen(row, max(0, end - begin - new)))
        return results


def _in_reentrant_checkpoint() -> bool:
    """Whether the current operation is in a checkpoint without gradients, torch's older (reentrant) kind."""
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _why_nothing(results: Any, saved: set[int], *, checkpointed: bool) -> str:
    if not any(one.requires_grad for one in tree_leaves(results) if isinstance(one, torch.Tensor)):
        return "has no gradients, so nothing of it is saved for backward"
    if checkpointed:
        return "is checkpointed by the program already"
    return _OF_OTHERS if saved else "saves nothing for backward"


class Timing(TorchDispatchMode):
    """Estimates the time of every operation of a step, backward included, and hands each to `took`."""

    def __init__(self, rates: GpuRates, took: Callable[[float, Any, Any], None]) -> None:
        super().__init__()
        self._rates, self._took = rates, took

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func not in SAC_IGNORED_OPS:
            self._took(operator_seconds(func, args, kwargs or {}, results, self._rates), args, kwargs)
        return results


class _EarlyReads:
    """Why an optimizer's step cannot be made in the backward pass: because of the optimizer, or of earlier reads. A
    program that reads parameters or gradients between the backward pass and the step that changes them would see other
    values. All operations are watched but those of backward passes and of the steps themselves; which parameters an
    optimizer holds is known from its first step on, which gradients from the step after it."""

    def __init__(self) -> None:
        self._read = ""  # why, for what is read
        self._why_not: dict[int, str] = {}  # why, for each optimizer that was made; empty if it could
        self._held: set[int] = set()  # storages of parameters
        self._between: set[int] = set()  # storages that were read since the backward pass
        self._is_stepping = self._is_between = False
        when_optimizers_are_made(self._made)
        register_optimizer_step_pre_hook(self._about_to_step)
        register_optimizer_step_post_hook(self._stepped)

    @property
    def reason(self) -> str:
        """Why the step stays where it is, in words; empty if nothing was seen."""
        could = not self._why_not or not all(self._why_not.values())
        return self._read if could else next(iter(self._why_not.values()))

    def look(self, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._is_between = True
        elif self._is_between and not self._is_stepping and not self._read:
            read = storages_of((args, kwargs))
            self._between |= read
            if self._held & read:
                self._read = "parameters are read between the backward pass and the optimizer's step"

    def _made(self, optimizer: Any) -> None:
        self._why_not[id(optimizer)] = why_not_one_by_one(optimizer)

    def _about_to_step(self, optimizer: Any, *_: Any) -> None:
        self._is_stepping = True
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._held |= storages_of(parameters)
        if self._between & storages_of([one.grad for one in parameters if one.grad is not None]):
            self._read = "a gradient is read or set between the backward pass and the optimizer's step"

    def _stepped(self, *_: Any) -> None:
        self._between.clear()
        self._is_stepping = self._is_between = False


Model = tuple[int, list[Block], "weakref.ref[Any]"]
"""The number of a model, its blocks as the tree of modules has them, and the model."""


class RepeatedCalls:
    """Blocks that only calls of a program show: one that is called again and again, or those the script itself calls.
    To be made before the program begins. Calls are looked at until `blocks` is asked for; nothing is kept alive, and
    nothing of the device is used. What is found in the tree of modules comes first, unless the script calls a model
    piece by piece."""

    def __init__(self) -> None:
        self._open: list[int] = []  # modules that are being called, by id
        self._counts: Counter[int] = Counter()  # calls within one that the script itself has made
        self._repeated: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks = [
            register_module_forward_pre_hook(self._called),
            register_module_forward_hook(self._returned, always_call=True),
        ]

    def blocks(self, models: Sequence[Model]) -> list[tuple[int, Block]]:
        """The blocks of all models, each with the number of its model; watching ends here."""
        for hook in self._hooks:
            hook.remove()
        alive = [(number, blocks, model) for number, blocks, one in models if (model := one()) is not None]
        kinds = [layers_of(one) if type(one) is torch.nn.Sequential else type(one) for *_, one in alive]
        found = []
        for (number, blocks, model), kind in zip(alive, kinds, strict=True):
            if kinds.count(kind) > 1 and _can_be_block(model) and not repeated_blocks.holds_layers(model):
                blocks = [Block(type(model).__name__, model)]
            elif not repeated_blocks.is_replicated(model) and not is_compiled(model):
                blocks = [*blocks, *self._within(model, blocks)]
            found += [(number, block) for block in blocks]
        return found

    def _within(self, model: Any, blocks: Sequence[Block]) -> Iterator[Block]:
        """Modules that one call of a model calls several times, outside of its other blocks."""
        taken = {id(module) for block in blocks for module in block.module.modules()}
        for name, module in model.named_modules():
            parts = {id(one) for one in module.modules()}
            if name and module in self._repeated and _can_be_block(module) and not parts & taken:
                taken |= parts
                yield Block(name, module)

    def _called(self, module: Any, _: Any) -> None:
        if _is_ours():
            if not self._open:
                self._counts.clear()
            elif torch.is_grad_enabled():
                self._counts[id(module)] += 1
                if self._counts[id(module)] > 1:
                    self._repeated.add(module)
            self._open.append(id(module))

    def _returned(self, module: Any, *_: Any) -> None:
        if _is_ours() and id(module) in self._open:
            while self._open.pop() != id(module):
                pass


def _is_ours() -> bool:
    """Whether a call is the program's own, not one of a backward pass or of a compiler."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1


def _can_be_block(module: Any) -> bool:
    """Whether a module, as it is, can be a block."""
    is_wrapper = type(module).__module__.startswith(("torch.nn.parallel", "torch.nn.modules.container"))
    is_wrapper = is_wrapper and type(module) is not torch.nn.Sequential
    is_none = repeated_blocks.is_leaf(module) or is_wrapper or is_compiled(module)
    return not is_none and any(True for _ in module.parameters())


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
