"""FSDP2 on a fake process group of 8, rank 0, 30 steps: python fsdp2.py [STEPS [LENGTHS]], LENGTHS like 512,384,256.

With several lengths of sequences each step has one of them, in random order.
"""

import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformer_block import Block

RANKS, DIM, LAYERS = 8, 1024, 16
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
lengths = [int(length) for length in sys.argv[2].split(",")] if len(sys.argv) > 2 else [512]
chosen = random.Random(0).choices(lengths, k=steps)
torch.manual_seed(0)
dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
mesh = init_device_mesh("cuda", (RANKS,))
with torch.device("cuda"):
    model = nn.Sequential(*(Block(DIM) for _ in range(LAYERS)))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step, length in enumerate(chosen):
    x = torch.randn(8, length, DIM).cuda()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
dist.destroy_process_group()
