"""Small networks with branches, of which another order of operations may need less memory: branches.py NAME [BATCH].

NAME is unet or inception, with -infer for a forward pass alone; by-branch-infer is inception with the order of a person
who saves memory. Tensors are (N, channels, height, width).
"""

import itertools
import sys

import torch
from torch import nn
from torch.nn import functional

SIDE, STEPS = 64, 4


def convolution(inputs: int, outputs: int, width: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, width, padding=width // 2)


class Double(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = convolution(inputs, outputs), convolution(outputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))))


class UNet(nn.Module):
    """Down and up again, with a connection at each level that is kept until the way up comes by."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        self.down = nn.ModuleList(Double(one, other) for one, other in itertools.pairwise((3, *widths)))
        self.up = nn.ModuleList(Double(one + other, other) for one, other in itertools.pairwise(widths[::-1]))
        self.head = convolution(widths[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down[:-1]:
            kept.append(down(x))
            x = functional.max_pool2d(kept[-1], 2)
        x = self.down[-1](x)
        for up in self.up:
            x = up(torch.cat([functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x)


class Block(nn.Module):
    """Four branches, wide within and narrow at their ends, all of which are begun before one is finished."""

    def __init__(self, by_branch: bool) -> None:
        super().__init__()
        self.by_branch = by_branch
        self.widen = nn.ModuleList(convolution(32, 128, 1) for _ in range(4))
        self.narrow = nn.ModuleList(convolution(128, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.widen, self.narrow, strict=True)
        if self.by_branch:
            ends = [functional.relu(end(functional.relu(begin(x)))) for begin, end in pairs]
        else:
            wide = [functional.relu(begin(x)) for begin in self.widen]
            ends = [functional.relu(end(one)) for end, one in zip(self.narrow, wide, strict=True)]
        return x + torch.cat(ends, 1)


class Inception(nn.Module):
    def __init__(self, by_branch: bool = False) -> None:
        super().__init__()
        self.stem, self.head = convolution(3, 32), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(Block(by_branch) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


name = sys.argv[1]
batch = int(sys.argv[2]) if len(sys.argv) > 2 else 8
torch.manual_seed(0)
model = (UNet() if name.startswith("unet") else Inception(name.startswith("by-branch"))).cuda()
if name.endswith("-infer"):
    with torch.no_grad():
        for _ in range(STEPS):
            print(float(model(torch.rand(batch, 3, SIDE, SIDE).cuda()).mean()))
else:
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(STEPS):
        model(torch.rand(batch, 3, SIDE, SIDE).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
