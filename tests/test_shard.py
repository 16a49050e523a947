"""`stalloc shard`: what is foreseen is what a rank holds, the choice is the cheapest, exports say what the way is."""

import itertools
import json
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc, run_warm

from stalloc.errors import BadInputError
from stalloc.techniques.technique_settings import parse_way

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

TRAIN_GPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
TINY = (str(TRAIN_GPT), "--size", "tiny", "--batch", "4", "--steps", "4")
CONVOLUTIONS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.second(torch.relu(self.norm(self.first(x))))


model = nn.Sequential(nn.Conv2d(3, 48, 3), *[Block(48) for _ in range(4)], nn.Flatten(), nn.LazyLinear(10)).cuda()
model(torch.zeros(1, 3, 34, 34, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(6):
    optimizer.zero_grad()
    for _ in range(2):  # microbatches
        images, labels = torch.randn(8, 3, 34, 34).cuda(), torch.zeros(8, dtype=torch.long).cuda()
        nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
"""


def shard(folder: Path, *words: object) -> dict[str, Any]:
    """What the verb tells."""
    done = run_stalloc("shard", "--json", folder / "told.json", *words)
    assert done.returncode in (0, 1), done.stderr
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return told


@pytest.mark.parametrize(
    ("program", "way"),
    [("gpt", "zero-3+blocks"), ("gpt", "zero-1")]
    + [
        pytest.param(program, way, marks=pytest.mark.slow)
        for program in ("gpt", "convolutions")
        for way in ("zero-3", "zero-2+blocks", "zero-1", "hpz:2+blocks", "mics:2", "2/4/8", "1/2/4", "ddp")
    ],
)
def test_what_is_foreseen_is_what_a_rank_holds(program: str, way: str, tmp_path: Path) -> None:
    words = TINY
    if program == "convolutions":
        (tmp_path / "train.py").write_text(CONVOLUTIONS)
        words = (str(tmp_path / "train.py"),)
    told = shard(tmp_path, "--ranks", 8 if way == "2/4/8" else 4, "--way", way, *words)
    (one,) = told["ways"]
    measured = one["measured"]
    assert measured["failure"] == ""
    assert one["step_bytes"] == pytest.approx(measured["step_bytes"], rel=0.005)
    assert one["making_bytes"] == pytest.approx(measured["making_bytes"], rel=0.005)
    assert one["step_allocated"] == pytest.approx(measured["step_allocated"], rel=0.005)
    assert one["making_allocated"] == pytest.approx(measured["making_allocated"], rel=0.005)


def test_the_cheapest_triple_within_a_budget_is_that_of_all_triples(tmp_path: Path) -> None:
    every = shard(tmp_path, "--ranks", 16, "--per-node", 4, "--factors", "all", "--runs", 0, *TINY)["ways"]
    factors = (1, 2, 4, 8, 16)
    valid = {(p, g, s) for p, g, s in itertools.product(factors, repeat=3) if s % p == 0 and s % g == 0 and 16 % s == 0}
    for recompute in (None, "blocks"):
        found = [one for one in every if one["recompute"] == recompute]
        assert sorted((one["parameters"], one["gradients"], one["state"]) for one in found) == sorted(valid)
    needs = sorted(one["needed_bytes"] for one in every if one["can_run"])
    for budget in (needs[len(needs) // 4], needs[len(needs) // 2]):
        told = shard(
            tmp_path, "--ranks", 16, "--per-node", 4, "--factors", "all", "--runs", 1, "--budget", f"{budget}B", *TINY
        )
        best = told["ways"][told["best"]]
        quickest = min(one["seconds"] for one in every if one["can_run"] and one["needed_bytes"] <= budget)
        assert best["seconds"] == pytest.approx(quickest)
        assert best["measured"]["step_allocated"] <= budget
        assert best["measured"]["making_allocated"] <= budget


def test_a_budget_that_nothing_keeps_is_said_with_exit_code_1(tmp_path: Path) -> None:
    done = run_stalloc("shard", "--ranks", 2, "--runs", 0, "--budget", "10KiB", *TINY)
    assert done.returncode == 1
    assert "nothing that runs fits" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--way", "zero-4"), "no way to shard called 'zero-4'"),
        (("--way", "mics:3"), "mics:3 cannot be done by 8 ranks"),
        (("--per-node", "3"), "--per-node is 3"),
        (("--export", "fsdp2"), "--export needs --way"),
        (("--way", "zero-1", "--export", "fsdp2"), "fsdp2 has nothing for zero-1"),
        (("--way", "4/4/8", "--export", "fsdp2"), "fsdp2 has nothing for 4/4/8"),
        (("--way", "4/4/8", "--export", "accelerate"), "accelerate has nothing for 4/4/8"),
        (("--way", "4/4/8", "--export", "torchtitan"), "torchtitan has nothing for 4/4/8"),
        (("--way", "1/1/4", "--export", "deepspeed"), "deepspeed has nothing for 1/1/4"),
        (("--way", "mics:4", "--export", "deepspeed"), "deepspeed has nothing for mics:4"),
        (("--way", "zero-3+blocks", "--export", "deepspeed"), "deepspeed has nothing for zero-3+blocks"),
        (("--way", "ddp+blocks", "--export", "accelerate"), "accelerate has nothing for ddp+blocks"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: tuple[str, ...], said: str) -> None:
    done = run_stalloc("shard", *words, *TINY)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_model_that_is_not_on_the_gpu_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CONVOLUTIONS.replace(".cuda()", "").replace(', device="cuda"', ""))
    done = run_stalloc("shard", "--ranks", 2, "--runs", 0, tmp_path / "train.py")
    assert done.returncode != 0
    assert "no parameters on the GPU" in done.stderr


def test_only_ranks_can_be_told_to_shard() -> None:
    done = run_stalloc("run", "--device", "virtual", "--shard", "zero-3", *TINY)
    assert done.returncode == 125
    assert "--shard is for ranks" in done.stderr


@pytest.mark.parametrize(("way", "instead"), [("4/1/4", "mics:4"), ("4/1/8", "4/4/8"), ("8/4/8", "zero-3")])
def test_a_triple_that_cannot_run_says_which_can(way: str, instead: str) -> None:
    with pytest.raises(BadInputError, match=f"{way} can be foreseen only.*run {instead} instead"):
        parse_way(way, 8)


def exported(form: str, way: str) -> str:
    done = run_stalloc("shard", "--ranks", 8, "--way", way, "--export", form, *TINY)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_files_for_other_frameworks_say_what_the_way_is() -> None:
    zero = json.loads(exported("deepspeed", "hpz:4"))["zero_optimization"]
    assert (zero["stage"], zero["zero_hpz_partition_size"]) == (3, 4)
    titan = tomllib.loads(exported("torchtitan", "mics:4+blocks"))
    assert titan["parallelism"]["data_parallel_replicate_degree"] == 2
    assert titan["parallelism"]["data_parallel_shard_degree"] == 4
    assert titan["activation_checkpoint"]["mode"] == "full"
    lines = exported("accelerate", "zero-2").splitlines()
    assert "  fsdp_version: 2" in lines
    assert "  fsdp_reshard_after_forward: false" in lines
    assert "  fsdp_transformer_layer_cls_to_wrap: Block" in lines


LOADED_BY = {
    "accelerate": """
from accelerate.commands.config.config_args import load_config_from_file
found = load_config_from_file(sys.argv[1])
fsdp = found.fsdp_config or {}
names = ("version", "reshard_after_forward", "activation_checkpointing")
told = [found.distributed_type.value, found.num_processes, *(fsdp.get(f"fsdp_{name}") for name in names)]
""",
    "deepspeed": """
from deepspeed.runtime.config import DeepSpeedConfig
zero = DeepSpeedConfig(sys.argv[1]).zero_config
told = [int(zero.stage), zero.zero_hpz_partition_size]
""",
    "torchtitan": """
import logging
from torchtitan.config import ConfigManager
found = ConfigManager().parse_args(["--job.config_file", sys.argv[1]])
at = found.parallelism
told = [at.data_parallel_replicate_degree, at.data_parallel_shard_degree, at.fsdp_reshard_after_forward]
told += [found.activation_checkpoint.mode]
""",
    "torchtitan 0.3": """
from dataclasses import dataclass, field
import tyro
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC
@dataclass
class Config:
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointingConfig = field(default_factory=FullAC.Config)
found = tyro.cli(Config, args=open(sys.argv[1]).read().splitlines()[1].split()[1:])
at = found.parallelism
told = [at.data_parallel_replicate_degree, at.data_parallel_shard_degree, at.fsdp_reshard_after_forward]
told += ["none" if found.activation_checkpoint is None else "full"]
""",
}


def _has(framework: str) -> bool:
    name, _, release = framework.partition(" ")
    if find_spec(name) is None:
        return False
    return name != "torchtitan" or version(name).startswith("0.2") == (release == "")


@pytest.mark.parametrize(
    ("framework", "way", "said"),
    [
        ("accelerate", "zero-3+blocks", ["FSDP", 8, 2, True, True]),
        ("accelerate", "zero-2", ["FSDP", 8, 2, False, False]),
        ("accelerate", "ddp", ["MULTI_GPU", 8, None, None, None]),
        ("deepspeed", "ddp", [0, 1]),
        ("deepspeed", "zero-1", [1, 1]),
        ("deepspeed", "zero-2", [2, 1]),
        ("deepspeed", "zero-3", [3, 1]),
        ("deepspeed", "hpz:4", [3, 4]),
        ("torchtitan", "ddp", [8, 1, "never", "none"]),
        ("torchtitan", "zero-3+blocks", [1, 8, "always", "full"]),
        ("torchtitan", "mics:4", [2, 4, "always", "none"]),
        ("torchtitan 0.3", "mics:4", [2, 4, "always", "none"]),
        ("torchtitan 0.3", "zero-2+blocks", [1, 8, "never", "full"]),
    ],
)
def test_a_framework_loads_its_file(tmp_path: Path, framework: str, way: str, said: list[object]) -> None:
    if not _has(framework):
        pytest.skip(f"{framework} is not installed")
    file = tmp_path / ("file.json" if framework == "deepspeed" else "file")
    file.write_text(exported(framework.partition(" ")[0], way))
    done = run_warm(f"import json, sys\n{LOADED_BY[framework]}\nprint(json.dumps(told))", file)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == said


SHARDED_BY_HAND = """
import sys, runpy, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import sharded
dist.init_process_group("nccl")
train_gpt = runpy.run_path(sys.argv[2])
size = train_gpt["SIZES"]["tiny"]
with torch.device("cuda"):
    model = train_gpt["Transformer"](size, size.seq_len, False)
sharded.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
for _ in range(4):
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float32, device="cuda")
    tokens = torch.zeros(2, 4, size.seq_len, dtype=torch.long).cuda()
    loss = model(tokens[0].clone(), tokens[1].clone())
    del tokens
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(torch.cuda.memory_stats()["requested_bytes.all.peak"], file=open(sys.argv[3], "w"))
"""


def test_a_run_of_the_exported_code_holds_what_was_foreseen(tmp_path: Path) -> None:
    (tmp_path / "sharded.py").write_text(exported("fsdp2", "zero-3"))
    (tmp_path / "by_hand.py").write_text(SHARDED_BY_HAND)
    told = shard(tmp_path, "--ranks", 8, "--way", "zero-3", "--runs", 0, *TINY)
    (one,) = told["ways"]
    done = run_stalloc(
        "dryrun", "--keep-files", "--ranks", 8, "--rank", 0, tmp_path / "by_hand.py", tmp_path, TRAIN_GPT,
        tmp_path / "peak",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int((tmp_path / "peak").read_text()) == pytest.approx(one["step_bytes"], rel=0.005)


ROTATED = """
import os, sys
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # next to nothing
import torch
import torch.distributed as dist
from torch import nn
from stalloc.techniques.rotated_linear import RotatedLinear
dist.init_process_group("nccl")
with torch.device("cuda"):
    whole = nn.Linear(4096, 4096, bias=False)
rotated = RotatedLinear(whole)
part = rotated.weight.nbytes
del whole
x = torch.ones(1, 4096, device="cuda", requires_grad=True)
peaks = []
for act in (lambda: rotated(x), lambda: rotated(x).sum().backward()):
    torch.cuda.reset_peak_memory_stats()
    kept = act()
    peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] / part)
print(*peaks, file=open(sys.argv[1], "w"))
"""


def test_a_rotated_layer_holds_two_parts_of_its_weight(tmp_path: Path) -> None:
    (tmp_path / "rotated.py").write_text(ROTATED)
    done = run_stalloc(
        "dryrun", "--keep-files", "--ranks", 8, "--rank", 0, tmp_path / "rotated.py", tmp_path / "peaks"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    forward, backward = map(float, (tmp_path / "peaks").read_text().split())
    assert forward == pytest.approx(2, abs=0.05)
    assert backward == pytest.approx(4, abs=0.05)  # the same, and two parts of the gradient


PIPELINE = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
schedule = getattr(schedules, sys.argv[1])
is_multi = issubclass(schedule, schedules.PipelineScheduleMulti)
own, count = ([rank, rank + size], 2 * size) if is_multi else ([rank], size)
example = torch.zeros(2, 64, 256, device=device)
stages = [
    PipelineStage(
        nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device), number, count, device,
        input_args=(example,), output_args=(example,),
    )
    for number in own
]
made = schedule(stages if is_multi else stages[0], n_microbatches=8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW([one for stage in stages for one in stage.submod.parameters()])
x = torch.randn(16, 64, 256, device=device)
for _ in range(3):
    made.step(*((x,) if 0 in own else ()), **({"target": x} if count - 1 in own else {}))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_each_rank_of_a_pipeline_is_run_by_itself(schedule: str, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    told = tmp_path / "told.json"
    done = run_stalloc("dryrun", "--ranks", 4, "--json", told, tmp_path / "pipeline.py", schedule)
    assert done.returncode == 0, done.stderr
    assert [one["rank"] for one in json.loads(told.read_text())["ranks"]] == [0, 1, 2, 3]
    assert all(one["needed_bytes"] > 0 for one in json.loads(told.read_text())["ranks"])
