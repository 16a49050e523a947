"""Observing a program in a trial, while it runs unchanged.

Contract: the program computes the same as without; in its third step observing allocates, keeps and frees nothing.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.operator_seconds import operator_seconds
from stalloc.errors import RecomputeError
from stalloc.fitting.early_reads import EarlyReads
from stalloc.fitting.observation import MEMORY_STEP, OPERATIONS_STEP, BlockSeen, CallSeen, OperationSeen, ProgramSeen
from stalloc.fitting.repeated_calls import Model, RepeatedCalls
from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.block_tape import BlockTape
from stalloc.techniques.recompute import in_program_checkpoint, in_transform
from stalloc.techniques.repeated_blocks import Block, why_not
from stalloc.techniques.tensor_memory import sizes_of, storages_of

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
        self._early = EarlyReads()
        self._models: list[Model] = []
        self._repeated = RepeatedCalls()
        when_models_appear(self._appeared)

    def step_ended(self) -> None:
        """The optimizer has made a step."""
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
        """What was seen so far: a ProgramSeen as JSON."""
        compiled = sys.modules.get("torch._dynamo.utils")
        is_compiled = compiled is not None and compiled.counters["stats"]["unique_graphs"] > 0
        reads_early, seconds = self._early.reason, sum(self._seconds)
        seen = ProgramSeen(self._blocks, self._calls, seconds, self._step, is_compiled, reads_early)
        return seen.as_json()

    def took(self, seconds: float, args: Any, kwargs: Any) -> None:
        """An operation of the second step was made."""
        self._seconds.append(seconds)
        self._early.look(args, kwargs)

    def _appeared(self, number: int, blocks: list[Block], model: Any) -> None:
        self._models.append((number, blocks, weakref.ref(model)))

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
            self._blocks[row] = BlockSeen(**{**vars(self._blocks[row]), "why_not": reason})

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
            if not (storages & tape.own) - storages_of(results):
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
        changed = {"operations": seen, "num_needed": min(num_needed, len(seen))}
        self._blocks[row] = BlockSeen(**{**vars(self._blocks[row]), **changed})
        return results

    def _look_at_memory(self, row: int, block: Block, forward: Any, args: Any, kwargs: Any) -> Any:
        begin = torch.cuda.memory_allocated()
        results = forward(*args, **kwargs)
        end = torch.cuda.memory_allocated()
        given, made = _memory((args, kwargs)), _memory(results)
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
    """Why a block saves nothing that could be recomputed."""
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


def _memory(values: Any) -> dict[int, int]:
    """The bytes of all device memory that tensors hold, by storage."""
    return sizes_of([one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.is_cuda])
