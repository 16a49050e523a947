"""`stalloc dryrun --find`: the largest value that fits is that of running every one, for each allocator."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc, run_warm

from stalloc.device.known_gpus import KNOWN_GPUS

pytestmark = pytest.mark.usefixtures("cupy_installed", "cuda_torch")

PIECES = """
import random, sys, torch
n, chosen, held = int(sys.argv[1]), random.Random(11), []
def grow():
    held.append(torch.empty(n * chosen.randrange(40, 400) << 10, dtype=torch.uint8, device="cuda"))
for _ in range(80):
    if held and chosen.random() < 0.45:
        held.pop(chosen.randrange(len(held)))
    else:
        grow()
"""
NAMES = ("native", "expandable", "stalloc")
MEMORY = "64MiB"


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """A program whose pieces grow with its argument."""
    program = tmp_path / "pieces.py"
    program.write_text(PIECES)
    return program


def find(program: Path, what: str, *options: object, words: tuple[str, ...] = ("{n}",)) -> tuple[Any, str, str, int]:
    """The JSON object, what was printed on both streams, and the exit code."""
    out = program.with_name("result.json")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = run_stalloc(
        *("dryrun", "--json", out, "--headroom", "0", "--find", what, *options, "--", program, *words),
        variables=variables,
    )
    return json.loads(out.read_text()) if out.exists() else {}, done.stdout, done.stderr, done.returncode


def completes(program: Path, value: int, name: str) -> bool:
    """Whether the program completes with so much memory, in a run of its own."""
    module = "run" if name == "stalloc" else "native"
    variables = {key: text for key, text in os.environ.items() if not key.endswith("ALLOC_CONF")}
    variables |= {"STALLOC_CACHE": "off"}
    if name == "expandable":
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    options = ["--device", "virtual", "--memory", MEMORY, program, value]
    if module == "run":
        return run_stalloc("run", *options, variables=variables).returncode == 0
    source = "import sys\nfrom stalloc.cli.native import main\nsys.exit(main())"
    result = program.with_name("native.json")
    return run_warm(source, "--result", result, *options, variables=variables).returncode == 0


def test_the_largest_that_fits_is_found_with_where_the_next_one_ends(pieces: Path) -> None:
    result, shown, said, code = find(pieces, "n=1..40", "--memory", MEMORY)
    assert code == 0, said
    needed = result["needed"]
    assert needed["needed_bytes"] <= 64 << 20 < needed["next_needed_bytes"]
    for name in NAMES:
        told = result[name]
        assert 1 < told["largest"] <= needed["largest"]
        assert told["fails"] == told["largest"] + 1
        assert told["allocated_peak_bytes"] <= told["reserved_peak_bytes"] <= 64 << 20
        assert told["ran_out"]["place"] == "pieces.py:5 grow"
        assert told["ran_out"]["holders"] == [["pieces.py:5 grow", told["ran_out"]["allocated_bytes"]]]
        assert str(told["largest"]) in shown
    assert "next: stalloc run" in shown
    assert {line[-2:] for line in said.splitlines()} == {" …"}, "in pipes too it says what it is at"


@pytest.mark.slow
def test_what_convolutions_leave_open_is_said(pieces: Path) -> None:
    pieces.write_text(
        "import sys, torch\n"
        "convolution = torch.nn.Conv2d(3, 64, 3, padding=1, device='cuda')\n"
        "convolution(torch.ones(int(sys.argv[1]), 3, 96, 96, device='cuda', requires_grad=True)).sum().backward()\n"
    )
    result, shown, said, code = find(pieces, "n=1..2", "--memory", "32MiB", "--gpu", "L4")
    assert code == 0, said
    assert result["uncertain"]["convolutions"]["num_unseen"] > 0
    assert "convolutions: what is allocated may be" in shown


@pytest.mark.slow
def test_it_is_that_of_running_every_one(pieces: Path) -> None:
    result, *_ = find(pieces, "n=4..26:2", "--memory", MEMORY)
    for name in NAMES:
        assert result[name]["largest"] == max(n for n in range(4, 27, 2) if completes(pieces, n, name)), name


@pytest.mark.parametrize(
    ("what", "words", "sentence"),
    [
        ("batch", ("{batch}",), "--find is 'batch': write NAME=FIRST..LAST or NAME=FIRST..LAST:STEP"),
        ("n=9..3", ("{n}",), "--find is 'n=9..3', which has no values"),
        ("n=1..9:0", ("{n}",), "--find is 'n=1..9:0', which has no values"),
        ("n=1..9", ("{batch}",), "--find looks for n, but the program's arguments have no {n}, only {batch}: write it"),
        ("gpu", ("--", "{n}", "--memory"), None),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(
    pieces: Path, what: str, words: tuple[str, ...], sentence: str | None
) -> None:
    options = ("--memory", "1GiB") if what == "gpu" else ()
    result, shown, said, code = find(pieces, what, *options, words=words)
    assert (result, shown, code) == ({}, "", 2)
    assert said.startswith(
        f"stalloc: {sentence or '--find gpu looks through all cards: leave --gpu and --memory out.'}"
    )
    assert said.count("\n") == 1


@pytest.mark.slow
def test_ends_of_a_range_and_failures_of_the_program_are_said(pieces: Path) -> None:
    _, shown, _, code = find(pieces, "n=1..3", "--memory", "1GiB")
    assert code == 0
    assert "under PyTorch and PyTorch, expandable_segments:True and stalloc all of the range fits: give --find" in shown
    _, shown, _, code = find(pieces, "n=30..40", "--memory", "20MiB")
    assert code == 1
    assert "not even n=30 fits" in shown
    assert "next: stalloc fit --budget" in shown
    pieces.write_text("import torch\ntorch.empty(1, device='cuda')\nraise KeyError('mine')\n")
    _, shown, said, code = find(pieces, "n=1..3")
    assert (shown, code) == ("", 2)
    assert "KeyError: 'mine'" in said
    assert said.splitlines()[-1].startswith("stalloc: the program failed with code 1 (n=1, without a limit), not for")


@pytest.mark.slow
def test_the_smallest_card_is_found(pieces: Path) -> None:
    pieces.write_text(
        "import torch\nheld = [torch.empty(5 << 30, dtype=torch.uint8, device='cuda') for _ in range(3)]\n"
    )
    result, shown, said, code = find(pieces, "gpu", words=())
    assert code == 0, said
    assert result["needed_bytes"] == 15 << 30
    for name in NAMES:
        told = result[name]
        assert (told["gpu"], told["too_small"]) == ("RTX-4080", "T4")
        assert told["memory_bytes"] == 16_049 << 20
        assert told["reserved_peak_bytes"] == 15 << 30
        assert told["ran_out"]["allocated_bytes"] == 10 << 30
    assert "RTX-4080" in shown
    assert "printed on such a card" in shown


@pytest.mark.slow
def test_a_program_of_cupy_alone_is_searched_by_running_it(pieces: Path) -> None:
    pieces.write_text("import sys, cupy\nheld = [cupy.empty(int(sys.argv[1]) << 20, cupy.uint8) for _ in range(5)]\n")
    result, *_, code = find(pieces, "n=1..30", "--memory", "64MiB")
    assert code == 0
    assert result["needed"] is None
    assert result["native"]["largest"] == result["stalloc"]["largest"] == 12


RANKS = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
rank, ranks, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
mesh = init_device_mesh("cuda", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
for block in model:
    fully_shard(block, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters())
extra = torch.empty((rank + 1) * int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(torch.ones(1, device="cuda"), group=mesh["tensor"].get_group())
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_are_tried_one_by_one_on_fake_process_groups(pieces: Path) -> None:
    pieces.write_text(RANKS)
    out = pieces.with_name("ranks.json")
    options = ("--headroom", "0", "--memory", "600MiB", "--json", out, "--ranks", 8)
    done = run_stalloc("dryrun", *options, "--rank", "1,7", "--", pieces, 100)
    assert done.returncode == 1, done.stderr
    result = json.loads(out.read_text())
    low, high = result["ranks"]
    assert (low["rank"], high["rank"]) == (1, 7)
    assert high["needed_bytes"] - low["needed_bytes"] == 600 << 20
    for name in NAMES:
        assert low[name]["fits"]
        assert not high[name]["fits"]
        assert high[name]["ran_out"]["place"] == "pieces.py:15 <module>"
    assert "does not fit" in done.stdout
    found, _, said, code = find(pieces, "n=10..200:10", "--memory", "600MiB", "--ranks", 8, "--rank", 3)
    assert code == 0, said
    others = low["needed_bytes"] - (200 << 20)
    expected = max(n for n in range(10, 201, 10) if others + (4 * n << 20) <= 600 << 20)
    assert found["stalloc"]["largest"] == found["needed"]["largest"] == expected


@pytest.mark.slow
def test_objects_of_ranks_that_are_not_there_are_one_sentence(pieces: Path) -> None:
    pieces.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group()\ntorch.empty(1, device='cuda')\n"
        "dist.broadcast_object_list([None])\n"
    )
    done = run_stalloc("dryrun", "--ranks", 2, "--rank", 1, "--", pieces)
    assert done.returncode == 2
    assert "MissingRankError: rank 1 waits in broadcast_object_list for objects of rank 0, which is not" in done.stderr


SHARED = """
import sys, torch
side, n = torch.cuda.Stream(), int(sys.argv[1])
for step in range(8):
    block = torch.empty(n << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(side):
        made = block + 1
    block.record_stream(side)
    del block, made
"""


def test_blocks_of_several_streams_have_their_bound_in_a_search_too(tmp_path: Path) -> None:
    program = tmp_path / "shared.py"
    program.write_text(SHARED)
    result, shown, _, _ = find(program, "n=32..32", "--memory", "1GiB")
    bound = result["uncertain"]["shared_blocks"]
    assert (bound["live_peak_bytes"], bound["of"]) == (9 * 32 << 20, "n=32")
    assert "at n=32 288.00 MiB are live" in " ".join(shown.split())
    assert "order_decides" not in result["uncertain"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "of"), [(("--find", "n=32..32"), "n=32"), (("--ranks", "2", "--rank", "1"), "rank 1")]
)
def test_errors_that_only_the_order_of_streams_decides_are_told_of_searches_and_ranks(
    tmp_path: Path, options: tuple[str, ...], of: str
) -> None:
    program, out = Path(__file__).parent / "programs" / "pending_block.py", tmp_path / "result.json"
    value = "{n}" if "--find" in options else "32"
    variables = {name: text for name, text in os.environ.items() if not name.endswith("ALLOC_CONF")}
    words = "--memory", "128MiB", "--headroom", "0", "--json", str(out), *options, "--", str(program), value
    done = run_stalloc("dryrun", *words, variables=variables)
    assert done.returncode == 0, done.stderr
    uncertain = json.loads(out.read_text())["uncertain"]
    assert uncertain["shared_blocks"]["taken_bytes"] == 160 << 20
    told = {one["allocator"]: one for one in uncertain["order_decides"]}
    assert set(told) == {"native", "expandable"}
    assert [told["native"][when]["fits"] for when in ("at_once", "at_waits")] == [True, False]
    assert told["native"]["of"] == of
    assert f"{of}, PyTorch: when the streams are done decides" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_the_smallest_card_says_what_only_the_order_of_streams_decides(tmp_path: Path) -> None:
    program, out = Path(__file__).parent / "programs" / "pending_block.py", tmp_path / "result.json"
    variables = {name: text for name, text in os.environ.items() if not name.endswith("ALLOC_CONF")}
    smallest = min(gpu.total_bytes for gpu in KNOWN_GPUS.values())
    unit = (smallest >> 20) // 4
    words = "--headroom", "0", "--json", str(out), "--find", "gpu", "--", str(program), str(unit)
    done = run_stalloc("dryrun", *words, variables=variables)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    told = {one["allocator"]: one for one in result["uncertain"]["order_decides"]}
    assert not told["native"]["at_waits"]["fits"]
    assert result["native"]["memory_bytes"] == smallest
