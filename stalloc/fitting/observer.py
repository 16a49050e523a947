"""Looking at a program while it runs in a trial: fills a StepSeen.

Contract: the program computes what it would; in its third step nothing is allocated, kept or freed on account of being
looked at.
"""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.operator_seconds import operator_seconds
from stalloc.errors import RecomputeError
from stalloc.fitting.observation import BlockSeen, CallSeen, Event, OperationSeen, StepSeen, rounded
from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.block_tape import BlockTape
from stalloc.techniques.repeated_blocks import Block, why_not

OPERATIONS_STEP, MEMORY_STEP = 1, 2


class Observer:
    """To be made before the program begins, and told of every step that has ended."""

    def __init__(self, rates: GpuRates) -> None:
        self._rates = rates
        self._step = 0
        self._blocks: list[BlockSeen] = []
        self._calls: list[CallSeen] = []
        self._inputs: list[list[tuple[Any, int]]] = []  # of each call: what it was given, and bytes
        self._events: list[Event] = []
        self._seconds: list[float] = []  # of the operations of the step
        self._mode = _Timing(self)
        when_models_appear(self._appeared)

    def step_ended(self) -> None:
        """The optimizer has made a step."""
        if self._step == MEMORY_STEP:
            self._note_peak()
        self._step += 1
        if self._step == OPERATIONS_STEP:
            self._mode.__enter__()
        elif self._step == OPERATIONS_STEP + 1:
            self._mode.__exit__(None, None, None)
            torch.cuda.reset_peak_memory_stats()

    def seen(self) -> StepSeen:
        """What was seen so far."""
        return StepSeen(self._blocks, self._calls, self._events, sum(self._seconds))

    def took(self, seconds: float) -> None:
        """An operation of the second step was made."""
        self._seconds.append(seconds)

    @property
    def rates(self) -> GpuRates:
        """Those of the GPU that the program is for."""
        return self._rates

    def _appeared(self, model: int, blocks: list[Block]) -> None:
        for block in blocks:
            self._blocks.append(BlockSeen(model, block.name, block.kind, why_not(block)))
            self._watch(len(self._blocks) - 1, block)

    def _watch(self, row: int, block: Block) -> None:
        forward = block.module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or self._step not in (OPERATIONS_STEP, MEMORY_STEP):
                return forward(*args, **kwargs)
            if torch._C._current_graph_task_id() != -1:
                self._refuse(row, f"{block.name} is recomputed by the program itself")
                return forward(*args, **kwargs)
            look = self._look_at_operations if self._step == OPERATIONS_STEP else self._look_at_memory
            return look(row, block, forward, args, kwargs)

        block.module.forward = watched

    def _refuse(self, row: int, reason: str) -> None:
        if not self._blocks[row].why_not:
            self._blocks[row] = BlockSeen(**{**vars(self._blocks[row]), "why_not": reason})

    def _look_at_operations(self, row: int, block: Block, forward: Any, args: Any, kwargs: Any) -> Any:
        if self._blocks[row].operations:  # a second call in the step
            return forward(*args, **kwargs)
        tape = BlockTape(block.name, lambda position, name: True, {torch.device("cuda", torch.cuda.current_device())})
        first, num_needed = len(self._seconds), 0
        storages: set[int] = set()

        def needed(tensor: Any) -> Any:
            nonlocal num_needed
            num_needed = tape.num_operations
            if tensor.layout == torch.strided:
                storages.add(tensor.untyped_storage()._cdata)
            return tensor.detach()

        try:
            with torch.autograd.graph.saved_tensors_hooks(needed, lambda tensor: tensor), tape.recording():
                results = forward(*args, **kwargs)
            tape.finish(results)
        except RecomputeError as error:
            self._refuse(row, str(error))
            return forward(*args, **kwargs)
        names, kept, lasting, random = tape.names, tape.kept_bytes, tape.lasting, tape.random
        seconds, saved = self._seconds[first:], tape.positions_of(storages)
        seen = [
            OperationSeen(name, time, kept.get(place, 0), place in lasting, place in random, place in saved)
            for place, (name, time) in enumerate(zip(names, seconds, strict=True))
        ]
        changed = {"operations": seen, "num_needed": min(num_needed, len(seen))}
        self._blocks[row] = BlockSeen(**{**vars(self._blocks[row]), **changed})
        return results

    def _look_at_memory(self, row: int, block: Block, forward: Any, args: Any, kwargs: Any) -> Any:
        self._note_peak()
        begin = torch.cuda.memory_allocated()
        results = forward(*args, **kwargs)
        end, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        self._note_peak()
        call, given, made = len(self._calls), _storages((args, kwargs)), _storages(results)
        new = sum(size for key, (_, size) in made.items() if key not in given)
        self._calls.append(CallSeen(row, max(0, end - begin - new), 0, max(0, most - end)))
        self._inputs.append([one for key, one in given.items() if key not in made])
        self._events.append(("saved", call, self._calls[call].saved_bytes))
        reached = False

        def backward_comes(_: Any) -> None:
            nonlocal reached
            if not reached:
                reached = True
                self._backward_comes(call)

        for one in tree_leaves(results):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(backward_comes)
        return results

    def _backward_comes(self, call: int) -> None:
        self._note_peak()
        unsaved = sum(size for reference, size in self._inputs[call] if reference.expired())
        self._calls[call] = CallSeen(**{**vars(self._calls[call]), "input_bytes": unsaved})
        self._events.append(("again", call, torch.cuda.memory_allocated()))

    def _note_peak(self) -> None:
        self._events.append(("peak", torch.cuda.max_memory_allocated(), 0))
        torch.cuda.reset_peak_memory_stats()


class _Timing(TorchDispatchMode):
    """Estimates every operation of a step, those that backward makes included."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func not in SAC_IGNORED_OPS:
            self._observer.took(operator_seconds(func, args, kwargs or {}, results, self._observer.rates))
        return results


def _storages(values: Any) -> dict[int, tuple[Any, int]]:
    """The device memory of all tensors, each with a weak reference and the bytes that torch counts."""
    found = {}
    for one in tree_leaves(values):
        if isinstance(one, torch.Tensor) and one.is_cuda and one.layout == torch.strided:
            storage = one.untyped_storage()
            found[storage._cdata] = StorageWeakRef(storage), rounded(storage.nbytes())
    return found
