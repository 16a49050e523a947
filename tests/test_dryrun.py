"""`stalloc dryrun`: what a program needs, apart from what a caching allocator takes where there is plenty."""

import json
import os
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


def dryrun(program: Path, *options: str, code: int = 0) -> tuple[dict[str, Any], str, str]:
    """The JSON object, and what was printed on both streams."""
    out = program.with_name("result.json")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = run_stalloc("dryrun", "--json", out, "--headroom", "0", *options, program, variables=variables)
    assert done.returncode == code, done.stderr
    return json.loads(out.read_text()) if out.exists() else {}, done.stdout, done.stderr


def test_what_is_needed_is_less_than_what_a_cache_takes_of_plenty_and_does(tmp_path: Path) -> None:
    program = tmp_path / "growing.py"
    program.write_text(GROWING)
    result, shown, said = dryrun(program)
    native = result["native"]
    assert native["taken_bytes"] == (100 + 150 + 220) << 20
    assert native["needed_bytes"] == native["allocated_peak_bytes"] == 220 << 20
    assert [result[name]["needed_by"] for name in ("native", "expandable", "stalloc")] == ["replay"] * 3
    assert all(result[name]["fits"] for name in ("native", "expandable", "stalloc"))
    for figure in ("470.00 MiB", "220.00 MiB"):
        assert figure in shown
    assert "running the program under " in said, "it is not silent, off a terminal neither"
    tight, shown, _ = dryrun(program, "--memory", "200MiB", code=1)
    assert [tight[name]["fits"] for name in ("native", "expandable", "stalloc")] == [False] * 3
    assert tight["native"]["needed_bytes"] == native["needed_bytes"]
    assert "a smaller batch" in shown


@pytest.mark.slow
def test_a_device_of_what_is_needed_is_large_enough(tmp_path: Path) -> None:
    program = tmp_path / "growing.py"
    program.write_text(GROWING)
    squeezed, _, _ = dryrun(program, "--memory", "220MiB")
    assert squeezed["native"]["fits"]
    assert squeezed["native"]["needed_bytes"] == 220 << 20


def test_a_program_that_fails_by_itself_is_one_sentence(tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text("import torch\ntorch.empty(1, device='cuda')\nraise KeyError('mine')\n")
    _, _, said = dryrun(program, code=2)
    assert "KeyError: 'mine'" in said
    assert said.strip().splitlines()[-1].startswith("stalloc: the program failed with code 1 (native), not for lack")
