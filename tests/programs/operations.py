"""A small transformer of which stalloc's tests know every part, trained for some steps: operations.py [STEPS]."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, BLOCKS = 64, 128, 3


class Layer(nn.Module):
    """(N, WIDTH) -> (N, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.1))


class Model(nn.Module):
    """(N, WIDTH) -> (N, 1); the last layer is run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.head(checkpoint(self.layers[-1], x, use_reentrant=False))


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 6
torch.manual_seed(0)
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(steps):
    data = torch.rand(TOKENS, WIDTH).cuda()
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
