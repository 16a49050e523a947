"""`stalloc top`: who holds memory at a moment, in lists and a tree that add up, and what grows from step to step."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import each, path_of

from stalloc.analysis import holders
from stalloc.cli import main
from stalloc.trace import load_traces

MIB = 1 << 20
ADDRESS = 0x7F00_0000_0000


def frames(*lines):
    return [{"filename": f"/home/me/{file}", "line": line, "name": name} for file, line, name in lines]


def write_leak(path: Path, steps: int = 8, leak_bytes: int = 32 * MIB, oom: bool = False) -> str:
    """A model, and steps that allocate and free activations and keep one block each."""
    history, place = [], ADDRESS
    model = frames(("model.py", 3, "__init__"), ("leak.py", 1, "<module>"))
    work = frames(("model.py", 7, "forward"), ("leak.py", 5, "step"), ("leak.py", 9, "<module>"))
    leak = frames(("leak.py", 6, "step"), ("leak.py", 9, "<module>"))

    live = {}

    def alloc(size, stack):
        nonlocal place
        place += 1 << 30
        live[place] = size
        history.append({"action": "segment_alloc", "addr": place, "size": size, "stream": 0, "frames": stack})
        history.append({"action": "alloc", "addr": place, "size": size, "stream": 0, "frames": stack})
        return place

    def free(address, size):
        del live[address]
        event = {"addr": address, "size": size, "stream": 0, "frames": []}
        history.extend({"action": action, **event} for action in ("free_requested", "free_completed", "segment_free"))

    alloc(100 * MIB, model)
    for _ in range(steps):
        blocks = [(alloc(size * MIB, work), size * MIB) for size in (128, 64, 32)]
        if leak_bytes:
            alloc(leak_bytes, leak)
        for block in blocks:
            free(*block)
    if oom:
        failed = {"action": "oom", "addr": 0, "size": 1 << 34, "stream": 0, "frames": leak, "device_free": MIB}
        history.append(failed)
    segments = [
        {
            "device": 0,
            "address": address,
            "total_size": size,
            "stream": 0,
            "blocks": [{"size": size, "requested_size": size, "state": "active_allocated"}],
        }
        for address, size in live.items()
    ]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [history]}))
    return str(path)


def top(capsys, *arguments):
    assert main(["top", *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)["devices"]


def test_a_leak_is_named_by_line_and_by_how_much_it_grows_a_step(tmp_path, capsys):
    file = write_leak(tmp_path / "leak.pickle")
    (device,) = top(capsys, file)
    (growth,) = device["growth"]
    assert (growth["name"], growth["bytes_per_step"]) == ("leak.py:6 step", 32 * MIB)
    assert main(["top", file]) == 0
    shown = capsys.readouterr().out
    assert "grows 32.00 MiB a step at leak.py:6 step" in shown
    assert shown.rstrip().endswith(f"Next: stalloc explain {file}")


def test_nothing_grows_where_steps_free_what_they_allocate(tmp_path, capsys):
    (device,) = top(capsys, write_leak(tmp_path / "level.pickle", leak_bytes=0))
    assert device["growth"] == []


NO_LEAK = (
    *("forward.pickle.gz", "optimizer_step.pickle.gz", "out_of_memory.pickle.gz", "training.pickle.gz"),
    *("llama3_8b_fsdp4_oom_rank0.pickle.gz", "lm_fwd_ctx200.pickle.gz", "resnet50_pytorch_blog.pickle.gz"),
)


@pytest.mark.parametrize("name", each(NO_LEAK, always=NO_LEAK))
def test_a_forward_pass_whose_layers_repeat_is_no_leak(capsys, name):
    (device,) = top(capsys, str(path_of(name)))
    assert device["growth"] == []


def test_a_mask_that_every_step_keeps_is_told(capsys):
    (device,) = top(capsys, str(path_of("leak.pickle.gz")))
    assert [(grows["bytes_per_step"], grows["name"]) for grows in device["growth"]] == [(4 << 20, "blocks.py:39 leak")]


@pytest.mark.parametrize("at", ["peak", "end", "5"])
def test_lists_and_tree_add_up_to_what_is_allocated(tmp_path, capsys, at):
    (device,) = top(capsys, write_leak(tmp_path / "leak.pickle"), "--at", at)
    for name in ("by_site", "by_class", "by_size"):
        assert sum(entry["held_bytes"] for entry in device[name]) == device["allocated_bytes"], name
        assert sum(entry["requests"] for entry in device[name]) == device["requests"], name
        amounts = [entry["held_bytes"] for entry in device[name]]
        assert amounts == sorted(amounts, reverse=True)

    def check(branch):
        if branch["children"]:
            assert sum(child["held_bytes"] for child in branch["children"]) <= branch["held_bytes"]
        for child in branch["children"]:
            check(child)

    assert device["tree"]["held_bytes"] == device["allocated_bytes"]
    check(device["tree"])


def test_the_moment_is_the_error_where_there_is_one(tmp_path, capsys):
    file = write_leak(tmp_path / "oom.pickle", oom=True)
    (device,) = top(capsys, file)
    assert (device["at"], device["wanted_bytes"], device["wanted_by"]) == ("oom", 1 << 34, "leak.py:6 step")
    assert top(capsys, file, "--at", "peak")[0]["at"] == "peak"
    assert main(["top", file]) == 0
    shown = capsys.readouterr().out
    assert "at the out-of-memory error" in shown
    assert "16.00 GiB more was requested by leak.py:6 step" in shown
    assert "└ " in shown


def test_moments_that_are_not_there_are_one_sentence(tmp_path, capsys):
    file = write_leak(tmp_path / "leak.pickle")
    for at in ("oom", "never", "100000"):
        assert main(["top", file, "--at", at]) == 2
        assert capsys.readouterr().err.count("\n") == 1


ADD_UP = (
    *("out_of_memory.pickle.gz", "fragmented.pickle.gz", "step.pickle.gz"),
    *("llama3_8b_fsdp4_oom_rank0.pickle.gz", "octree_nca_train.pickle.gz", "lm_step_steady.pickle.gz"),
)


@pytest.mark.parametrize("name", each(ADD_UP))
def test_real_snapshots_add_up(name):
    (trace,) = load_traces(path_of(name))
    made = holders(trace, "peak")
    assert made.allocated_bytes > 0
    for found in (made.by_site, made.by_class, made.by_size):
        assert sum(entry.held_bytes for entry in found) == made.allocated_bytes
    assert made.tree.held_bytes == made.allocated_bytes
    assert made.has_sites


def test_a_trace_without_call_sites_says_how_to_get_them(tmp_path, capsys):
    (tmp_path / "p.csv").write_text("id,lower,upper,size\n0,0,9,1000000\n1,3,5,2000000\n")
    assert main(["top", str(tmp_path / "p.csv")]) == 0
    shown = capsys.readouterr().out
    assert "`stalloc record` records them" in shown
    assert "by size" in shown


@pytest.mark.slow
def test_a_recording_with_stacks_names_the_lines_of_the_program_and_what_grows(tmp_path, capsys, cuda_torch):
    program, file = tmp_path / "program.py", tmp_path / "run.trace.npz"
    program.write_text(
        "import torch\n"
        "convolution = torch.nn.Conv2d(3, 8, 3, device='cuda')\n"
        "optimizer = torch.optim.SGD(convolution.parameters())\n"
        "kept = []\n"
        "for _ in range(8):\n"
        "    made = convolution(torch.ones(4, 3, 128, 128, device='cuda'))\n"
        "    made.sum().backward()\n"
        "    optimizer.step()\n"
        "    kept.append(made)\n"
        "torch.empty(1 << 33, dtype=torch.uint8, device='cuda')\n"
    )
    options = ["--device", "virtual", "--memory", "1GiB", str(program)]
    command = [sys.executable, "-m", "stalloc", "record", "--stacks", "-o", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "OutOfMemoryError" in done.stderr, done.stderr
    assert "8 steps" in done.stdout
    (device,) = top(capsys, str(file))
    assert device["by_site"][0]["name"] == "program.py:6 <module>"
    assert not [entry for entry in device["by_site"] if "redispatch" in entry["name"]], "no frame of stalloc's own"
    assert (device["wanted_bytes"], device["wanted_by"]) == (1 << 33, "program.py:10 <module>")
    (grows,) = device["growth"]
    assert grows["name"] == "program.py:6 <module>"
    assert grows["bytes_per_step"] >= 4 * 8 * 126 * 126 * 4
