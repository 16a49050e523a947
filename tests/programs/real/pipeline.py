"""A pipeline schedule on a fake process group of 4, 30 steps: pipeline.py 1F1B|Interleaved1F1B [STEPS] [RANK]."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformer_block import Block

RANKS, DIM, LENGTH, MICROBATCHES = 4, 1024, 512, 8
name = sys.argv[1]
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
rank = int(sys.argv[3]) if len(sys.argv) > 3 else 0
torch.manual_seed(0)
dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
device = torch.device("cuda:0")
per_rank = 2 if name == "Interleaved1F1B" else 1
indices = [rank + i * RANKS for i in range(per_rank)]
example = torch.empty(2, LENGTH, DIM, device=device, requires_grad=True)
stages, parameters = [], []
for index in indices:
    with device:
        part = nn.Sequential(Block(DIM), Block(DIM))
    parameters += part.parameters()
    stages.append(PipelineStage(part, index, RANKS * per_rank, device, input_args=(example,), output_args=(example,)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared difference."""
    return (output - target).square().mean()


if name == "Interleaved1F1B":
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=MICROBATCHES, loss_fn=loss_of)
else:
    schedule = Schedule1F1B(stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of)
optimizer = torch.optim.AdamW(parameters, lr=1e-4)
first, last = 0 in indices, RANKS * per_rank - 1 in indices
for _ in range(steps):
    x = torch.randn(2 * MICROBATCHES, LENGTH, DIM).cuda()
    arguments = (x,) if first else ()
    schedule.step(*arguments, target=x) if last else schedule.step(*arguments)
    optimizer.step()
    optimizer.zero_grad()
print(f"{name}: {steps} steps")
dist.destroy_process_group()
