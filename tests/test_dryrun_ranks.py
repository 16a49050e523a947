"""Programs of several ranks on the virtual GPU: each rank by itself in a dry run, and all of them under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_programs import run_stalloc, run_warm

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

TRAINING = """
import contextlib, functools, os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

kind, local = sys.argv[1], int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
if kind == "gloo":
    dist.init_process_group("gloo")
elif kind == "bound":
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
else:
    dist.init_process_group()
assert kind != "bound" or dist.get_backend() == "cpu:gloo,cuda:nccl"
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(3))).cuda()
if kind == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=1000), device_id=local,
        sync_module_states=True, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
elif kind == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    for block in model:
        fully_shard(block)
    fully_shard(model)
elif kind == "unused":
    model = DDP(model, device_ids=[local], find_unused_parameters=True)
elif kind == "static":
    model = DDP(model, device_ids=[local], static_graph=True, gradient_as_bucket_view=True)
else:
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model) if kind == "norms" else model, device_ids=[local])
if kind == "half":
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
elif kind == "power":
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
if kind == "divided":
    from torch.distributed.optim import ZeroRedundancyOptimizer
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
else:
    optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(64 * dist.get_world_size(), 64))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (batch,) in enumerate(DataLoader(data, 16, sampler=sampler)):
        with model.no_sync() if kind == "accumulated" and number % 2 == 0 else contextlib.nullcontext():
            model(batch.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
if kind == "divided":
    optimizer.consolidate_state_dict(0)
dist.barrier()
dist.destroy_process_group()
print("trained", flush=True)
"""

COLLECTIVES = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
rank, num = dist.get_rank(), dist.get_world_size()
there = sys.argv[1] == "there"
others = list(range(num)) if there else [rank] * num


def numbers():
    return [torch.empty(4, device="cuda") for _ in range(num)]


count = torch.tensor([3], device="cuda")
dist.all_reduce(count)
assert count.item() == 3 * num
work = dist.all_reduce(torch.ones(4, device="cuda"), async_op=True)
work.wait()
assert work.get_future().value()[0].shape == (4,)
sizes = [torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(num)]
dist.all_gather(sizes, torch.tensor([7], device="cuda"))
assert [size.item() for size in sizes] == [7] * num
whole, part = torch.empty(4 * num, device="cuda"), torch.empty(4, device="cuda")
dist.all_gather_into_tensor(whole, part)
dist.reduce_scatter_tensor(part, whole)
dist.all_to_all_single(torch.empty_like(whole), whole)
dist.all_to_all(numbers(), numbers())
dist.broadcast(whole, 0)
dist.reduce(whole, 0)
dist.gather(part, numbers() if rank == 0 else None, 0)
dist.scatter(part, numbers() if rank == 0 else None, 0)
moves = [dist.P2POp(dist.isend, part, (rank + 1) % num), dist.P2POp(dist.irecv, whole[:4], (rank - 1) % num)]
for work in dist.batch_isend_irecv(moves):
    work.wait()
host = dist.new_group(list(range(num)), backend="gloo")
assert dist.get_backend(host) == "gloo"
dist.monitored_barrier(host)
dist.barrier(dist.new_group(list(range(num))))
mesh = init_device_mesh("cuda", (num // 2, 2), mesh_dim_names=("data", "tensor"))
assert mesh["tensor"].size() == 2
for group in (None, host):
    found = [None] * num
    dist.all_gather_object(found, {"rank": rank, "much": b"x" * 300_000}, group=group)
    assert [one["rank"] for one in found] == others
    assert len(found[0]["much"]) == 300_000
    found = [None] * num if rank == 0 else None
    dist.gather_object(rank, found, dst=0, group=group)
    assert rank != 0 or found == others
    found = [{"seed": rank}]
    dist.broadcast_object_list(found, src=0, group=group)
    assert found[0]["seed"] == (0 if there else rank)
    found = [None]
    dist.scatter_object_list(found, [f"part {number}" for number in range(num)], src=0, group=group)
    assert found == [f"part {rank}"]
dist.destroy_process_group()
print("collected", flush=True)
"""

AS_A_RANK = """
import dataclasses, os, sys
from stalloc import device
from stalloc.sizing.fake_ranks import Rank, be_rank
rank = Rank(number=int(sys.argv[2]), num_ranks=int(sys.argv[3]))
os.environ.update(rank.variables())
device.activate("virtual", dataclasses.replace(device.find_gpu("H100"), num_devices=rank.num_local))
import torch
be_rank()
"""

TRAINED = ("plain", "fsdp1", "fsdp2")
VARIANTS = ("gloo", "bound", "unused", "static", "norms", "half", "power", "divided", "accumulated")


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_program_that_trains_is_dry_run_on_each_rank(kind: str, num_ranks: int, tmp_path: Path) -> None:
    program, out = tmp_path / "train.py", tmp_path / "ranks.json"
    program.write_text(TRAINING)
    ranks = f"0,{num_ranks - 1}"
    done = run_stalloc("dryrun", "--ranks", num_ranks, "--rank", ranks, "--json", out, "--", program, kind)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["ranks"]
    assert all(one[name]["fits"] for one in found for name in ("native", "expandable", "stalloc"))
    assert all(one["needed_bytes"] > 0 for one in found)


@pytest.mark.parametrize("kind", VARIANTS)
def test_ways_of_training_start_without_the_other_ranks(kind: str) -> None:
    done = run_warm(AS_A_RANK + TRAINING, kind, 0, 2)
    assert done.stdout == "trained\n", done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_give_what_ranks_that_are_alike_would(rank: int) -> None:
    done = run_warm(AS_A_RANK + COLLECTIVES, "alone", rank, 4)
    assert done.stdout == "collected\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("program", "word"), [(TRAINING, kind) for kind in TRAINED] + [(COLLECTIVES, "there")])
def test_torchrun_starts_programs_on_virtual_gpus(program: str, word: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(program)
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    served = {"STALLOC": "1", "STALLOC_DEVICE": "virtual:2xH100", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), word], capture_output=True, text=True, env=os.environ | served, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("collected" if word == "there" else "trained") == 2  # lines of two ranks may run together
