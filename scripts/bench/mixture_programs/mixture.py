"""A mixture of experts that trains, routed by data: python mixture.py NAME STEPS.

Tokens are drawn on the processor anew in each layer, microbatch and step, as a virtual GPU computes nothing that could
be read. Experts run one by one, those without tokens not at all.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS, HEAD, LENGTH = 32_000, 128, 1_024


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    width: int
    hidden: int
    experts: int
    taken: int  #: experts that a token goes to
    tokens: int  #: of a microbatch
    skew: float  #: of how well experts are liked, 0: alike
    microbatches: int = 1
    shared: bool = False  #: an expert takes all tokens, too
    recomputes: bool = False  #: of a layer only its input is kept
    capacity: float = 0.0  #: what an expert takes at most, times its share of the tokens; 0: all


SHAPES = {
    "few": Shape(layers=8, width=2048, hidden=5632, experts=8, taken=2, tokens=8192, skew=0.3),
    "shared": Shape(layers=6, width=1024, hidden=1408, experts=16, taken=4, tokens=16384, skew=0.8, shared=True),
    "one": Shape(layers=6, width=3072, hidden=8192, experts=4, taken=1, tokens=8192, skew=1.0),
    "narrow": Shape(layers=12, width=1024, hidden=2816, experts=8, taken=2, tokens=4096, skew=0.2),
    "capacity": Shape(layers=6, width=1280, hidden=3584, experts=8, taken=2, tokens=12288, skew=0.4, capacity=1.25),
    "accumulated": Shape(layers=8, width=2048, hidden=2816, experts=16, taken=2, tokens=4096, skew=0.5, microbatches=2),
    "recomputed": Shape(layers=4, width=4096, hidden=14336, experts=8, taken=2, tokens=4096, skew=0.7, recomputes=True),
    "many": Shape(
        layers=4, width=2048, hidden=1408, experts=32, taken=6, tokens=8192, skew=1.0, shared=True, recomputes=True
    ),
    "skewed": Shape(layers=8, width=1536, hidden=2048, experts=16, taken=2, tokens=8192, skew=1.5, recomputes=True),
    "empty": Shape(layers=6, width=2048, hidden=1408, experts=32, taken=4, tokens=2048, skew=1.8),
    "idle": Shape(layers=6, width=1024, hidden=2816, experts=32, taken=2, tokens=1024, skew=2.0),
    "little": Shape(layers=4, width=512, hidden=2048, experts=4, taken=2, tokens=4096, skew=0.6, recomputes=True),
    "least": Shape(layers=4, width=256, hidden=512, experts=8, taken=2, tokens=1024, skew=0.5, microbatches=2),
}


class Expert(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, draw: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))
        self.project = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(Expert(shape) for _ in range(shape.experts))
        self.shared = Expert(shape) if shape.shared else None
        self.liked = shape.skew * torch.randn(shape.experts, generator=draw, device="cpu", dtype=torch.float32)

    def forward(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        parts = self.project(self.norms[0](x)).view(-1, LENGTH, 3, self.shape.width // HEAD, HEAD)
        attended = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(-1, self.shape.width))
        return x + self.mixed(self.norms[1](x), seed)

    def mixed(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        """What the experts make of all tokens; equal seeds route them alike."""
        shape, draw = self.shape, torch.Generator().manual_seed(seed)
        weights = torch.softmax(self.router(x).float(), -1)
        scores = torch.randn(len(x), shape.experts, generator=draw, device="cpu", dtype=torch.float32)
        chosen = torch.topk(scores + self.liked, shape.taken, -1).indices
        most = int(shape.capacity * len(x) * shape.taken / shape.experts) or len(x)
        result = self.shared(x) if self.shared is not None else torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = torch.nonzero(chosen == number)[:most, 0].cuda()
            if len(tokens):
                result.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, number, None].to(x.dtype))
        return result


def main() -> None:
    shape, steps = SHAPES[sys.argv[1]], int(sys.argv[2])
    torch.set_default_dtype(torch.bfloat16)
    draw = torch.Generator().manual_seed(11)
    with torch.device("cuda"):
        embed, head = nn.Embedding(WORDS, shape.width), nn.Linear(shape.width, WORDS, bias=False)
        layers = nn.ModuleList(Layer(shape, draw) for _ in range(shape.layers))
    model = nn.ModuleList([embed, layers, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for number in range(steps * shape.microbatches):
        tokens = torch.zeros(shape.tokens, dtype=torch.long).cuda()
        x = embed(tokens)
        for place, layer in enumerate(layers):
            call: Any = partial(checkpoint, layer, use_reentrant=False) if shape.recomputes else layer
            x = call(x, number * shape.layers + place)
        loss = functional.cross_entropy(head(x).float(), tokens)
        del x
        loss.backward()
        del loss
        if (number + 1) % shape.microbatches == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
