"""Libraries that a dry run has imported before a program runs are imported by the program as if they were not."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc

pytestmark = pytest.mark.usefixtures("cupy_installed", "cuda_torch")

ASIDE = """
import importlib.util, json, os, sys
from stalloc import device
from stalloc.imports import after_import
from stalloc.sizing.imported_before import put_aside
device.activate("virtual")
import torch, torch.distributed.distributed_c10d, cupy
before, own = dict(sys.modules), torch.__spec__
told, seen = [], {}
put_aside(told.append)
of = ("torch", "functorch", "cupy", "cupyx", "cupy_backends")
seen["left"] = [name for name in sys.modules if name.partition(".")[0] in of]
seen["found"] = importlib.util.find_spec("torch").origin == own.origin and "torch" not in sys.modules
hooks = []
for name in ("torch", "torch.distributed.distributed_c10d", "cupy"):
    after_import(name, lambda name=name: hooks.append(name))
"""


@pytest.fixture
def checks(run_checks: Callable[..., dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """What a program says of libraries that are put aside."""
    end = """
seen["same"] = all(before[name] is module for name, module in sys.modules.items() if name in before)
seen["spec"] = torch.__spec__ is own and torch.__spec__.loader is own.loader
print(json.dumps(seen | {"hooks": sorted(hooks), "told": told, "cupy": "cupy" in sys.modules}))
"""
    return lambda program: run_checks(ASIDE + program + end)


def test_all_of_a_library_is_there_once_any_of_it_is_imported(checks: Callable[[str], dict[str, Any]]) -> None:
    told = checks("import functorch.dim, torch.nn.functional\n")
    assert told["left"] == []
    assert told["found"]
    assert told["same"]
    assert told["spec"]
    assert told["hooks"] == ["torch", "torch.distributed.distributed_c10d"]
    assert not told["cupy"]
    assert told["told"] == []


def test_variables_that_were_read_by_then_are_told_if_they_have_changed(
    checks: Callable[[str], dict[str, Any]],
) -> None:
    settings = """
os.environ |= {"TORCH_BLAS_PREFER_CUBLASLT": "1", "CUPY_ACCELERATORS": "", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch
os.environ["TORCH_BLAS_PREFER_CUBLASLT"] = "2"
import cupyx
"""
    told = checks(settings)
    assert told["told"] == [{"TORCH_BLAS_PREFER_CUBLASLT": "1"}, {"CUPY_ACCELERATORS": ""}]
    assert told["hooks"] == ["cupy", "torch", "torch.distributed.distributed_c10d"]
    told = checks("os.environ['PYTORCH_ALLOC_CONF'] = 'backend:cudaMallocAsync'\nimport torch\n")
    assert told["told"] == [{"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}]


MULTIPLIES = """
import torch
layer = torch.nn.Linear(256, 256, device="cuda")
layer(torch.ones(64, 256, device="cuda", requires_grad=True)).sum().backward()
"""
STREAMS = """
import threading, cupy
kept = [cupy.ones(1 << 20)]
def another():
    kept.append(cupy.ones(1 << 20) + 1)
del kept[:]
thread = threading.Thread(target=another)
thread.start(), thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "source"),
    [
        ("TORCH_BLAS_PREFER_CUBLASLT", "1", MULTIPLIES),
        ("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "1", STREAMS),
    ],
)
def test_what_a_program_sets_before_its_imports_counts(tmp_path: Path, variable: str, value: str, source: str) -> None:
    program, out = tmp_path / "program.py", tmp_path / "result.json"
    program.write_text(source, encoding="utf-8")
    words = ("dryrun", "--gpu", "H100", "--json", out, program)

    def taken(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        assert done.returncode == 0, done.stderr
        return dict(json.loads(out.read_text(encoding="utf-8"))["native"])

    without = taken(run_stalloc(*words))
    fresh = [sys.executable, "-m", "stalloc", *map(str, words)]
    with_it = os.environ | {variable: value}
    given = taken(subprocess.run(fresh, env=with_it, capture_output=True, text=True, check=False))
    assert given != without
    program.write_text(f"import os\nos.environ[{variable!r}] = {value!r}\n{source}", encoding="utf-8")
    assert taken(run_stalloc(*words)) == given
