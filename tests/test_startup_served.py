"""What the hook prepares is served, whichever library comes first, and what fails later costs a sentence."""

import os
import subprocess
from pathlib import Path

import pytest
from warm_programs import run_warm

HOOKED = "from stalloc.integrations.startup import arm; arm()\n"  #: what the hook does at the start of a Python


def served(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that the hook has prepared, on the virtual GPU, without the start of a Python."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STALLOC")}
    ours = {"STALLOC": "1", "STALLOC_DEVICE": "virtual", "STALLOC_CACHE": "off"}
    done = run_warm(f"{HOOKED}{source}", variables={**clean, **ours, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_torch_is_served_from_its_first_use_of_cuda_and_settings_are_reported() -> None:
    source = """
import os, torch, stalloc.integrations.installing as installing
before = installing.current()
torch.cuda.is_available(), torch.cuda.device_count()
assert installing.current() is before is None
x = torch.empty(1 << 20, device="cuda")
state = installing.current().controllers[0].state
print(state.record.total.num_live, torch.cuda.memory_allocated(), os.environ["PYTORCH_CUDA_ALLOC_CONF"])
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("limited")
"""
    settings = "expandable_segments:True,per_process_memory_fraction:0.01,pinned_use_background_threads:True"
    done = served(source, STALLOC_DEVICE="virtual:24GiB", PYTORCH_CUDA_ALLOC_CONF=settings)
    assert done.stdout.splitlines() == [f"1 {4 << 20} {settings}", "limited"]
    [sentence] = done.stderr.splitlines()
    assert "pinned_use_background_threads, per_process_memory_fraction in force" in sentence
    assert "expandable_segments without effect" in sentence


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
@pytest.mark.parametrize("order", ["torch, cupy", "cupy, torch"])
def test_both_libraries_are_served_whichever_comes_first(order: str) -> None:
    source = f"""
import {order}
import stalloc.integrations.installing as installing
x = {"torch.ones(1000, device='cuda')" if order.startswith("cupy") else "cupy.ones(1000)"}
y = {"cupy.ones(1000)" if order.startswith("cupy") else "torch.ones(1000, device='cuda')"}
print(installing.current().controllers[0].state.record.total.num_live, torch.cuda.memory_allocated())
"""
    done = served(source)
    assert done.stdout == f"2 {4096 + 8192}\n"
    assert done.stderr == ""


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_a_history_asked_for_first_of_all_is_stallocs() -> None:
    source = """
import torch
torch.cuda.memory._record_memory_history()
x = torch.ones(1000, device="cuda")
print(torch.cuda.memory.get_allocator_backend(), len(torch.cuda.memory._snapshot()["device_traces"][0]) > 0)
"""
    done = served(source)
    assert done.stdout == "pluggable True\n", done.stderr


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_torch_is_served_though_memory_is_pinned_before_cuda_is_used() -> None:
    source = """
import torch
batch = torch.ones(1000).pin_memory()
x = batch.to("cuda", non_blocking=True)
print(torch.cuda.memory.get_allocator_backend(), batch.is_pinned(), "pin_memory" in vars(torch.Tensor))
"""
    done = served(source)
    assert (done.stdout, done.stderr) == ("pluggable True False\n", "")


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_memory_that_is_made_pinned_before_cuda_is_used_costs_a_sentence() -> None:
    """PyTorch initialises its allocator for it in C++, where nobody is told."""
    source = """
import torch
batch = torch.ones(1000, pin_memory=True)
x = batch.to("cuda", non_blocking=True)
print(torch.cuda.memory.get_allocator_backend())
"""
    done = served(source)
    assert done.stdout == "native\n"
    [sentence] = done.stderr.splitlines()
    assert "call torch.cuda.init() before" in sentence
    assert sentence.endswith("The program goes on without stalloc.")


@pytest.mark.usefixtures("cupy_installed")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"STALLOC_REPORT": "/dev/null/x"}, "cannot write /dev/null/x: Not a directory: name another file"),
        ({"STALLOC_REPORT": "\n" * 300}, "File name too long: name another file in STALLOC_REPORT."),
        (
            {"STALLOC_CACHE": "\udcff" * 300},
            "File name too long: name another folder in STALLOC_CACHE, or set it to off.",
        ),
        ({"STALLOC_DEVICE": "virtual:64x4EiB"}, "'4EiB' is not an amount of memory"),
        (
            {"STALLOC_DEVICE": "virtual:64x4194303TiB", "STALLOC_REPORT": "/dev/full"},
            "cannot write /dev/full: No space",
        ),
        ({"CC": "no-such-compiler", "XDG_CACHE_HOME": "{empty}"}, "CC=no-such-compiler is not there"),
    ],
)
def test_what_fails_later_costs_a_sentence_each_and_never_the_program(
    tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import cupy\ntry:\n    cupy.ones(1)\nexcept Exception:\n    print('no GPU')\nprint('the end')")
    run = f"import runpy, sys; sys.argv = [{str(program)!r}]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = served(run, **{name: value.format(empty=tmp_path) for name, value in variables.items()})
    assert done.stdout.endswith("the end\n")
    lines = done.stderr.splitlines()
    assert any(said in line for line in lines), done.stderr
    assert all(line.startswith("stalloc: ") and line.isprintable() for line in lines), done.stderr
    assert len(lines) <= 2
