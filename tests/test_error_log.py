"""`stalloc explain error.log`: what PyTorch's out-of-memory texts say, in the wordings of its versions."""

import json

import pytest

from stalloc.cli import main

MIB, GIB = 1 << 20, 1 << 30
SINCE_2_1 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 39.39 "
    "GiB of which 3.75 GiB is free. Including non-PyTorch memory, this process has 35.63 GiB memory in use. Of the "
    "allocated memory 33.74 GiB is allocated by PyTorch, and 806.58 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation."
)
AT_2_1 = SINCE_2_1.replace("capacity", "capacty")
OTHERS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.19 MiB is "
    "free. Process 4711 has 60.00 GiB memory in use. Including non-PyTorch memory, this process has 19.14 GiB "
    "memory in use. Of the allocated memory 18.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private "
    "pools (e.g., CUDA Graphs), and 100.00 MiB is reserved by PyTorch but unallocated."
)
LIMITED = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 70.00 GiB is "
    "free. 8.00 GiB allowed; Including non-PyTorch memory, this process has 8.30 GiB memory in use. Of the "
    "allocated memory 7.50 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
)
UNTIL_2_0 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 14.76 GiB total capacity; 11.54 GiB "
    "already allocated; 1.69 GiB free; 11.88 GiB reserved in total by PyTorch) If reserved memory is >> allocated "
    "memory try setting max_split_size_mb to avoid fragmentation."
)
AT_1_0 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 2; 7.93 GiB total capacity; 7.30 GiB "
    "already allocated; 9.56 MiB free; 14.44 MiB cached)"
)
HIP = SINCE_2_1.replace("CUDA out of memory", "HIP out of memory")
CUPY = (
    "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,000,000,000 bytes (allocated so far: 512 bytes, "
    "limit set to: 1,000,000 bytes)."
)
STALLOC = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 400.00 MiB (419430400 bytes) at train.py:5 main. "
    "stalloc: out of memory on device 0 (NVIDIA H100 (SXM), 80.00 GiB, limited to 512.00 MiB). Allocated 225.00 MiB, "
    "reserved 450.00 MiB (1.50 MiB of it the plan's arena). Free: 62.00 MiB on the device, 225.00 MiB in 150 pieces of "
    "what is reserved, the largest 1.50 MiB: 113.00 MiB too little, whatever the allocator does."
)


def explained(tmp_path, capsys, text):
    file = tmp_path / "error.log"
    file.write_text(text)
    assert main(["explain", str(file), "--json", "-"]) == 0
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert main(["explain", str(file)]) == 0
    return errors, capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "figures", "verdict"),
    [
        (SINCE_2_1, (0, 3.91, 39.39, 3.75, 33.74, 33.74 + 806.58 / 1024), "fragmentation"),
        (AT_2_1, (0, 3.91, 39.39, 3.75, 33.74, 33.74 + 806.58 / 1024), "fragmentation"),
        (HIP, (0, 3.91, 39.39, 3.75, 33.74, 33.74 + 806.58 / 1024), "fragmentation"),
        (OTHERS, (1, 2.0, 79.15, 1.19 / 1024, 18.0, 18.0 + 100 / 1024), "capacity"),
        (LIMITED, (0, 1.0, 79.15, 70.0, 7.5, 7.5 + 300 / 1024), "limit"),
        (UNTIL_2_0, (0, 2.0, 14.76, 1.69, 11.54, 11.88), "fragmentation"),
    ],
)
def test_the_figures_of_each_wording_and_what_follows(tmp_path, capsys, text, figures, verdict):
    (error,), shown = explained(tmp_path, capsys, f"[rank0]: Traceback\n{text}\n")
    names = ("wanted_bytes", "total_bytes", "free_bytes", "allocated_bytes", "reserved_bytes")
    assert error["device"] == figures[0]
    for name, value in zip(names, figures[1:], strict=True):
        assert error[name] == pytest.approx(value * GIB, abs=2)
    assert error["verdict"] == verdict
    assert f"The cause is {'the ' * (verdict == 'limit')}{verdict}" in shown
    for part in ("stalloc dryrun SCRIPT", "stalloc record --stacks", "stalloc top run.trace.npz"):
        assert part in shown


def test_texts_wrapped_by_a_logger_are_read(tmp_path, capsys):
    (error,), _ = explained(
        tmp_path, capsys, OTHERS.replace(" Including", "\n    Including").replace("is free", "is\nfree")
    )
    assert error["process_bytes"] == pytest.approx(19.14 * GIB, abs=2)
    assert error["private_bytes"] == GIB


def test_what_other_processes_hold_is_said(tmp_path, capsys):
    (error,), shown = explained(tmp_path, capsys, OTHERS)
    assert error["others_bytes"] == pytest.approx(60.0 * GIB, rel=0.01)
    assert "nvidia-smi" in shown
    _, shown = explained(tmp_path, capsys, SINCE_2_1)
    assert "nvidia-smi" not in shown


def test_old_and_other_texts_say_what_they_can(tmp_path, capsys):
    (error,), _ = explained(tmp_path, capsys, AT_1_0)
    assert (error["device"], error["wanted_bytes"]) == (2, 20 * MIB)
    assert error["unallocated_bytes"] == pytest.approx(14.44 * MIB, abs=2), "cached is not what is allocated"
    parts = [error[name] for name in ("allocated_bytes", "unallocated_bytes", "others_bytes", "free_bytes")]
    assert sum(parts) == error["total_bytes"]
    assert error["verdict"] == "fragmentation"
    (error,), shown = explained(tmp_path, capsys, CUPY)
    assert (error["library"], error["wanted_bytes"], error["verdict"]) == ("CuPy", 8_000_000_000, "limit")
    assert "CUPY_GPU_MEMORY_LIMIT" in shown


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cupy_backends.cuda.api.driver.CUDADriverError: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ],
)
def test_an_error_of_cuda_itself_has_no_figures(tmp_path, capsys, text):
    (error,), shown = explained(tmp_path, capsys, text)
    assert (error["library"], error["wanted_bytes"], error["verdict"]) == ("CUDA", None, "unknown")
    assert ": out of memory in CUDA\n" in shown
    assert "nvidia-smi" in shown
    (error,), _ = explained(tmp_path, capsys, f"{SINCE_2_1}\n{text}")
    assert error["library"] == "PyTorch", "what has figures says more"


def test_ranks_that_fail_alike_are_told_once(tmp_path, capsys):
    errors, shown = explained(tmp_path, capsys, f"{SINCE_2_1}\n{UNTIL_2_0}\n{SINCE_2_1}\n")
    assert [error["times"] for error in errors] == [2, 1]
    assert "wanted, 2 times" in shown


@pytest.mark.parametrize(("raised", "times"), [(0, 2), (1, 2), (3, 3)])
def test_what_rmm_logs_before_it_raises_is_one_error(tmp_path, capsys, raised, times):
    why = "Not enough room to grow, current/max/try size = 7.000000 GiB, 8.000000 GiB, 2.000000 GiB"
    logged = f"[error ] [A][Stream 0x1][Upstream 1024B][FAILURE maximum pool size exceeded: {why}]\n"
    error = f"MemoryError: std::bad_alloc: out_of_memory: RMM failure at: x.hpp:73: Maximum pool size exceeded: {why}\n"
    (found,), _ = explained(tmp_path, capsys, logged * 2 + error * raised)
    assert (found["times"], found["wanted_bytes"]) == (times, 2 * GIB)


@pytest.mark.parametrize("verb", ["stats", "top", "timeline", "plan", "simulate", "report", "diff"])
@pytest.mark.parametrize("text", [CUPY, json.dumps({"log": SINCE_2_1, "stream": "stderr"})], ids=["plain", "json"])
def test_a_verb_of_traces_says_who_reads_the_text_of_an_error(tmp_path, capsys, monkeypatch, verb, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "error.log").write_text(text)
    words = {"report": ["-o", "page.html"], "diff": ["error.log"]}.get(verb, [])
    assert main([verb, "error.log", *words]) == 2
    assert capsys.readouterr().err == (
        "stalloc: error.log: the text of an out-of-memory error, and not a trace: stalloc explain error.log reads it.\n"
    )


@pytest.mark.parametrize(
    "around", [(b"\0" * 9000, b""), (b"epoch 1\n" + b"\0" * 100, b""), (b"", b"\0" * 20 + b"done\n")]
)
def test_a_log_with_a_hole_of_zeros_is_read(tmp_path, capsys, around):
    """Such as one that logrotate emptied while a program went on to write to it."""
    file = tmp_path / "error.log"
    before, after = around
    file.write_bytes(before + OTHERS.encode() + b"\n" + after)
    assert main(["explain", str(file)]) == 0
    assert "device 1: out of memory in PyTorch, 2.00 GiB wanted" in capsys.readouterr().out


def ranks(tmp_path, num_ranks):
    """A log of ranks that fail with different figures."""
    file = tmp_path / "ranks.log"
    texts = [
        OTHERS.replace("GPU 1", f"GPU {rank}").replace("2.00 GiB", f"{rank + 2}.00 GiB") for rank in range(num_ranks)
    ]
    file.write_text("".join(f"[rank{rank}]: {text}\n" for rank, text in enumerate(texts)))
    return str(file)


def test_errors_that_are_not_shown_are_counted(tmp_path, capsys):
    file = ranks(tmp_path, 8)
    assert main(["explain", file]) == 0
    shown = capsys.readouterr().out
    assert shown.count("out of memory in PyTorch") == 5
    assert "3 earlier errors not shown; --top 8 shows all." in shown
    assert main(["explain", file, "--top", "8"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("out of memory in PyTorch") == 8
    assert "not shown" not in shown


def test_errors_of_one_device_are_chosen(tmp_path, capsys):
    file = ranks(tmp_path, 3)
    assert main(["explain", file, "--device", "2", "--json", "-"]) == 0
    assert [error["device"] for error in json.loads(capsys.readouterr().out)["errors"]] == [2]
    assert main(["explain", file, "--device", "3"]) == 2
    assert "no out-of-memory error of device 3: leave --device out" in capsys.readouterr().err


def test_a_log_without_an_error_is_no_log_of_one(tmp_path, capsys):
    (tmp_path / "other.log").write_text("everything went well\n")
    assert main(["explain", str(tmp_path / "other.log")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_of_this_pytorch_is_understood(tmp_path, capsys, run_program, cuda_torch):
    """The text that the installed version writes, not one that was copied here."""
    done = run_program(
        "from stalloc.device import activate; activate('virtual'); import torch\n"
        "kept = torch.empty(60 << 30, dtype=torch.uint8, device='cuda')\n"
        "try:\n    torch.empty(100 << 30, dtype=torch.uint8, device='cuda')\n"
        "except torch.OutOfMemoryError as error:\n    print(error)\n"
    )
    (error,), _ = explained(tmp_path, capsys, done.stdout)
    assert (error["device"], error["wanted_bytes"], error["allocated_bytes"]) == (0, 100 * GIB, 60 * GIB)
    assert error["verdict"] == "capacity"
    assert None not in (error["total_bytes"], error["free_bytes"], error["reserved_bytes"])


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_advice_has_the_variable_that_the_text_names(tmp_path, capsys, variable):
    (tmp_path / "error.log").write_text(SINCE_2_1.replace("PYTORCH_CUDA_ALLOC_CONF", variable))
    assert main(["explain", str(tmp_path / "error.log")]) == 0
    assert f"Try {variable}=expandable_segments:True, which" in capsys.readouterr().out


def test_what_stalloc_itself_says_is_read(tmp_path, capsys):
    errors, text = explained(tmp_path, capsys, STALLOC)
    assert [(one["library"], one["device"], one["verdict"]) for one in errors] == [("stalloc", 0, "capacity")]
    names = ("wanted", "limit", "allocated", "reserved", "free")
    assert [errors[0][f"{name}_bytes"] / MIB for name in names] == [400, 512, 225, 450, 62]
    assert "287.00 MiB was free in total, 113.00 MiB too little" in text
    _, text = explained(tmp_path, capsys, STALLOC.replace("400.00 MiB", "200.00 MiB"))
    assert "parts of pages" in text
    assert "expandable_segments" not in text
