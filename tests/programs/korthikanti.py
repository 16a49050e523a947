"""The layer of Korthikanti et al. 2022 (figure 2) in half precision, attention written out: korthikanti.py STEPS.

Per layer autograd saves s·b·h·(34 + 5·a·s/h) bytes, with sequence s, batch b, width h and a heads.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

SEQUENCE, BATCH, WIDTH, HEADS, LAYERS = 1024, 2, 1024, 16, 4


class Layer(nn.Module):
    """One layer of a transformer: (s, b, h) -> (s, b, h)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(s, b * HEADS, 3 * h // HEADS).transpose(0, 1).chunk(3, -1)
        weights = F.dropout(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), 0.1)
        x = x + F.dropout(self.out(torch.bmm(weights, v).transpose(0, 1).reshape(s, b, h)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


with torch.device("cuda"):
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)]).half()
    inputs = torch.zeros(SEQUENCE, BATCH, WIDTH, dtype=torch.float16, requires_grad=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
