"""The checker of the order of work finds one missing synchronisation, names both lines, and else says nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from properties import variants
from warm_programs import run_file, run_stalloc

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

from harm.catalogue import ROOT, Program, programs
from harm.running import AMPLE_BYTES, Setting, command_of, variables_of

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAMS = Path(__file__).parent / "programs"
#: of each program, what its finding has to say is missing
MISSING = {
    "record_stream_left_out": "call record_stream for stream",
    "wait_left_out_before_use": "no event or wait orders the default stream after stream",
    "event_of_the_wrong_stream": "no event or wait orders stream",
    "event_recorded_too_early": "record the event that it waits for after",
    "read_on_the_host_too_early": "the host has not waited for that",
    "pinned_buffer_used_again": "the host has not waited for that",
    "another_stream_of_cupy": "no event or wait orders stream",
    "input_of_a_graph_overwritten": "no event or wait orders the default stream after stream",
    "prefetched_without_waiting": "no event or wait orders the default stream after stream",
    "prefetched_without_record_stream": "call record_stream for the default stream",
    "updated_in_place_on_another_stream": "no event or wait orders stream",
    "blocks_copied_by_a_kernel": "record the event that it waits for after",
    "copied_rows_read_too_early": "the host has not waited for that",
    "saved_too_early": "the host has not waited for that",
    "view_of_numpy_read_too_early": "the host has not waited for that",
    "buffer_filled_again_by_numpy": "the host has not waited for that",
    "array_of_cupy_read_too_early": "the host has not waited for that",
    "registered_buffer_read_too_early": "the host has not waited for that",
    "values_of_a_sparse_matrix": "record the event that it waits for after",
    "sent_before_it_is_computed": "no event or wait orders stream",
    "branch_of_a_graph_not_joined_in_time": "no event or wait orders stream",
    "kernel_of_triton": "no event or wait orders the default stream after stream",
    **dict.fromkeys(
        [
            *("product_by_cupy", "solution_by_cupy", "transform_by_cupy", "random_numbers_by_cupy", "total_by_cupy"),
            *("sorted_by_cupy", "kernel_of_a_template", "kernel_in_python"),
        ],
        "no event or wait orders the default stream after stream",
    ),
}
RACING = (
    "import torch\nside = torch.cuda.Stream()\nones = torch.ones(1 << 20, device='cuda')\n"
    "with torch.cuda.stream(side):\n    for _ in range(3):\n        ones.add_(1)\ntorch.cuda.synchronize()\n"
)


def told(program: str, *arguments: str, order: str = "strict", completion: str = "") -> Any:
    """What a program prints that is checked, or (order "") is not."""
    variables = {**os.environ, "STALLOC_VIRTUAL_ORDER": order, "STALLOC_VIRTUAL_COMPLETION": completion}
    done = run_file(PROGRAMS / program, *arguments, variables=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_command_line_tells_both_places_once_and_ends_with_1(tmp_path: Path) -> None:
    program = tmp_path / "racing.py"
    program.write_text(RACING)
    words = "run", "--device", "virtual", "--check-order", "--json", "-", program.name
    done = run_stalloc(*words, folder=tmp_path, variables={**os.environ, "STALLOC_CACHE": "off"})
    assert done.returncode == 1
    [found] = json.loads(done.stdout)["order"]
    assert "racing.py:6 writes 4.00 MiB" in found["text"]
    assert "racing.py:3 may still write it on the default stream" in found["text"]
    assert done.stderr.count("racing.py:6 writes") == 1
    refused = run_stalloc("run", "--check-order", program.name, folder=tmp_path)
    assert refused.returncode == 125
    assert "add --device virtual" in refused.stderr


@variants("allocator", ["stalloc", "native"])
@variants("name", MISSING, always=5)
def test_one_missing_synchronisation_is_found(name: str, allocator: str) -> None:
    result = told("races.py", name, allocator)
    assert result["waiting"] == []
    [text] = result["not_waiting"]
    here, there = (f"races.py:{result[which]}" for which in ("here", "there"))
    assert re.search(rf"{here}\b.*while .*{there}\b", text), text
    assert MISSING[name] in text


@pytest.mark.slow
def test_a_capture_that_ends_before_a_stream_has_joined_fails_as_on_a_gpu(tmp_path: Path) -> None:
    program = tmp_path / "unjoined.py"
    program.write_text(
        "import torch\nside, ones = torch.cuda.Stream(), torch.ones(1 << 20, device='cuda')\n"
        "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n    side.wait_stream(torch.cuda.current_stream())\n"
        "    with torch.cuda.stream(side):\n        ones.add_(1)\n"
    )
    words = "run", "--device", "virtual", "--check-order", program.name
    done = run_stalloc(*words, folder=tmp_path, variables={**os.environ, "STALLOC_CACHE": "off"})
    assert done.returncode == 1
    assert "calls cudaStreamEndCapture, with a stream that was not joined, while a graph is captured" in done.stderr
    assert "operation failed due to a previous error during capture" in done.stderr


@variants("allocator", ["stalloc", "native"])
def test_nothing_is_found_where_order_is_kept_otherwise_than_by_events(allocator: str) -> None:
    assert told("in_order.py", allocator) == []


def test_a_cached_expert_is_sent_away_after_the_stream_that_used_it() -> None:
    assert told("experts_on_two_streams.py") == []


def test_what_a_graph_of_cupy_writes_to_is_its_own_and_no_page_moves_for_it() -> None:
    found, overlaps = told("captured_by_cupy.py", "stream")
    assert found == []
    assert not overlaps


def test_no_page_moves_while_somebody_captures_without_telling() -> None:
    assert told("captured_by_cupy.py", "raw") == [[], False]


@variants("served_by", ["planned", "within", "heap"])
def test_what_somebody_captures_untold_is_its_own_and_no_event_is_asked_for(served_by: str) -> None:
    found, overlaps, hits, later_hits = told("captured_untold.py", served_by)
    assert found == []
    assert not overlaps
    assert (hits > 0) == (later_hits > 0) == (served_by != "heap")


def test_no_splice_ends_while_a_graph_is_captured() -> None:
    num_splices, is_refused, found = told("captured_beside_a_splice.py")
    assert num_splices > 0
    assert is_refused
    assert found == []


def test_blocks_that_are_recorded_for_a_stream_pile_up_where_work_is_late() -> None:
    assert told("blocks_of_layers.py", "at-waits", "32", order="") == [4, 2]
    assert told("blocks_of_layers.py", "at-once", "32", order="") == [1, 2]


@pytest.mark.slow
def test_work_takes_on_the_timeline_what_links_and_operations_need() -> None:
    took = told("times_of_work.py", order="", completion="timeline")
    assert took["copy"] == pytest.approx(1e3 * (512 << 20) / (0.8 * 64e9), rel=0.01)
    assert took["both_to_the_device"] == pytest.approx(2 * took["copy"], rel=0.01)
    assert took["one_each_way"] == pytest.approx(took["copy"], rel=0.01)
    assert took["product"] > 1e3 * 2 * 8192**3 / 989e12
    assert took["by_a_graph"] == pytest.approx(4 * took["product"], rel=0.01)
    assert took["by_polling"] == pytest.approx(took["product"], rel=0.01)


def test_a_program_whose_parameters_have_no_shape_at_first_runs_on_the_timeline(tmp_path: Path) -> None:
    program = tmp_path / "lazy.py"
    program.write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.LazyLinear(512), torch.nn.LazyBatchNorm1d()).cuda()\n"
        "print(model(torch.ones(8, 256, device='cuda')).shape)\n"
    )
    done = run_stalloc("run", "--device", "virtual", "--completion", "timeline", program)
    assert done.returncode == 0, done.stderr


def test_on_the_timeline_blocks_pile_up_where_the_device_takes_longer_than_the_host_asks() -> None:
    assert told("blocks_of_layers.py", "timeline", "1024", order="") == [4, 2]


@pytest.mark.parametrize(
    ("completion", "depth", "num"),
    [
        ("timeline", 64, 8),  # a result is computed in some microseconds, and copied in 0.7 ms
        ("timeline", 1 << 16, 2),  # it is computed in some milliseconds: the one before it has been copied by then
        ("at-once", 1 << 16, 1),
        ("at-waits", 1 << 16, 8),
    ],
)
def test_results_that_are_copied_to_the_host_pile_up_where_copies_are_slower(
    completion: str, depth: int, num: int
) -> None:
    assert told("offloaded_layers.py", completion, str(depth), order="") == num


def checked_into(log: Path) -> dict[str, str]:
    """Variables that have each process checked, and what is found added to a file."""
    return {"STALLOC_VIRTUAL_ORDER": "strict", "STALLOC_VIRTUAL_ORDER_LOG": str(log)}


def found_as_no_harm_runs(program: Program, folder: Path) -> str:
    """What is found in a program under STALLOC=1."""
    log = folder / "found"
    variables = variables_of(program, Setting.STALLOC, AMPLE_BYTES) | checked_into(log)
    command = command_of(program, Setting.STALLOC, AMPLE_BYTES)
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return log.read_text() if log.exists() else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (
            *("test_integrations_streams", "test_integrations_torch", "test_integrations_cupy_loops"),
            *("test_recompute_checkpointed", "test_recompute_policies"),
            *("test_compaction_automatic", "test_compaction_device", "test_bench_no_harm"),
        ),
        ("test_torch_graphs", "-m", ""),  # torch.compile's too
        (
            *("test_sleep", "test_paging", "test_streaming", "test_offloading"),
            *("test_integrations_cupy", "test_integrations_cupy_pool"),
            *("test_contexts_of_gpus_in_use", "test_integrations_processes"),
        ),
        ("test_dryrun_ranks", "-m", "", "-k", "torchrun and fsdp2"),  # a dry run has an order of its own
    ],
    ids=["streams, techniques, compaction", "graphs", "on the host, CuPy, processes", "ranks"],
)
def test_nothing_is_found_in_what_tests_run(words: tuple[str, ...], tmp_path: Path) -> None:
    """Tests that say nothing of when work is done, once more, under the checker."""
    log = tmp_path / "found"
    names = [f"tests/{word}.py" if word.startswith("test_") else word for word in words]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *names]
    variables = os.environ | checked_into(log)
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1200, check=False)
    assert not log.exists(), log.read_text()
    assert done.returncode == 0, done.stdout


#: each second of no_harm --quick (the others take as long again), then those of graphs, threads and two GPUs
QUICK = [one.name for one in programs() if one.is_quick][1::2]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, "captured_step", "two_threads", "data_parallel"])
def test_nothing_is_found_in_programs_of_no_harm(name: str, tmp_path: Path) -> None:
    [program] = [one for one in programs() if one.name == name]
    assert found_as_no_harm_runs(program, tmp_path) == ""


@pytest.mark.slow
def test_a_missing_wait_is_found_in_a_program_that_runs_as_those_of_no_harm(tmp_path: Path) -> None:
    script = tmp_path / "racing.py"
    script.write_text(RACING)
    assert "racing.py:6 writes 4.00 MiB" in found_as_no_harm_runs(Program("racing", script), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("examples/train_gpt.py", "--size", "tiny", "--steps", "8"),
        ("examples/train_gpt.py", "--size", "tiny", "--steps", "8", "--checkpoint"),
        ("examples/cupy_and_torch.py",),
        ("examples/cupy_filters.py", "--steps", "6"),
        ("examples/offloaded.py",),
    ],
)
def test_nothing_is_found_in_the_examples(words: tuple[str, ...]) -> None:
    command = "run", "--device", "virtual", "--check-order", "--json", "-", *words
    done = run_stalloc(*command, folder=ROOT, variables={**os.environ, "STALLOC_CACHE": "off"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["order"] == []
