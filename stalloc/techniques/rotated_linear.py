"""A linear layer whose weight lies in as many parts as there are ranks, and goes round: it is never whole anywhere.

Contract: the output and all gradients are those of `torch.nn.Linear` on this rank's input, the gradient of the weight
being the mean over ranks, to the rounding of sums. Of the weight a rank holds two parts at the most, the one it
computes with and the one that comes next, in forward and in backward, where the parts' gradients go round with them;
between passes it holds its own. Nothing else may use the weight during one. Source: RTP (Luo et al. 2023, "Rethinking
Tensor Parallelism with Memory Deduplication").
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class RotatedLinear(nn.Module):
    """In the place of a linear layer, on every rank of a group. Rows of the weight are divided evenly. The input has
    shape (..., in_features), the output (..., out_features)."""

    def __init__(self, linear: nn.Linear, group: Any = None) -> None:
        """Takes this rank's part of a layer that all ranks have alike. Raises ValueError where the number of its
        outputs is no multiple of the number of ranks."""
        super().__init__()
        self.group = group  # None: the default one, which must not be held: it is to end when a program destroys it
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if linear.out_features % size:
            raise ValueError(f"{linear.out_features} outputs cannot be divided evenly over {size} ranks.")
        rows = linear.out_features // size
        own = slice(rank * rows, (rank + 1) * rows)
        self.weight = nn.Parameter(linear.weight.detach()[own].clone())  # (out_features / size, in_features)
        self.bias = nn.Parameter(linear.bias.detach().clone()) if linear.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """The output of the whole layer for this rank's input."""
        out: Tensor = _Rotated.apply(x, self.weight, self.group)
        return out if self.bias is None else out + _Mean.apply(self.bias, self.group)


class _Rotated(torch.autograd.Function):
    """x @ weight.T, part by part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        size, rows = dist.get_world_size(group), weight.shape[0]
        out = x.new_empty((*x.shape[:-1], size * rows))
        for part, held in _going_round(weight, group):
            out[..., part * rows : (part + 1) * rows] = x @ held.T
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        size, rows = dist.get_world_size(ctx.group), weight.shape[0]
        to_input = torch.zeros_like(x)
        to_weight, taken = torch.zeros_like(weight), torch.empty_like(weight)
        for part, held in _going_round(weight, ctx.group):
            of_part = gradient[..., part * rows : (part + 1) * rows]
            to_input += of_part @ held
            to_weight.addmm_(of_part.reshape(-1, rows).T, x.reshape(-1, x.shape[-1]))
            if size > 1:
                _pass_on(to_weight, taken, ctx.group)  # ends where the part is at home
                to_weight, taken = taken, to_weight
        return to_input, to_weight.div_(size), None


class _Mean(torch.autograd.Function):
    """The identity of a tensor that all ranks have; its gradient is the mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mean = gradients[0] / dist.get_world_size(ctx.group)
        dist.all_reduce(mean, group=ctx.group)
        return mean, None


def _going_round(weight: Tensor, group: Any) -> Iterator[tuple[int, Tensor]]:
    """Each rank's number and its part, once each, this rank's own first; at the end that is in `weight` again."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = held = weight.data  # autograd is to see no change, as there is none in the end
    next_held = torch.empty_like(own)
    for step in range(size):
        yield (rank - step) % size, held
        if size > 1:
            _pass_on(held, next_held, group)
            held, next_held = next_held, held
    if held is not own:
        own.copy_(held)


def _pass_on(tensor: Tensor, taken: Tensor, group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size)
    received = dist.P2POp(dist.irecv, taken, group=group, group_peer=(rank - 1) % size)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
