"""Train a small model on the processor, knowing nothing of ranks: BATCH NAME [bfloat16]."""

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 33), *[Block(33) for _ in range(3)], nn.Linear(33, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))
data = TensorDataset(torch.randn(16 * STEPS, 10), torch.randn(16 * STEPS, 1))
losses = []
for x, y in DataLoader(data, int(sys.argv[1])):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in sys.argv):
        loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{sys.argv[2]}.pt")
with open(f"{sys.argv[2]}.{os.environ.get('RANK', 'alone')}.json", "w") as file:
    json.dump(losses, file)
