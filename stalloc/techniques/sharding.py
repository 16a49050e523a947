"""A model and its optimizer, of a program that knows nothing of ranks, divided over the ranks that run it.

Contract: what is divided is computed as before: each rank's gradients become their mean over all ranks. A model is
divided when it is called first, block by block, and its optimizer given the parts; what cannot be divided ends the
program with one sentence, before it has trained. Recomputation that is applied before lies inside.

Rank R of N gets batches R, R + N, R + 2N, … of what a loader would give a single process; what is left at the end of an
epoch, fewer than N batches, is dropped, as ranks must make the same number of steps. Samplers that shuffle draw alike
where the program sets a seed; a seed is set here if it does not. A state dictionary of the model, or of its optimizer,
holds whole tensors in host memory, the same on every rank; every rank must ask for it, as an unmodified program does.
"""

import atexit
import functools
import gc
import inspect
import itertools
import os
import time
import weakref
from collections.abc import Iterator
from os import PathLike
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from stalloc.errors import SetupError
from stalloc.techniques.appearing import when_models_appear, when_optimizers_are_made
from stalloc.techniques.repeated_blocks import Block
from stalloc.techniques.technique_settings import Layout, ShardWay

_LAST_MOMENT_SECONDS = 0.2  # of a busy machine, in which a thread that waits for a core gets one
_making: list[bool] = []  # while an optimizer is being divided


def recompute_whole_blocks() -> None:
    """Recompute every repeated block of the models of this program; to be called before they are sharded."""
    from stalloc.techniques.block_tape import keeps_nothing
    from stalloc.techniques.recompute import wrap

    when_models_appear(lambda _, blocks, __: wrap(blocks, [keeps_nothing] * len(blocks)))


def shard_program(way: ShardWay) -> None:
    """Train the program of this rank with all others: its model, its batches, and what the first of them saves."""
    if way.recomputes_blocks:
        recompute_whole_blocks()
    sharding = Sharding(way.layout)
    _deal_batches(sharding.rank, sharding.num_ranks)
    _save_once(sharding.rank)


class Sharding:
    """Divides the model and optimizers of this process over the ranks; made before the program begins, after torch."""

    def __init__(self, layout: Layout) -> None:
        """The layout must have an executor. This process is a rank, as the variables of torchrun say."""
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.layout = layout
        if (place := int(os.environ.get("LOCAL_RANK", "0"))) < torch.cuda.device_count():
            torch.cuda.set_device(place)
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_done = False
        when_optimizers_are_made(self._made)
        when_models_appear(self._appeared)

    def _made(self, optimizer: Any) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if _making or isinstance(optimizer, ZeroRedundancyOptimizer) or optimizer in self._optimizers:
            return
        if self._is_done:
            raise SetupError("an optimizer was made after the first call of its model: make it before, to be sharded.")
        self._optimizers.add(optimizer)

    def _appeared(self, _: int, blocks: list[Block], model: Any) -> None:
        if not any(one.requires_grad for one in model.parameters()):
            return
        if self._is_done:
            raise SetupError("the program has a second model that is trained: one is sharded, two are not.")
        self._is_done = True
        device = next(model.parameters()).device
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(_leave_job)
        _begin_alike(model)
        if self.layout.executor != "ddp":
            self._shard(model, blocks, device)
            return
        from torch.distributed._composable import replicate

        replicate(model, gradient_as_bucket_view=True, device_id=device)
        replicate.state(model).lazy_init()
        if self.layout.state > 1:
            group = _group(self.layout, self.num_ranks)
            for optimizer in self._optimizers:
                _divide(optimizer, group, [dict(one) for one in optimizer.param_groups])

    def _shard(self, model: Any, blocks: list[Block], device: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        layout, groups = self.layout, self.num_ranks // self.layout.gradients
        shape = (groups, layout.gradients) if groups > 1 else (self.num_ranks,)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard") if groups > 1 else None)
        names = {id(one): name for name, one in model.named_parameters(remove_duplicate=False)}
        former = {name: weakref.ref(one) for name, one in model.named_parameters()}
        for block in units_within(model, blocks):
            fully_shard(block.module, mesh=mesh, reshard_after_forward=layout.reshard_after_forward)
        fully_shard(model, mesh=mesh)
        parts = dict(model.named_parameters(remove_duplicate=False))
        for optimizer in self._optimizers:
            if optimizer.state:
                raise SetupError("the optimizer has state before the first step: a run cannot be resumed in shards.")
            for group in optimizer.param_groups:
                group["params"] = [parts[names[id(one)]] if id(one) in names else one for one in group["params"]]
        del names
        model.register_state_dict_post_hook(lambda _, state, *__: state.update(_whole(dict(state))))
        for optimizer in self._optimizers:
            optimizer.register_state_dict_post_hook(lambda _, state: _whole(state))
        if layout.divides_optimizer:
            group = _group(layout, self.num_ranks)
            for optimizer in self._optimizers:
                _divide_parts(optimizer, group)
        gc.collect()
        if still := [name for name, one in former.items() if one() is not None]:
            raise SetupError(
                f"the program itself holds on to {still[0]}, of its {len(former)} parameters, from before they were "
                "sharded: let it ask model.parameters() anew where it uses them, as in clip_grad_norm_."
            )


def _leave_job() -> None:
    """At exit, while Python is whole: the threads of a process group abort a process that no longer is."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # A model that is still there keeps its group. A thread of gloo may not have let go of what it sent last, for which
    # it needs Python: a moment in which nobody else has it.
    time.sleep(_LAST_MOMENT_SECONDS)


def units_within(model: Any, blocks: list[Block]) -> list[Block]:
    """The blocks that are modules of the model, as FSDP2 needs; rows of layers that it was cut into are not."""
    modules = {id(one) for one in model.modules()}
    return [block for block in blocks if id(block.module) in modules]


@torch.no_grad()
def _begin_alike(model: Any) -> None:
    """Give every rank the parameters and buffers of the first; no frame holds on to one afterwards."""
    for one in (*model.parameters(), *model.buffers()):
        dist.broadcast(one, 0)


def _group(layout: Layout, num_ranks: int) -> Any:
    """The ranks that have one copy of the optimizer's state among them, and the same part of the parameters."""
    if layout.state == num_ranks and layout.stored == 1:
        return dist.group.WORLD
    own, mine = dist.get_rank(), None
    for start in range(0, num_ranks, layout.state):
        for first in range(start, start + layout.stored):
            ranks = list(range(first, start + layout.state, layout.stored))
            group = dist.new_group(ranks)
            mine = group if own in ranks else mine
    return mine


def _divide_parts(optimizer: Any, group: Any) -> None:
    parts = [one for of_group in optimizer.param_groups for one in of_group["params"]]
    local = {id(one): torch.nn.Parameter(_local(one), one.requires_grad) for one in parts}
    groups = [{**one, "params": [local[id(part)] for part in one["params"]]} for one in optimizer.param_groups]
    divided = _divide(optimizer, group, groups)
    step = optimizer.step

    def step_of_parts(_: Any, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for one in parts:
            local[id(one)].grad = None if one.grad is None else _local(one.grad)
        step()
        for one in parts:
            local[id(one)].grad = None
        return loss

    def state_dict(_: Any) -> Any:
        divided.consolidate_state_dict(to=0)
        if dist.get_rank(group) != 0:
            return {}
        told = divided.state_dict()
        for number, state in told["state"].items():
            state.update({name: _whole_of(value, parts[number]) for name, value in state.items()})
        return told

    optimizer.step, optimizer.state_dict = MethodType(step_of_parts, optimizer), MethodType(state_dict, optimizer)


def _local(one: Any) -> Any:
    """The part of this rank; the optimizer may have parameters that are no model's, which are not divided."""
    return one.to_local() if hasattr(one, "to_local") else one.detach()


def _whole_of(value: Any, part: Any) -> Any:
    """What the ranks with the other shards of a parameter have together, in host memory, of state that has its form."""
    from torch.distributed.tensor import DTensor

    if not isinstance(part, DTensor) or not torch.is_tensor(value) or value.shape != part.to_local().shape:
        return value
    value = value.to(part.device)
    made = DTensor.from_local(value, part.device_mesh, part.placements, shape=part.shape, stride=part.stride())
    return made.full_tensor().cpu()


def _divide(optimizer: Any, group: Any, groups: list[dict[str, Any]]) -> Any:
    """Let the same optimizer in parts, with these groups of parameters, make the steps of the program's own."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    _making.append(True)
    try:
        taken = inspect.signature(type(optimizer).__init__).parameters
        given = {name: value for name, value in optimizer.defaults.items() if name in taken}
        divided = ZeroRedundancyOptimizer(groups, type(optimizer), process_group=group, **given)
    finally:
        _making.pop()

    def step(own: Any, closure: Any = None) -> Any:
        for mine, part in zip(own.param_groups, divided.param_groups, strict=True):
            part.update({key: value for key, value in mine.items() if key != "params"})  # a scheduler's learning rate
        return divided.step() if closure is None else divided.step(closure)

    def state_dict(_: Any) -> Any:
        divided.consolidate_state_dict(to=0)
        return divided.state_dict() if dist.get_rank() == 0 else {}

    optimizer.step, optimizer.state_dict = MethodType(step, optimizer), MethodType(state_dict, optimizer)
    return divided


def _whole(state: Any) -> Any:
    """The state of a model in shards, or of its optimizer, with whole tensors."""
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(DTensor, lambda one: one.detach().full_tensor().cpu(), state)


def _save_once(rank: int) -> None:
    """Let `torch.save` write to a path on the first rank only; it still writes to open files on every rank."""
    save = torch.save

    @functools.wraps(save)
    def save_on_first(obj: Any, f: Any, *args: Any, **named: Any) -> None:
        if rank == 0 or not isinstance(f, str | PathLike):
            save(obj, f, *args, **named)

    torch.save = save_on_first


def _deal_batches(rank: int, num_ranks: int) -> None:
    """Deal out the batches of every loader, unless its sampler does."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    whole, length = DataLoader.__iter__, DataLoader.__len__

    @functools.wraps(whole)
    def dealt(self: Any) -> Iterator[Any]:
        batches = whole(self)
        if isinstance(self.sampler, DistributedSampler):
            yield from batches
            return
        while len(turn := list(itertools.islice(batches, num_ranks))) == num_ranks:
            yield turn[rank]

    @functools.wraps(length)
    def dealt_length(self: Any) -> int:
        return int(length(self) // (1 if isinstance(self.sampler, DistributedSampler) else num_ranks))

    DataLoader.__iter__, DataLoader.__len__ = dealt, dealt_length
