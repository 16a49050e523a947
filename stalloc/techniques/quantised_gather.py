"""Parameters gathered as int8 with a scale for each block of values: half of the bytes of 16-bit parameters.

Contract: an all-gather gives each value to within half a step of its block, the largest magnitude of the block over
127; what is sent is counted. It computes in PyTorch's own operations, so it shows bytes and rounding, not the speed of
fused kernels. Source: ZeRO++ (Wang et al. 2023, section 3.1, qwZ: blocks have scales of their own).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BLOCK_ITEMS = 2048  # values that share a scale


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values quantised to int8 (N,), and their scales in float32 (ceil(N / 2048),)."""
    flat = values.detach().reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK_ITEMS)).view(-1, _BLOCK_ITEMS)
    scales = (blocks.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (blocks / scales[:, None]).round().to(torch.int8).view(-1)[: flat.numel()], scales


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values (N,) that int8 and scales stand for, with the rounding that they have lost."""
    blocks = torch.nn.functional.pad(codes, (0, -codes.numel() % _BLOCK_ITEMS)).view(-1, _BLOCK_ITEMS)
    return (blocks.float() * scales[:, None]).view(-1)[: codes.numel()].to(dtype)


def gather_quantised(part: Tensor, group: Any = None) -> Tensor:
    """The parts of all ranks (ranks, *part.shape), gathered as int8; parts have the same shape everywhere."""
    size = dist.get_world_size(group)
    codes, scales = quantise(part)
    all_codes, all_scales = codes.new_empty(size * codes.numel()), scales.new_empty(size * scales.numel())
    dist.all_gather_into_tensor(all_codes, codes, group=group)
    dist.all_gather_into_tensor(all_scales, scales, group=group)
    pairs = zip(all_codes.chunk(size), all_scales.chunk(size), strict=True)
    return torch.stack([restored(one, own, part.dtype).view_as(part) for one, own in pairs])
