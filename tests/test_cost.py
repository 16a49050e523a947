"""What operations and steps are estimated to take: by class, with an error, on queues."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import path_of

from stalloc.cli import main
from stalloc.cost.class_seconds import Blocks, blocks_of, estimate, estimate_call, known_shares
from stalloc.cost.gpu_rates import rates_of
from stalloc.cost.operation_classes import (
    ATTENTION,
    BROADCAST,
    CONVOLUTION,
    FEW_CHANNELS,
    JOIN,
    MANY_STRIDES,
    MATRIX_PRODUCT,
    NORMALIZATION,
    ODD_PRODUCT,
    PARENTS,
    POINTWISE,
    STRIDED,
    TRANSPOSED,
    Shape,
    class_of,
)
from stalloc.cost.queues import Queue, Task, schedule, schedule_as_ready

BENCH = Path(__file__).parents[1] / "scripts" / "bench" / "cost"
H100 = rates_of("NVIDIA H100 80GB HBM3")


def dense(*sizes: int) -> Shape:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return Shape(sizes, strides[::-1][: len(sizes)])


@pytest.mark.parametrize(
    ("name", "shapes", "kind"),
    [
        ("aten::addmm", [dense(64), dense(32, 128), Shape((128, 64), (1, 128))], MATRIX_PRODUCT),
        ("aten.bmm", [dense(4, 31, 64), dense(4, 64, 31)], ODD_PRODUCT),
        ("aten::_scaled_dot_product_flash_attention_backward", [dense(1, 2, 8, 8)] * 4, ATTENTION),
        ("aten::convolution", [dense(8, 64, 9, 9), dense(32, 64, 3, 3)], CONVOLUTION),
        ("aten::convolution_backward", [dense(8, 32, 9, 9), dense(8, 3, 9, 9), dense(32, 3, 3, 3)], FEW_CHANNELS),
        ("aten::native_layer_norm_backward", [dense(8, 8)], NORMALIZATION),
        ("aten::cat", [dense(8, 8), dense(8, 8)], JOIN),
        ("aten::clone", [Shape((8, 4), (1, 8))], STRIDED),
        ("aten::clone", [dense(8, 4)], POINTWISE),
        ("aten::clone", [Shape((8, 64), (192, 1))], STRIDED),
        ("aten::clone", [Shape((64, 64), (1, 192))], TRANSPOSED),
        ("aten::clone", [Shape((2, 4, 8, 64), (6144, 64, 768, 1))], MANY_STRIDES),
        ("aten::clone", [Shape((2, 4, 8, 64), (2048, 512, 64, 1))], POINTWISE),
        ("aten::_to_copy", [Shape((64, 64), (1, 64))], STRIDED),
        ("aten::copy_", [Shape((64, 64), (1, 192)), dense(64, 64)], TRANSPOSED),
        ("aten::copy_", [Shape((64, 64), (1, 192)), Shape((64, 64), (1, 192))], STRIDED),
        ("aten::cat", [dense(1, 1, 64), Shape((1, 9, 64), (576, 1, 9))], JOIN),
        ("aten::cat", [dense(1, 1, 64), Shape((1, 99, 64), (6336, 1, 99))], TRANSPOSED),
        ("aten::add", [Shape((2, 4, 8, 64), (6144, 64, 768, 1)), dense(2, 4, 8, 64)], MANY_STRIDES),
        ("aten::mul", [dense(8, 4), dense(8, 4)], POINTWISE),
        ("aten::mul", [dense(8, 4), dense(4)], BROADCAST),
        ("aten::mul", [dense(8, 4), Shape((), ())], POINTWISE),
        ("aten::_foreach_addcdiv_", [dense(8), dense(4)], POINTWISE),
    ],
)
def test_the_class_follows_from_name_and_sizes(name: str, shapes: list[Shape], kind: str) -> None:
    assert class_of(name, shapes) == kind


@pytest.mark.parametrize(
    ("name", "shapes", "blocks"),
    [
        ("aten::mm", [dense(128 * 12, 64), dense(64, 128 * 11)], Blocks(1.0, 1.0)),  # a tile for each of 132
        ("aten::mm", [dense(128 * 12, 64), dense(64, 128 * 12)], Blocks(1.0, 264 / 144)),  # 12 wait for the others
        ("aten::addmm", [dense(64), dense(64 * 6, 64), dense(64, 64 * 12)], Blocks(1.0, 132 / 72)),  # smaller tiles
        ("aten::bmm", [dense(1320, 8, 64), dense(1320, 64, 8)], Blocks(1.0, 4.0)),  # tiles have 16 rows and columns
        ("aten::native_layer_norm", [dense(4, 132 * 16, 64), dense(64)], Blocks(4.0, 1.0)),  # 16 blocks of 128 threads
        ("aten::native_layer_norm", [dense(4, 64), dense(64)], Blocks(1.0, 1.0)),
        ("aten::native_batch_norm", [dense(4, 132 * 16, 64), dense(64)], Blocks(1.0, 1.0)),
        ("aten::clone", [Shape((132 * 16 * 16, 64), (192, 1))], Blocks(2.0, 1.0)),
        ("aten::clone", [dense(132 * 16 * 16, 64)], Blocks(1.0, 1.0)),  # whole pieces, several at once
        ("aten::mm", [dense(0, 64), dense(64, 8)], Blocks(1.0, 1.0)),
        ("aten::mm", [], Blocks(1.0, 1.0)),
    ],
)
def test_a_call_fills_the_gpu_in_waves_of_blocks(name: str, shapes: list[Shape], blocks: Blocks) -> None:
    assert blocks_of(name, class_of(name, shapes), shapes, H100) == pytest.approx(blocks)


def test_more_blocks_than_run_at_once_take_longer_for_the_same_bytes() -> None:
    def seconds(rows: int, columns: int) -> float:
        shapes = [dense(rows, columns), dense(columns)]
        return estimate_call("aten::native_layer_norm", shapes, 0, 1e7, H100, half=True)[1].seconds

    assert seconds(1 << 16, 64) > 2 * seconds(1 << 10, 4096)


def test_every_class_has_shares_and_says_where_they_come_from() -> None:
    shares = known_shares()
    assert set(shares) == {MATRIX_PRODUCT, POINTWISE, *PARENTS}
    for one in shares.values():
        assert 0 < one.of_flops <= 1
        assert 0 < one.of_bandwidth <= 1
        assert one.error > 0
        assert ("not measured" in one.source) == (one.calls == 0)


@pytest.mark.parametrize("kind", sorted(known_shares()))
def test_more_work_takes_longer_and_no_work_no_time(kind: str) -> None:
    assert estimate(kind, 0, 0, H100).seconds == 0
    times = [estimate(kind, flops, flops / 10, H100).seconds for flops in (1e6, 1e9, 1e11, 1e13)]
    assert times == sorted(times)
    assert times[-1] > 1e13 / H100.half_flops
    assert estimate(kind, 1e15, 1e6, H100, half=False).seconds > estimate(kind, 1e15, 1e6, H100).seconds
    told = str(estimate(kind, 1e12, 1e6, H100))
    assert told.startswith("est. ")
    assert "±" in told


def test_tasks_wait_for_their_queue_and_for_what_they_need() -> None:
    tasks = [
        Task("load", Queue.TO_DEVICE, 3.0),
        Task("first", Queue.COMPUTE, 1.0),
        Task("second", Queue.COMPUTE, 2.0, after=(0,)),
        Task("store", Queue.TO_HOST, 4.0, after=(1,)),
        Task("third", Queue.COMPUTE, 1.0),
        Task("write", Queue.DISK, 1.0, after=(3,)),
    ]
    made = schedule(tasks)
    assert made.begin == (0.0, 0.0, 3.0, 1.0, 5.0, 5.0)
    assert made.end == (3.0, 1.0, 5.0, 5.0, 6.0, 6.0)
    assert made.seconds == 6.0
    assert made.busy[Queue.COMPUTE] == 4.0
    assert made.busy[Queue.DISK] == 1.0
    assert schedule([]).seconds == 0.0


def test_a_queue_may_take_what_has_its_data_before_what_was_asked_for_first() -> None:
    tasks = [
        Task("backward of the last layer", Queue.COMPUTE, 4.0),
        Task("backward of the first", Queue.COMPUTE, 4.0, after=(0,)),
        Task("state comes", Queue.TO_DEVICE, 3.0),
        Task("update of the last layer", Queue.COMPUTE, 1.0, after=(0, 2)),
        Task("state leaves", Queue.TO_HOST, 3.0, after=(3,)),
        Task("norm of all gradients", Queue.COMPUTE, 1.0, after=(0, 1)),
        Task("told to the host", Queue.TO_HOST, 1.0, after=(5,)),
    ]
    made = schedule_as_ready(tasks)
    assert made.begin == (0.0, 4.0, 0.0, 8.0, 9.0, 9.0, 12.0)
    assert (made.seconds, made.busy) == (13.0, schedule(tasks).busy)


@pytest.mark.parametrize("seed", range(8))
def test_work_as_soon_as_it_can_keeps_what_it_waits_for(seed: int) -> None:
    rng = random.Random(seed)
    queues = (Queue.COMPUTE, Queue.TO_DEVICE, Queue.TO_HOST)
    tasks = [
        Task(
            "", rng.choice(queues), float(rng.randint(0, 4)), tuple(rng.sample(range(row), rng.randint(0, min(row, 3))))
        )
        for row in range(40)
    ]
    made = schedule_as_ready(tasks)
    for row, task in enumerate(tasks):
        assert made.end[row] == made.begin[row] + task.seconds
        assert all(made.end[one] <= made.begin[row] for one in task.after)
    for queue in queues:
        runs = sorted((made.begin[row], made.end[row]) for row, task in enumerate(tasks) if task.queue == queue)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(runs))
        for row, task in enumerate(tasks):  # nothing waits for a queue that has nothing to do
            if task.queue == queue:
                could = max((made.end[one] for one in task.after), default=0.0)
                worked = sum(max(0.0, min(end, made.begin[row]) - max(begin, could)) for begin, end in runs)
                assert worked == made.begin[row] - could


def test_timing_operations_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    trace = path_of("training.pickle.gz")
    assert main(["bench", "ops", "--for", str(trace)]) == 2
    assert "name the trace to write with -o" in capsys.readouterr().err
    assert main(["bench", "ops", "--for", str(trace), "-o", "x.trace.npz"]) == 2
    assert "has no operations: record it with stalloc record --ops" in capsys.readouterr().err


def test_only_operations_of_torch_s_own_on_tensors_are_called_for_a_trace(run_checks, cuda_torch: None) -> None:
    made = run_checks(
        """
import json, pathlib, tempfile
from stalloc import device
device.activate("virtual")
import torch
from stalloc.integrations.operation_timing import measured_nanoseconds
called = []
torch.library.define("mine::evil", "(Tensor x) -> Tensor")
torch.library.impl("mine::evil", "CUDA", lambda x: called.append("evil"))
tensor = lambda *sizes: {"tensor": ["float32", list(sizes), [*sizes[1:], 1]]}
target = pathlib.Path(tempfile.mkdtemp()) / "made"
begun = torch.cuda.memory_stats()["allocation.all.allocated"] if torch.cuda.is_initialized() else 0
times = measured_nanoseconds([
    ["aten::mm", "", [tensor(64, 64), tensor(64, 64)]],
    ["aten::from_file", "", [str(target), True, 1000, None, None, None, None]],
    ["aten::mm", "", [{"tensor": ["float32", [1 << 60, 1 << 60], [1, 1]]}, tensor(2, 2)]],
    ["aten::mm", "", [{"tensor": "x"}, {"list": 3}]],
    ["aten::embedding", "", [tensor(10, 4), {"tensor": ["int64", [5], [1]]}, -1, False, False]],
    ["mine::evil", "", [tensor(2, 2)]],
    ["os::system", "", ["true"]],
])
asked = torch.cuda.memory_stats()["allocation.all.allocated"] - begun
print(json.dumps({"times": times, "asked": asked, "called": called, "made": target.exists()}))
"""
    )
    assert made["called"] == []
    assert not made["made"]
    assert made["asked"] >= 2 + 7  # the product was made, and each time a result
    assert made["times"][1:4] == [0, 0, 0]
    assert made["times"][5:] == [0, 0]


@pytest.mark.slow
def test_each_recorded_program_is_told_by_what_the_others_taught(
    tmp_path: Path, shared_traces: Path, cuda_torch: None
) -> None:
    result = tmp_path / "cost.json"
    words = [sys.executable, str(BENCH), "--traces", str(shared_traces / "h100"), "--json", str(result)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert result.exists(), done.stderr
    rows = json.loads(result.read_text(encoding="utf-8"))
    assert len(rows) == 5
    assert all(0.75 < row["total"] < 1.25 for row in rows)
    assert all(row["tau"] >= 0.8 for row in rows)
    assert all(row["call_error"] < 0.2 for row in rows)
