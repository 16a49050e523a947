"""Every byte of a node in a dry run: pinned memory, the host's own, communicators as the program makes them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc

pytestmark = pytest.mark.usefixtures("cupy_installed", "cuda_torch")

MIB = 1 << 20
WATCHED = """
import json, sys
from stalloc import device
from stalloc.device import virtual
device.activate("virtual", device.find_gpu("H100"))
use = virtual.host_use()
use.begin()
import torch
{program}
told = use.told()
torch.cuda.init()
stats = torch.cuda.host_memory_stats()
told["torch"] = {{name: stats.get(f"allocated_bytes.{{name}}", 0) for name in ("peak", "current")}}
print(json.dumps(told))
"""
LOADER = """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(96, 3, 50, 50), torch.arange(96))
for images, labels in DataLoader(data, batch_size=16, pin_memory=True, num_workers={workers}):
    images.cuda(non_blocking=True).sum()
"""
PROGRAMS = {
    "swap space of a server": "kept = [torch.empty(2, 512, 16, 8, 129, pin_memory=True) for _ in range(4)]",
    "a loader": LOADER.format(workers=0),
    "a loader with workers": LOADER.format(workers=2),
    "activations kept on the host": """
model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4))).cuda()
with torch.autograd.graph.save_on_cpu(pin_memory=True):
    model(torch.randn(1000, 300, device="cuda")).sum().backward()
""",
    "parameters and state of an optimizer on the host": """
model = torch.nn.Linear(1000, 1001).cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 1000, device="cuda")).sum().backward()
optimizer.step()
held = [torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
        for state in optimizer.state.values() for value in state.values()]
""",
    "copies that are not waited for": """
kept = [torch.ones(size, device="cuda").to("cpu", non_blocking=True) for size in (1, 1000, 70_001, 3_000_000)]
""",
    "memory that is given back": """
kept = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in (5000, 33 << 20, (100 << 20) + 1)]
del kept
torch.accelerator.memory.empty_host_cache() if hasattr(torch.accelerator.memory, "empty_host_cache") else \
    torch._C._host_emptyCache()
kept = torch.empty(7000, dtype=torch.uint8, pin_memory=True)
""",
    "blocks that are used again": """
for size in (5000, 6000, 8000, 4097):
    torch.zeros(size, dtype=torch.uint8).pin_memory()
""",
    "several threads": """
import threading
def pin(size):
    kept.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
kept, threads = [], [threading.Thread(target=pin, args=(size,)) for size in range(100_000, 180_000, 10_000)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
""",
    "an offloaded model": """
model = torch.nn.Sequential(*(torch.nn.Linear(257, 257) for _ in range(6)))
for parameter in model.parameters():
    parameter.data = parameter.data.pin_memory()
for parameter in model.parameters():
    there = parameter.data.to("cuda", non_blocking=True)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_pinned_memory_is_what_torch_counts(name: str, run_checks: Callable[..., dict[str, Any]]) -> None:
    told = run_checks(WATCHED.format(program=PROGRAMS[name]))
    assert told["pinned_bytes"] == told["torch"]["peak"] > 0
    assert told["pinned_end_bytes"] == told["torch"]["current"]
    assert sum(size for _, size, _ in told["pinned_sites"]) == told["pinned_bytes"]
    assert told["pinned_bytes"] / 2 < told["pinned_asked_bytes"] <= told["pinned_bytes"]


def test_what_the_program_asked_for_is_told_apart_from_powers_of_two(run_checks: Callable[..., dict[str, Any]]) -> None:
    program = """
def make_swap_space():
    return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in (1025 << 20, 5000)]
kept = make_swap_space()
"""
    told = run_checks(WATCHED.format(program=program))
    assert told["pinned_bytes"] == (2048 << 20) + 8192
    assert told["pinned_asked_bytes"] == (1025 << 20) + 5000
    ((place, *sizes),) = told["pinned_sites"]
    assert "<string>:11 " in place
    assert sizes == [told["pinned_bytes"], told["pinned_asked_bytes"]]
    assert told["own_bytes"] < 64 * MIB  # nobody has touched these pages


def test_pages_behind_pinned_memory_stay_untouched_where_nothing_is_known(
    run_checks: Callable[..., dict[str, Any]],
) -> None:
    program = """
held = [torch.empty(1 << 18, pin_memory=True) for _ in range(400)]
for one in held:
    one.copy_(torch.empty(1 << 18, device="cuda"), non_blocking=True)
known = torch.arange(1000, device="cuda").to("cpu", non_blocking=True)
torch.cuda.synchronize()
assert known.tolist() == list(range(1000)) and not held[7][:5000].any()
"""
    told = run_checks(WATCHED.format(program=program))
    assert told["pinned_bytes"] >= 400 * MIB
    assert told["resident_peak_bytes"] - told["resident_before_bytes"] < 100 * MIB


def test_registered_memory_is_counted_until_it_is_given_up(run_checks: Callable[..., dict[str, Any]]) -> None:
    program = """
space, runtime = torch.empty(10 << 20, dtype=torch.uint8), torch.cuda.cudart()
assert int(runtime.cudaHostRegister(space.data_ptr(), 10 << 20, 0)) == 0 and space.is_pinned()
assert int(runtime.cudaHostRegister(space.data_ptr(), 10 << 20, 0)) == 712
assert int(runtime.cudaHostUnregister(space.data_ptr())) == 0 and not space.is_pinned()
assert int(runtime.cudaHostUnregister(space.data_ptr())) == 713
"""
    told = run_checks(WATCHED.format(program=program))
    assert told["registered_bytes"] == 10 * MIB
    assert told["pinned_bytes"] == told["torch"]["peak"]


def test_the_programs_own_memory_and_what_processes_share(run_checks: Callable[..., dict[str, Any]]) -> None:
    program = """
torch.zeros(1, device="cuda")
table = bytearray(150 << 20)
shared = torch.ones(40 << 20, dtype=torch.uint8).share_memory_()
"""
    told = run_checks(WATCHED.format(program=program))
    assert 150 * MIB <= told["own_bytes"] < 290 * MIB
    assert told["shared_memory_bytes"] == 40 * MIB or not os.access("/dev/shm", os.W_OK)


GROUPS = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
x = torch.ones(1 << 20, device="cuda")
dist.all_reduce(x, group=mesh["replicate"].get_group())
out = torch.empty(8 << 20, device="cuda")
dist.all_gather_into_tensor(out, x, group=mesh["shard"].get_group())
dist.all_to_all_single(torch.empty_like(out), out, group=mesh["shard"].get_group())
kept = torch.empty(5 << 20, dtype=torch.uint8, pin_memory=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def dry_run_of_groups(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """One rank of two machines: its JSON, and what was printed."""
    program = tmp_path_factory.mktemp("node") / "groups.py"
    program.write_text(GROUPS)
    out = program.with_name("result.json")
    done = run_stalloc("dryrun", "--gpu", "H100", "--ranks", 16, "--rank", 9, "--node", "--json", out, program)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_communicators_are_those_that_the_program_makes(dry_run_of_groups: tuple[dict[str, Any], str]) -> None:
    (rank,) = dry_run_of_groups[0]["node"]["ranks"]
    assert [(one["num_ranks"], one["num_local"], one["num_nodes"]) for one in rank["communicators"]] == [
        (2, 1, 2),
        (8, 8, 1),
    ]
    between, within = rank["communicators"]
    assert between["collectives"] == ["all_reduce"]
    assert within["collectives"] == ["all_gather"]
    assert within["channels"] == [24, 24]
    assert within["p2p_channels_each_peer"] == [32, 32]
    assert within["parts"]["sends"] == [7 * 32 * 12 * MIB] * 2
    assert within["parts"]["ring"] == [24 * 12 * MIB] * 2
    assert between["pinned_bytes"][1] > 0
    assert rank["nccl_bytes"] == [sum(one["device_bytes"][end] for one in rank["communicators"]) for end in (0, 1)]
    assert rank["nvidia_smi_bytes"][0] >= rank["reserved_bytes"] + rank["nccl_bytes"][0]


def test_the_machine_has_all_of_its_ranks(dry_run_of_groups: tuple[dict[str, Any], str]) -> None:
    node, shown = dry_run_of_groups[0]["node"], dry_run_of_groups[1]
    assert node["machine"]["num_ranks"] == 8
    assert node["machine"]["num_tried"] == 1
    (rank,) = node["ranks"]
    assert rank["host"]["pinned_bytes"] == 8 * MIB
    assert node["machine"]["pinned_bytes"] == [8 * (8 * MIB + end) for end in rank["nccl_pinned_bytes"]]
    for words in ("machine, 8 ranks", "nvidia-smi shows", "7 ranks that were not tried", "NCCL, 8 ranks, 24 channels"):
        assert words in shown
    assert "--headroom" in shown  # NCCL alone takes more than is set aside


def test_a_run_says_what_it_takes_of_the_host_in_one_line(tmp_path: Path) -> None:
    program, out = tmp_path / "swap.py", tmp_path / "result.json"
    program.write_text("import torch\nkept = torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)\n")
    done = run_stalloc("dryrun", "--json", out, program)
    assert done.returncode == 0, done.stderr
    assert "on the host: 4.00 MiB pinned for 3.00 MiB asked for, " in done.stdout
    assert "nvidia-smi" not in done.stdout
    machine = json.loads(out.read_text())["node"]["machine"]
    assert machine["pinned_bytes"] == [4 * MIB, 4 * MIB]
    assert machine["num_ranks"] == 1


def test_collectives_outside_of_nccl_are_said_to_be_so(tmp_path: Path) -> None:
    program, out = tmp_path / "gloo.py", tmp_path / "result.json"
    program.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(8, device='cuda'))\n"
    )
    done = run_stalloc("dryrun", "--ranks", 2, "--rank", 0, "--json", out, program)
    assert done.returncode == 0, done.stderr
    assert "collectives outside of NCCL are not in its figures: gloo" in done.stdout
    (rank,) = json.loads(out.read_text())["node"]["ranks"]
    assert rank["communicators"] == []
    assert rank["nccl_bytes"] == [0, 0]


def test_a_search_has_no_node_of_its_own(tmp_path: Path) -> None:
    done = run_stalloc("dryrun", "--find", "batch=1..4", "--node", tmp_path / "train.py", "{batch}")
    assert done.returncode == 2
    assert "--node is for one run" in done.stderr


def test_memory_that_cupy_pins_is_counted_too(tmp_path: Path) -> None:
    program, out = tmp_path / "pin.py", tmp_path / "result.json"
    program.write_text(
        "import cupy\ncupy.zeros(4)\nkept = cupy.cuda.alloc_pinned_memory(3 << 20)\n"
        "raw = cupy.cuda.runtime.hostAlloc(5000, 0)\n"
    )
    done = run_stalloc("dryrun", "--ranks", 1, "--json", out, program)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(out.read_text())["node"]["ranks"]
    assert rank["host"]["pinned_bytes"] >= (3 << 20) + 5000
    assert any(place.startswith("pin.py:") for place, *_ in rank["host"]["pinned_sites"])
