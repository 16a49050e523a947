"""The experts of one rank of a mixture whose routing is by data: how many tokens reach each differs every time.

What a router decides on a virtual GPU is always the same, since nothing is computed there. So the numbers are drawn,
from a seed of the layer and the microbatch: a layer that is computed again for backward sees the tokens that it saw.
"""

import torch
from decoders import FeedForward
from shapes import Shape
from torch import Tensor, nn


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
