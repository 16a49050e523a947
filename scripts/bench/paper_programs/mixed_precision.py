"""Parameters of 16 bits with gradients and optimizer of 32, as Megatron keeps them: all gradients in one buffer.

With ZeRO a rank has one shard of the masters and moments, the gradients of all ranks are reduced to it, and its
parameters are gathered from all; with offloading masters and moments are the processor's.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class MixedPrecision:
    """The state of the parameters of one rank."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, shard: bool, host: bool):
        device = parameters[0].device
        ranks = dist.get_world_size(group)
        total = sum(one.numel() for one in parameters)
        padded = -(-total // ranks) * ranks
        self.group, self.shard = group, shard
        self.values = torch.empty(padded, dtype=torch.bfloat16, device=device)
        self.gradients = torch.zeros(padded, dtype=torch.float32, device=device)
        at, places = 0, []
        for one in parameters:
            places.append(slice(at, at := at + one.numel()))
            view = self.values[places[-1]].view_as(one)
            view.copy_(one.detach())
            one.data = view
            self._accumulate(one, self.gradients[places[-1]].view_as(one))
        if shard:
            rank, size = dist.get_rank(group), padded // ranks
            places = [slice(rank * size, (rank + 1) * size)]
        self.places = places
        home = torch.device("cpu") if host else device
        self.masters = [nn.Parameter(self.values[place].detach().to(home, torch.float32)) for place in places]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    @staticmethod
    def _accumulate(parameter: nn.Parameter, into: Tensor) -> None:
        def add(of: Tensor) -> None:
            into.add_(of.grad)
            of.grad = None

        parameter.register_post_accumulate_grad_hook(add)

    def step(self) -> None:
        """Reduce, clip, update, hand the new values to the parameters, clear the gradients."""
        if self.shard:
            dist.reduce_scatter_tensor(self.gradients[self.places[0]], self.gradients, group=self.group)
        else:
            dist.all_reduce(self.gradients, group=self.group)
        norm = torch.linalg.vector_norm(self.gradients[self.places[0]] if self.shard else self.gradients)
        self.gradients.mul_(1.0 / (norm + 1e-6).clamp(min=1.0))
        for master, place in zip(self.masters, self.places, strict=True):
            master.grad = self.gradients[place].to(master.device)
        self.optimizer.step()
        for master, place in zip(self.masters, self.places, strict=True):
            master.grad = None
            self.values[place].copy_(master.detach())
        if self.shard:
            dist.all_gather_into_tensor(self.values, self.values[self.places[0]], group=self.group)
        self.gradients.zero_()
