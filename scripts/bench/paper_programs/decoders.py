"""The models that are trained, by their published shapes, and the part of one that a stage of a pipeline holds.

Experts are those of one rank of a mixture whose routing is by data: how many tokens reach each differs every time. What
a router decides on a virtual GPU is always the same, since nothing is computed there. So the numbers are drawn, from a
seed of the layer and the microbatch: a layer that is computed again for backward sees the tokens that it saw.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder; sequences and microbatches are what one step of a rank works on."""

    layers: int
    width: int
    heads: int
    hidden: int  #: of a feed-forward network, or of one expert
    vocabulary: int
    length: int  #: tokens of a sequence
    sequences: int  #: of a microbatch
    is_gpt: bool = False  #: layer norms, biases, GELU and dropout, where the others have RMS norms and SwiGLU
    experts: int = 0  #: 0: the model is dense
    expert_ranks: int = 1  #: that the experts of a layer are spread over; each gets the tokens of all of them
    chosen: int = 0  #: experts that each token goes to
    shared: int = 0  #: hidden width of the expert that every token goes to


SHAPES = {
    "gpt2": Shape(  # GPT-2 medium, 345M
        layers=24, width=1024, heads=16, hidden=4096, vocabulary=50304, length=1024, sequences=4, is_gpt=True
    ),
    "llama": Shape(layers=32, width=4096, heads=32, hidden=11008, vocabulary=32000, length=2048, sequences=1),
    # Qwen1.5-MoE-A2.7B with two thirds of its layers and four experts more
    "qwen": replace(
        Shape(layers=16, width=2048, heads=16, hidden=1408, vocabulary=151936, length=1024, sequences=2),
        experts=64,
        expert_ranks=8,
        chosen=4,
        shared=5632,
    ),
    # Mixtral 8x7B with half of its layers
    "mixtral": replace(
        Shape(layers=16, width=4096, heads=32, hidden=14336, vocabulary=32000, length=2048, sequences=1),
        experts=8,
        expert_ranks=4,
        chosen=2,
    ),
}
"""Llama is Llama-2 7B with sequences of 2,048 tokens."""


class FeedForward(nn.Module):
    """(tokens, width) to the same: GELU, or SwiGLU with both halves in one product, as Megatron has it."""

    def __init__(self, shape: Shape, hidden: int) -> None:
        super().__init__()
        self.is_gpt = shape.is_gpt
        self.up = nn.Linear(shape.width, hidden if shape.is_gpt else 2 * hidden, bias=shape.is_gpt)
        self.down = nn.Linear(hidden, shape.width, bias=shape.is_gpt)

    def forward(self, x: Tensor, microbatch: int = 0) -> Tensor:
        if self.is_gpt:
            return functional.dropout(self.down(functional.gelu(self.up(x))), 0.1)
        gate, value = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * value)


class Attention(nn.Module):
    """(sequences, length, width) to the same, causal."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.is_gpt = shape.heads, shape.is_gpt
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.is_gpt)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.is_gpt)

    def forward(self, x: Tensor) -> Tensor:
        sequences, length, width = x.shape
        parts = self.qkv(x).view(sequences, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = self.out(seen.transpose(1, 2).reshape(x.shape))
        return functional.dropout(y, 0.1) if self.is_gpt else y


class Layer(nn.Module):
    """Attention and a feed-forward network or experts, each after a norm and added to what came in."""

    def __init__(self, shape: Shape, mixer: nn.Module) -> None:
        super().__init__()
        norm = nn.LayerNorm if shape.is_gpt else nn.RMSNorm
        self.first, self.second = norm(shape.width), norm(shape.width)
        self.attention, self.mixer = Attention(shape), mixer

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mixer(self.second(x), microbatch)


class Stage(nn.Module):
    """Layers in a row; the first stage embeds tokens, the last returns (sequences, length, vocabulary) logits."""

    def __init__(
        self, shape: Shape, layers: Sequence[nn.Module], *, is_first: bool, is_last: bool, recompute: bool
    ) -> None:
        super().__init__()
        self.layers, self.recompute = nn.ModuleList(layers), recompute
        norm = nn.LayerNorm if shape.is_gpt else nn.RMSNorm
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if is_first else None
        self.norm = norm(shape.width) if is_last else None
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if is_last else None
        self.num_microbatches = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_microbatches += 1
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            arguments = x, self.num_microbatches
            x = checkpoint(layer, *arguments, use_reentrant=False) if self.recompute else layer(*arguments)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy in 32 bits, as Megatron computes it."""
    return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


class RoutedExperts(nn.Module):
    """(sequences, length, width) to the same. Without skew experts get as many tokens as others, in the mean."""

    def __init__(self, shape: Shape, number: int, skew: float) -> None:
        super().__init__()
        self.shape, self.number, self.skew = shape, number, skew
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        local = shape.experts // shape.expert_ranks
        self.experts = nn.ModuleList(FeedForward(shape, shape.hidden) for _ in range(local))
        self.shared = FeedForward(shape, shape.shared) if shape.shared else None

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        """Tokens are sent to experts one after the other; an expert that gets none does nothing."""
        flat = x.flatten(0, 1)
        weights, _ = self.router(flat).softmax(-1).topk(self.shape.chosen, -1)
        counts, rows = self._routed(len(flat), microbatch)
        rows = rows.to(x.device)
        parts = flat.index_select(0, rows).split(counts)
        results = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        y = torch.zeros_like(flat)
        if results:
            weight = weights.flatten().index_select(0, rows).unsqueeze(-1)
            y = y.index_add(0, rows, torch.cat(results) * weight)
        return (y if self.shared is None else y + self.shared(flat)).view_as(x)

    def _routed(self, num_tokens: int, microbatch: int) -> tuple[list[int], Tensor]:
        """How many tokens each expert of this rank gets, and the (m,) rows of them all."""
        drawn = torch.Generator().manual_seed((self.number << 32) + microbatch)
        share = torch.softmax(self.skew * torch.randn(self.shape.experts, generator=drawn, dtype=torch.float64), 0)
        expected = self.shape.expert_ranks * num_tokens * self.shape.chosen * share[: len(self.experts)]
        counts = [int(count) for count in torch.poisson(expected, generator=drawn)]
        return counts, torch.randint(num_tokens, (sum(counts),), generator=drawn)
