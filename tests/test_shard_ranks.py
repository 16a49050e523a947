"""Programs that train in shards: four processes with gloo give what one process gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_programs import run_warm

pytestmark = [pytest.mark.usefixtures("cuda_torch", "cupy_installed"), pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "sharded_training.py"
RANKS, BATCH = 4, 16
SERVED = {"STALLOC": "1", "STALLOC_DEVICE": "virtual:1xH100", "OMP_NUM_THREADS": "1"}

COMPARE = """
import sys, torch
one, many = (torch.load(name) for name in sys.argv[1:3])
assert one["model"].keys() == many["model"].keys()
for name, value in one["model"].items():
    assert (value - many["model"][name]).abs().max() < float(sys.argv[3]), name
assert len(one["optimizer"]["state"]) == len(many["optimizer"]["state"])
print("alike")
"""

ROTATED = """
import os, torch, torch.distributed as dist
from torch import nn
from stalloc.techniques.quantised_gather import gather_quantised, quantise, restored
from stalloc.techniques.rotated_linear import RotatedLinear

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for bias in (True, False):
    torch.manual_seed(1)
    whole = nn.Linear(24, 36, bias=bias)
    rotated = RotatedLinear(whole)
    former = rotated.weight.detach().clone()
    assert rotated.weight.shape == (36 // size, 24)
    inputs = torch.randn(size, 5, 24)
    outside, x = inputs.clone().requires_grad_(), inputs[rank].clone().requires_grad_()
    (whole(outside).square().sum() / size).backward()
    y = rotated(x)
    assert torch.allclose(y, whole(inputs[rank]), atol=1e-6)
    assert torch.equal(rotated.weight, former)  # it is at home
    y.square().sum().backward()
    own = slice(rank * 36 // size, (rank + 1) * 36 // size)
    assert torch.allclose(x.grad, size * outside.grad[rank], atol=1e-5)
    assert torch.allclose(rotated.weight.grad, whole.weight.grad[own], atol=1e-4)
    assert not bias or torch.allclose(rotated.bias.grad, whole.bias.grad, atol=1e-4)
    assert torch.equal(rotated.weight, former)
part = torch.randn(3, 5000, generator=torch.Generator().manual_seed(rank))
gathered = gather_quantised(part)
assert gathered.shape == (size, 3, 5000)
for other in range(size):
    sent = torch.randn(3, 5000, generator=torch.Generator().manual_seed(other))
    assert (gathered[other] - sent).abs().max() <= sent.abs().max() / 254 * 1.001
dist.destroy_process_group()
print("rotated", flush=True)
"""


def torchrun(num_ranks: int, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of so many processes on one machine."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        env=os.environ | SERVED,
        cwd=folder,
        timeout=400,
        check=False,
    )


def losses(folder: Path, name: str) -> list[float]:
    """Of each step, the mean over ranks."""
    of_ranks = [json.loads(file.read_text()) for file in folder.glob(f"{name}.*.json")]
    return [sum(one) / len(of_ranks) for one in zip(*of_ranks, strict=True)]


def alone(folder: Path, *words: str) -> None:
    done = run_warm(PROGRAM.read_text(), str(BATCH), str(folder / "alone"), *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "way", ["zero-3", "zero-2+blocks", "zero-1", "zero-1+blocks", "mics:2+blocks", "hpz:2", "2/2/4", "ddp"]
)
def test_four_processes_train_as_one(way: str, tmp_path: Path) -> None:
    alone(tmp_path)
    words = ["-m", "stalloc", "run", "--device", "virtual", "--keep-files", "--shard", way, str(PROGRAM)]
    done = torchrun(RANKS, [*words, str(BATCH // RANKS), "many"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "many") == pytest.approx(losses(tmp_path, "alone"), abs=2e-6)
    compared = run_warm(COMPARE, str(tmp_path / "alone.pt"), str(tmp_path / "many.pt"), "1e-5")
    assert compared.returncode == 0, compared.stderr
    assert "alike" in compared.stdout


def test_mixed_precision_and_recomputation_lie_inside_the_shards(tmp_path: Path) -> None:
    alone(tmp_path, "bfloat16")
    words = ["-m", "stalloc", "run", "--device", "virtual", "--keep-files", "--shard", "zero-3+blocks", str(PROGRAM)]
    done = torchrun(RANKS, [*words, str(BATCH // RANKS), "many", "bfloat16"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "many") == pytest.approx(losses(tmp_path, "alone"), rel=1e-2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rotated_layer_is_the_linear_one_and_a_quantised_gather_is_near(num_ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "rotated.py"
    script.write_text(ROTATED)
    done = torchrun(num_ranks, [str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rotated") == num_ranks  # lines of several ranks may run into one another
