"""Programs that train in shards: four processes with gloo give what one process gives."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
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
        [*command, "-m", "stalloc", *words],
        capture_output=True,
        text=True,
        env=os.environ | SERVED,
        cwd=folder,
        timeout=400,
        check=False,
    )


#: what torchrun gives to its ranks, without what its own start and that of each rank takes
AS_RANKS = """
import os, sys
num_ranks = int(sys.argv.pop(1))
port, told = os.pipe()
for rank in range(num_ranks):
    if os.fork() == 0:
        of_all = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks)) | {"MASTER_ADDR": "localhost"}
        own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"MASTER_PORT": os.read(port, 5).decode()}
        os.environ |= {**of_all, **own, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        from stalloc.cli import main
        sys.exit(main())
from torch.distributed import TCPStore
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
os.write(told, f"{store.port:05}".encode() * num_ranks)
sys.exit(max(abs(os.waitstatus_to_exitcode(os.wait()[1])) for _ in range(num_ranks)))
"""


def forked(num_ranks: int, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The same run, of ranks that are forks of a Python which has imported torch."""
    return run_warm(AS_RANKS, num_ranks, *words, folder=folder, variables=os.environ | SERVED)


Start = Callable[[int, list[str], Path], subprocess.CompletedProcess[str]]


def losses(folder: Path, name: str) -> list[float]:
    """Of each step, the mean over ranks."""
    of_ranks = [json.loads(file.read_text()) for file in folder.glob(f"{name}.*.json")]
    return [sum(one) / len(of_ranks) for one in zip(*of_ranks, strict=True)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """What one process gives, in a folder; it trains once."""

    @cache
    def trained(*words: str) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        done = run_warm(PROGRAM.read_text(), str(BATCH), str(folder / "alone"), *words)
        assert done.returncode == 0, done.stderr
        return folder

    return trained


def train_in_shards(start: Start, way: str, folder: Path, *words: str) -> None:
    """Train on four ranks."""
    options = ["run", "--device", "virtual", "--keep-files", "--shard", way]
    done = start(RANKS, [*options, str(PROGRAM), str(BATCH // RANKS), "many", *words], folder)
    assert done.returncode == 0, done.stderr


WAYS = ("zero-2+blocks", "zero-1", "zero-1+blocks", "mics:2+blocks", "hpz:2", "2/2/4", "ddp")


@pytest.mark.parametrize(
    ("way", "start"), [("zero-3", torchrun), *((way, forked) for way in WAYS)], ids=["zero-3", *WAYS]
)
def test_four_processes_train_as_one(way: str, start: Start, tmp_path: Path, alone: Callable[..., Path]) -> None:
    train_in_shards(start, way, tmp_path)
    assert losses(tmp_path, "many") == pytest.approx(losses(alone(), "alone"), abs=2e-6)
    compared = run_warm(COMPARE, str(alone() / "alone.pt"), str(tmp_path / "many.pt"), "1e-5")
    assert compared.returncode == 0, compared.stderr
    assert "alike" in compared.stdout


def test_mixed_precision_and_recomputation_lie_inside_the_shards(tmp_path: Path, alone: Callable[..., Path]) -> None:
    train_in_shards(forked, "zero-3+blocks", tmp_path, "bfloat16")
    assert losses(tmp_path, "many") == pytest.approx(losses(alone("bfloat16"), "alone"), rel=1e-2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rotated_layer_is_the_linear_one_and_a_quantised_gather_is_near(num_ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "rotated.py"
    script.write_text(ROTATED)
    done = forked(num_ranks, ["run", "--device", "virtual", str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rotated") == num_ranks  # lines of several ranks may run into one another
