"""Decoder layers of GPT-2 and of Llama, and the part of a model that one stage of a pipeline holds."""

from collections.abc import Sequence

from shapes import Shape
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


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
