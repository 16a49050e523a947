"""What `stalloc explain` concludes from an error: the cause, what to do in that release, and from which containers."""
# ruff: noqa: E501
# the texts stand in one line, as libraries write them

import bz2
import gzip
import json
import lzma

import pytest
from test_error_wordings import GIB, explained, new, old

from stalloc.analysis.error_search import find_errors
from stalloc.cli import main


def test_zero_bytes_of_this_process_are_unknown(tmp_path, capsys):
    (error,), shown = explained(tmp_path, capsys, new(p="0 bytes", w="7.00 GiB"))
    assert error["others_bytes"] == pytest.approx((24 - 1 - 21.75) * GIB, abs=2)
    assert error["outside_bytes"] is None
    assert "by other processes" not in shown


@pytest.mark.parametrize("process", ["40.00 GiB", "1.00 GiB", "17179869184.00 GiB"])
def test_what_this_process_cannot_have_is_unknown(tmp_path, capsys, process):
    (error,), _ = explained(tmp_path, capsys, new(p=process))
    assert (error["outside_bytes"], error["others_bytes"]) == (None, pytest.approx(1.25 * GIB, abs=2))


def test_a_request_that_the_device_had_room_for_is_not_for_the_allocator(tmp_path, capsys):
    (error,), shown = explained(tmp_path, capsys, new(f="9.00 GiB", a="10.00 GiB"))
    assert error["verdict"] == "outside"
    assert "outside of the allocator" in shown
    assert "expandable_segments" not in shown


@pytest.mark.parametrize(("wanted", "verdict"), [("3.00 GiB", "unknown"), ("3.01 GiB", "capacity")])
def test_capacity_is_named_where_even_all_that_is_not_allocated_is_too_little(tmp_path, capsys, wanted, verdict):
    text = old(w=wanted, a="21.00 GiB", r="21.00 GiB").replace("1.00 GiB free; ", "")
    (error,), _ = explained(tmp_path, capsys, text)
    assert (error["free_bytes"], error["reserved_bytes"], error["verdict"]) == (None, 21 * GIB, verdict)


@pytest.mark.parametrize("changes", [{"f": "30.00 GiB"}, {"a": "31.00 GiB", "f": "0 bytes"}, {"f": "9.00 GiB"}])
def test_figures_that_contradict_each_other_have_no_cause(tmp_path, capsys, changes):
    (error,), shown = explained(tmp_path, capsys, new(**changes))
    assert error["verdict"] == "contradiction"
    assert "contradict each other" in shown
    assert "The cause" not in shown


FITS = {"w": "3.00 GiB", "f": "1.00 GiB"}
CACHED = old(**FITS).replace("21.75 GiB reserved in total by PyTorch", "2.75 GiB cached")
HINT = " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."


@pytest.mark.parametrize(
    ("text", "advised", "never"),
    [
        (new(), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", " PYTORCH_ALLOC_CONF"),
        (new() + " try setting PYTORCH_ALLOC_CONF=", " PYTORCH_ALLOC_CONF=expandable_segments:True", "CUDA_ALLOC"),
        (new("HIP"), "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True", "CUDA_ALLOC"),
        (old() + HINT, "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", "expandable_segments:True"),
        (old(), "max_split_size_mb:128 (it is there from 1.10 on)", "expandable_segments:True"),
        (CACHED, "PyTorch 2.1 or later", "ALLOC_CONF"),
        (old("NPU", "NPU") + HINT, "PYTORCH_NPU_ALLOC_CONF=max_split_size_mb:128", "CUDA_ALLOC"),
        (new("XPU"), "torch.xpu.empty_cache()", "ALLOC_CONF"),
    ],
)
def test_a_setting_is_advised_where_it_exists(tmp_path, capsys, text, advised, never):
    (error,), shown = explained(tmp_path, capsys, text)
    assert error["verdict"] == "fragmentation"
    assert advised in shown
    assert never not in shown


def test_a_text_without_free_bounds_it(tmp_path, capsys):
    text = new("XPU", w="4.10 GiB").replace(" of which 1.00 GiB is free", "")
    text = text.replace("Including non-PyTorch memory, this process has 22.50 GiB memory in use. ", "")
    (error,), shown = explained(tmp_path, capsys, text)
    assert error["verdict"] == "unknown"
    assert "how much was free" in shown
    (error,), shown = explained(tmp_path, capsys, text.replace("4.10 GiB", "6.00 GiB"))
    assert error["verdict"] == "capacity", "5.00 GiB are all that is not allocated"
    assert "at most 5.00 GiB" in shown


@pytest.mark.parametrize("text", [new(), old()])
def test_a_text_that_is_cut_off_anywhere_has_no_wrong_figure(tmp_path, capsys, text):
    """Before its unit a size is none, and what was wanted is not the bytes of a number alone."""
    known = {3 * GIB, 24 * GIB, GIB, 19 * GIB, round(22.5 * GIB), round(21.75 * GIB), None}
    for length in range(len("torch.OutOfMemoryError: CUDA out of memory"), len(text), 3):
        for error in find_errors(text[:length]):
            figures = (error.wanted_bytes, error.total_bytes, error.free_bytes, error.allocated_bytes)
            assert {*figures, error.reserved_bytes, error.process_bytes} <= known, text[:length]


def test_a_text_that_is_cut_off_says_what_is_missing(tmp_path, capsys):
    _, shown = explained(tmp_path, capsys, new().partition(" Including")[0])
    assert "how much the allocator holds" in shown
    assert "how much was free" not in shown


def test_what_cupy_has_allocated_is_what_its_pool_holds(tmp_path, capsys):
    text = (
        "Out of memory allocating 1,073,741,824 bytes (allocated so far: 3,221,225,472 bytes, limit set to: {} bytes)."
    )
    (error,), shown = explained(tmp_path, capsys, text.format("4,000,000,000"))
    assert (error["reserved_bytes"], error["allocated_bytes"], error["verdict"]) == (3 * GIB, None, "limit")
    assert "by the pool of CuPy" in shown
    (error,), shown = explained(tmp_path, capsys, text.format("8,000,000,000"))
    assert "The limit is not the cause" in shown
    text = "out of memory to allocate 1073741824 bytes (total 4294967296 bytes)"
    (error,), _ = explained(tmp_path, capsys, text)
    assert error["reserved_bytes"] == 3 * GIB, "before 7 the total has the request in it"


def test_what_a_limit_leaves_is_as_exact_as_it_is_written(tmp_path, capsys):
    """1.05 GiB may be 5 MiB less: that 1,072 of 1,075.2 MiB are held leaves 2 MiB is not certain."""
    text = new(
        "HIP", w="2.00 MiB", t="255.00 GiB", f="240.00 GiB. 1.05 GiB allowed; It", a="1017.00 MiB", r="55.00 MiB"
    )
    text = text.replace("Including non-PyTorch memory, this process has 22.50 GiB memory in use. ", "")
    (error,), shown = explained(
        tmp_path, capsys, text.replace("It is free", "").replace("240.00 GiB.", "240.00 GiB is free.")
    )
    assert (error["free_bytes"], error["limit_bytes"]) == (240 * GIB, round(1.05 * GIB))
    assert error["verdict"] == "fragmentation"
    assert "within the limit of 1.05 GiB" in shown
    assert "240.00 GiB was free on the device" in shown


def test_the_last_pages_of_a_device_are_not_one_piece(tmp_path, capsys):
    """So little is free that the driver may have no piece of it: most is in the allocator."""
    (error,), _ = explained(tmp_path, capsys, new(w="1.12 MiB", f="3.56 MiB", a="21.00 GiB", r="787.74 MiB"))
    assert error["verdict"] == "fragmentation"
    (error,), _ = explained(tmp_path, capsys, new(w="1.12 MiB", f="3.56 MiB", a="21.90 GiB", r="0.50 MiB"))
    assert error["verdict"] == "outside"


@pytest.mark.parametrize(("wanted", "limit"), [("500.00 MB", True), ("600.00 MB", False)])
def test_mps_takes_a_heap_for_a_request(tmp_path, capsys, wanted, limit):
    text = (
        "MPS backend out of memory (MPS allocated: 7.00 GB, other allocations: 1.00 GB, max allowed: 8.80 GB). Tried to"
    )
    (error,), shown = explained(tmp_path, capsys, f"{text} allocate {wanted} on private pool.")
    assert (error["verdict"] == "limit") is limit
    assert ("a heap of 1.00 GiB" in shown) is limit


@pytest.mark.parametrize(
    "text",
    ["CUDA out of memory. Tried to allocate more than 1EB memory.", "requested buffer of size 4585490524328388608"],
)
def test_a_size_that_no_device_has_is_the_cause(tmp_path, capsys, text):
    (error,), shown = explained(tmp_path, capsys, text.replace("requested", "Failed to allocate memory for requested"))
    assert error["verdict"] == "size"
    assert "the size itself is wrong" in shown


def test_on_windows_a_setting_that_does_nothing_is_not_advised(tmp_path, capsys):
    _, shown = explained(tmp_path, capsys, f'  File "C:\\Users\\me\\train.py", line 3\n{new()}')
    assert "max_split_size_mb:128" in shown
    assert "expandable_segments:True" not in shown


@pytest.mark.parametrize(
    ("text", "advised", "never"),
    [
        ("Capture cuda graph failed: CUDA error: out of memory\n1. set --mem-fraction-static to a smaller value", "lower --mem-fraction-static", "raise --mem"),
        ("Free memory on device (5.00/24.00 GiB) on startup is less than desired GPU memory utilization (0.9, 21.60 GiB)", "lower gpu_memory_utilization", "raise it"),
        ("Available memory of 234881024 is smaller than requested bytes of 1073741824", "gpu_mem_limit", "on the device"),
        ("CUDA Error: out of memory", "The driver had no room", "not for a tensor"),
        ("cuda runtime error (2) : out of memory at /THC/THCStorage.cu:58", "PyTorch 0.4 or earlier", "not for a tensor"),
        ("unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)", "ulimit -n", "/dev/shm"),
        ("XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 13.00 GiB is free. 5.00 GiB allowed; Of the allocated memory 2.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.", "torch.xpu.set_per_process", "torch.cuda"),
        (new(w="6.00 GiB", p="20.00 GiB", a="17.00 GiB"), "or the driver use 3.00 GiB", "Other processes use"),
    ],
)  # fmt: skip
def test_what_is_advised_is_of_that_library_and_moment(tmp_path, capsys, text, advised, never):
    _, shown = explained(tmp_path, capsys, text)
    shown = " ".join(shown.split())
    assert advised in shown
    assert never not in shown


def test_an_error_that_is_told_twice_counts_once(tmp_path, capsys):
    """Cut off by a test's summary, and by the library above the allocator's."""
    errors, _ = explained(tmp_path, capsys, f"{new()}\nFAILED test_x - {new().partition(' Of the')[0]}\n")
    assert [error["verdict"] for error in errors] == ["fragmentation"]
    errors, _ = explained(tmp_path, capsys, f"{new()}\nFAILED test_x - {new(w='4.00 GiB').partition(' Of the')[0]}\n")
    assert len(errors) == 2


LOG = f"epoch 3\n{new()}\nbye\n"
LINES = LOG.splitlines()


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(LOG.encode()),
        gzip.compress(LOG.encode() * 500)[:-9],
        bz2.compress(LOG.encode()),
        lzma.compress(LOG.encode()),
        LOG.encode("utf-16"),
        LOG.encode("utf-16-le"),
        LOG.encode("utf-16-be"),
        LOG.encode("utf-8-sig"),
        "".join(f"<14>Feb  7 11:22:33 n1 train[7]: {line}\n" for line in LINES),
        "".join(json.dumps({"log": line + "\n", "stream": "stderr"}) + "\n" for line in LINES),
        "".join(json.dumps({"_PID": "7", "MESSAGE": line}) + "\n" for line in LINES),
        json.dumps({"_PID": "7", "MESSAGE": list(f"\x1b[31m{new()}".encode())}),
        json.dumps([{"textPayload": line} for line in LINES]),
        json.dumps({"cells": [{"outputs": [{"evalue": new(), "traceback": [f"\x1b[31m{new()}\x1b[0m"]}]}]}, indent=1),
        "".join(f"2025-02-07T11:22:33.123456789Z stderr F {line}\n" for line in LINES),
        f"2025-02-07T11:22:33.1Z stderr P {new()[:150]}\n2025-02-07T11:22:33.1Z stdout F x\n2025-02-07T11:22:33.1Z stderr F {new()[150:]}\n",
        "".join(
            json.dumps({"log": part, "stream": "stderr"}) + "\n"
            for part in (f"{'x' * 16200} {new()[:180]}", f"{new()[180:]}\n")
        ),
        "\n".join(new()[at : at + 80] for at in range(0, 400, 80)),
        new().replace(" of which ", " of which\n> ").replace("torch", "> torch", 1),
        new().replace(" of which ", " of which\n[rank3]: ").replace("torch", "[rank3]: torch", 1),
        new().replace(" GiB", "\xa0GiB"),
        "".join(f"[pod/train-0/main] {line}\n" for line in LINES),
        "".join(f"{{'rank': 0}} {line}\n" for line in LINES),
        f"2025-02-07 11:22:33 ERROR {json.dumps({'msg': new()})}\n",
        f"[[36m{LOG}",
        f"<!doctype html><html><body><pre>{LOG.replace('GiB', 'GiB<!-- -->')}</pre></body></html>",
        new().replace(". ", ".\r\n    "),
    ],
)
def test_an_error_is_found_in_whatever_holds_the_log(tmp_path, capsys, data):
    errors, shown = explained(tmp_path, capsys, data)
    assert {error["wanted_bytes"] for error in errors} == {3 * GIB}
    assert {error["verdict"] for error in errors} == {"fragmentation"}
    assert "not a trace" not in shown


def test_a_rank_without_an_error_is_named_and_the_others_are_explained(tmp_path, capsys):
    (tmp_path / "rank3.log").write_text(new())
    (tmp_path / "rank0.log").write_text("[rank0]: RuntimeError: connection closed by peer\n")
    (tmp_path / "rank1.log").write_text("")
    files = [str(tmp_path / f"rank{rank}.log") for rank in (0, 3)]
    assert main(["explain", *files]) == 0
    said = capsys.readouterr()
    assert "rank3.log" in said.out
    assert "rank0.log: a log without an out-of-memory error" in said.err
    assert main(["explain", *files, str(tmp_path / "none.log")]) == 2
    said = capsys.readouterr()
    assert "rank3.log" in said.out
    assert "does not exist" in said.err
    assert main(["explain", files[0]]) == 2
    assert "not a trace" not in capsys.readouterr().err
