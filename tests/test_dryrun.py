"""`stalloc dryrun`: what a program needs, apart from what a caching allocator takes where there is plenty."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc

pytestmark = pytest.mark.usefixtures("cupy_installed", "cuda_torch")

GROWING = """
import torch
for size in (100, 150, 220):  # MiB, one at a time
    block = torch.empty(size << 20, dtype=torch.uint8, device="cuda")
    del block
"""


def dryrun(program: Path, *options: str, code: int = 0, words: tuple[str, ...] = ()) -> tuple[dict[str, Any], str, str]:
    """The JSON object, and what was printed on both streams."""
    out = program.with_name("result.json")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = run_stalloc("dryrun", "--json", out, "--headroom", "0", *options, program, *words, variables=variables)
    assert done.returncode == code, done.stderr
    return json.loads(out.read_text()) if out.exists() else {}, done.stdout, done.stderr


def test_what_is_needed_is_less_than_what_a_cache_takes_of_plenty_and_does(tmp_path: Path) -> None:
    program = tmp_path / "growing.py"
    program.write_text(GROWING)
    result, shown, _ = dryrun(program)
    native = result["native"]
    assert native["taken_bytes"] == (100 + 150 + 220) << 20
    assert native["needed_bytes"] == native["allocated_peak_bytes"] == 220 << 20
    assert [result[name]["needed_by"] for name in ("native", "expandable", "stalloc")] == ["replay", "replay", "run"]
    assert all(result[name]["fits"] for name in ("native", "expandable", "stalloc"))
    for figure in ("470.00 MiB", "220.00 MiB"):
        assert figure in shown


def test_what_cupy_holds_beside_pytorch_is_needed_too(tmp_path: Path) -> None:
    program = tmp_path / "both.py"
    program.write_text(f"import cupy\nkept = cupy.empty(100 << 20, dtype=cupy.uint8)\n{GROWING}")
    result, _, _ = dryrun(program)
    assert result["native"]["needed_by"] == "reserved"
    assert result["native"]["needed_bytes"] >= (100 + 220) << 20


SLEEPING = """
import torch, stalloc
cache = [torch.empty(32 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
stalloc.tag("cache", *cache)
for _ in range(2):
    stalloc.sleep(tags="cache", to="drop")
    stalloc.wake()
"""


@pytest.mark.slow
def test_a_program_that_sleeps_stays_awake_under_pytorch_which_is_said(tmp_path: Path) -> None:
    program = tmp_path / "sleeping.py"
    program.write_text(SLEEPING)
    result, shown, _ = dryrun(program)
    assert result["uncertain"]["sleeps"]
    assert "this program sleeps (stalloc.sleep)" in shown
    assert result["native"]["needed_bytes"] == 128 << 20


SHARED = """
import sys, torch
side, kept = torch.cuda.Stream(), []
for step in range(8):
    block = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(side):
        made = block + 1
    {after}
    del block, made
"""


@pytest.mark.parametrize(
    ("after", "blocks"),
    [
        pytest.param("block.record_stream(side)", 9, marks=pytest.mark.slow),
        pytest.param("block.record_stream(side); torch.cuda.synchronize()", 3, marks=pytest.mark.slow),
        pytest.param("side.query(); torch.cuda.current_stream().wait_stream(side)", None, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_several_streams_may_be_live_until_the_host_waits(
    tmp_path: Path, after: str, blocks: int | None
) -> None:
    program = tmp_path / "shared.py"
    program.write_text(SHARED.format(after=after))
    result, shown, _ = dryrun(program)
    assert result["native"]["allocated_peak_bytes"] == 64 << 20
    bound = result["uncertain"]["shared_blocks"]
    assert (bound and bound["live_peak_bytes"]) == (blocks and blocks * 32 << 20)
    assert ("several streams use blocks that are freed" in shown) == (blocks is not None)
    if bound:
        assert 64 << 20 <= bound["timeline"]["live_peak_bytes"] <= bound["live_peak_bytes"]
        assert "on the timeline of estimated times" in " ".join(shown.split())
        assert bound["taken_bytes"] >= bound["live_peak_bytes"] > result["native"]["taken_bytes"]


@pytest.mark.slow
def test_an_error_that_only_the_order_of_streams_decides_is_told(tmp_path: Path) -> None:
    program = tmp_path / "pending.py"
    program.write_text((Path(__file__).parent / "programs" / "pending_block.py").read_text())
    result, shown, _ = dryrun(program, "--memory", "128MiB", words=("32",))
    told = {one["allocator"]: one for one in result["uncertain"]["order_decides"]}
    assert told["native"]["at_once"] == {"fits": True, "num_retries": 0}
    assert not told["native"]["at_waits"]["fits"]
    assert told["expandable"]["at_waits"] == {"fits": True, "num_retries": 1}
    assert "stalloc" not in told
    text = " ".join(shown.split())
    assert "PyTorch: when the streams are done decides: the program completes without a retry if all is done at" in text
    assert "runs out of memory if nothing is done before the host waits; PyTorch looks for a free block before" in text


@pytest.mark.slow
def test_a_device_of_what_is_needed_is_large_enough_and_a_smaller_one_is_not(tmp_path: Path) -> None:
    program = tmp_path / "growing.py"
    program.write_text(GROWING)
    tight, shown, _ = dryrun(program, "--memory", "200MiB", code=1)
    assert [tight[name]["fits"] for name in ("native", "expandable", "stalloc")] == [False] * 3
    assert tight["native"]["needed_bytes"] == 220 << 20
    assert "next: stalloc fit --budget 200MiB" in shown
    assert "a smaller batch" in shown
    squeezed, _, _ = dryrun(program, "--memory", "220MiB")
    assert squeezed["native"]["fits"]
    assert squeezed["native"]["needed_bytes"] == 220 << 20


@pytest.mark.slow
def test_a_program_that_fails_by_itself_is_one_sentence(tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text(
        "import torch\ntry:\n    torch.ones(3, dtype=int, device='cuda') + torch.ones(4, dtype=int, device='cuda')\n"
        "except RuntimeError:\n    raise KeyError('mine')\n"
    )
    _, _, said = dryrun(program, code=2)
    assert "KeyError: 'mine'" in said
    assert "must match the size of tensor b" in said
    assert "stalloc/device" not in said, "what stands in for torch's functions is no part of the program's traceback"
    assert said.strip().splitlines()[-1].startswith("stalloc: the program failed with code 1 (native), not for lack")


UNSPLIT = """
import torch
held = []
for _ in range(8):
    first, second = (torch.empty(11 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    del first
    held += [torch.empty((11 << 20) - (600 << 10), dtype=torch.uint8, device="cuda"), second]
"""


@pytest.mark.slow
def test_what_stalloc_counts_as_allocated_is_what_pytorch_does_with_expandable_segments(tmp_path: Path) -> None:
    """With its defaults PyTorch counts what it does not split off, too."""
    program = tmp_path / "unsplit.py"
    program.write_text(UNSPLIT)
    result, _, _ = dryrun(program)
    allocated = {name: result[name]["allocated_peak_bytes"] for name in ("native", "expandable", "stalloc")}
    assert allocated["stalloc"] == allocated["expandable"] < allocated["native"]


UNKNOWN = {
    "cupy": "import cupy\nx = cupy.random.rand(99)\ncupy.histogram(x, bins=8)\n",
    "torch": "import torch\nx = torch.randn(9, device='cuda')\n[1, 2][x.argmax() - 9 if x.isfinite().any() else 0]\n",
    "number": "import math, torch\nx = torch.rand(9, device='cuda')\nsize = x.sum().item()\nmath.log(size)\n",
    "known": "import torch\nx = torch.rand(9, device='cuda')\nx.sum().item()\nopen('/nowhere/at/all')\n",
}


@pytest.mark.parametrize(
    "name", ["known", *(pytest.param(one, marks=pytest.mark.slow) for one in ("cupy", "torch", "number"))]
)
def test_the_line_whose_value_no_kernel_computed_is_named_where_a_program_fails(tmp_path: Path, name: str) -> None:
    program = tmp_path / "reads.py"
    program.write_text(UNKNOWN[name])
    _, _, said = dryrun(program, code=2)
    assert said.count("Traceback") == 1
    num_named = said.count(f"{program}:3 read a value that the virtual GPU does not compute")
    assert num_named == (name != "known")
    if num_named:
        assert f"stalloc dryrun --assume {program.parent.name}/reads.py:3=1." in said
        dryrun(program, "--assume", "reads.py:3=1")


@pytest.mark.slow
def test_a_transformer_completes_with_what_it_is_said_to_need(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text((Path(__file__).parents[1] / "examples" / "train_gpt.py").read_text(encoding="utf-8"))
    options = ["--steps", "3", "--batch", "1"]
    out = tmp_path / "result.json"
    stalloc = [sys.executable, "-m", "stalloc"]
    clean = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    dry = [*stalloc, "dryrun", "--headroom", "0", "--json", str(out), str(program), *options]
    subprocess.run(dry, check=True, env=clean, capture_output=True)
    result = json.loads(out.read_text(encoding="utf-8"))
    record = ["record", "--stacks", "-o", str(tmp_path / "run.trace.npz")]
    for name, verb, conf in (
        ("native", record, ""),
        ("expandable", record, "expandable_segments:True"),
        ("stalloc", ["run"], ""),
    ):
        spare_bytes = (4 << 20) * (name == "stalloc")  # its addresses decide about the last page or two
        for less_bytes, completes in ((-spare_bytes, True), (32 << 20, False)):
            memory = ["--device", "virtual", "--memory", f"{result[name]['needed_bytes'] - less_bytes}B"]
            variables = {**clean, "STALLOC_CACHE": "off"} | ({"PYTORCH_ALLOC_CONF": conf} if conf else {})
            done = subprocess.run(
                [*stalloc, *verb, *memory, str(program), *options], env=variables, capture_output=True, check=False
            )
            assert (done.returncode == 0) is completes, f"{name}, {less_bytes} bytes less: {done.stderr[-300:]!r}"
