"""A pre-norm transformer block: (N, T, dim) -> (N, T, dim)."""

import torch
from torch import nn
from torch.nn import functional as F

HEADS = 8


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, dim // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, dim)
        x = x + self.out(mixed)
        return x + self.feed(self.norm2(x))
