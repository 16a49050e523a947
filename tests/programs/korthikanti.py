"""The layer of Korthikanti et al. 2022 (figure 2) in half precision, attention written out.

`korthikanti.py STEPS` trains four of them; `korthikanti.py formulas` prints what a layer saves, by their formulas and
as measured on a virtual GPU, as it is and with the core of attention recomputed.
"""

import json
import sys
from functools import partial

if "formulas" in sys.argv:
    from stalloc import device

    device.activate("virtual")
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SEQUENCE, BATCH, WIDTH, HEADS, LAYERS = 1024, 2, 1024, 16, 4
SHAPES = ((1024, 4, 2048, 16), (2048, 2, 4096, 32), (SEQUENCE, BATCH, WIDTH, HEADS))


def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of each head: (b·a, s, h/a) three times -> (b·a, s, h/a)."""
    return torch.bmm(F.dropout(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), 0.1), v)


class Layer(nn.Module):
    """One layer of a transformer: (s, b, h) -> (s, b, h)."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, core_again: bool = False) -> None:
        super().__init__()
        self.heads, self.core = heads, partial(checkpoint, core, use_reentrant=False) if core_again else core
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(s, b * self.heads, 3 * h // self.heads).transpose(0, 1).chunk(3, -1)
        x = x + F.dropout(self.out(self.core(q, k, v).transpose(0, 1).reshape(s, b, h)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


def train(num_steps: int) -> None:
    """Forward, backward, update."""
    with torch.device("cuda"):
        model = nn.Sequential(*[Layer() for _ in range(LAYERS)]).half()
        inputs = torch.zeros(SEQUENCE, BATCH, WIDTH, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()


def saved_bytes(layer: nn.Module, inputs: torch.Tensor) -> int:
    """What a call of the layer leaves allocated, its result instead of its input; a first call may make workspaces."""
    layer(inputs)
    before = torch.cuda.memory_allocated()
    kept = layer(inputs)
    return torch.cuda.memory_allocated() - before if kept is not None else 0


def formulas() -> None:
    """A row for each shape, as it is and with the core recomputed: sections 4.1 and 5 of the paper, and measured."""
    rows = []
    for sequence, batch, width, heads in SHAPES:
        for again in (False, True):
            with torch.device("cuda"):
                layer = Layer(width, heads, again).half()
                inputs = torch.zeros(sequence, batch, width, dtype=torch.float16, requires_grad=True)
            core = 0 if again else 5 * heads * sequence * sequence * batch
            formula, measured = 34 * sequence * batch * width + core, saved_bytes(layer, inputs)
            rows.append([sequence, batch, width, heads, again, formula, measured, measured / formula - 1])
    print(json.dumps(rows))


if __name__ == "__main__":
    formulas() if sys.argv[1] == "formulas" else train(int(sys.argv[1]))
