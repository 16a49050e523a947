"""cuDNN on the virtual GPU: torch takes its usual path, and the workspaces are those of the table."""

import json
from typing import Any

import pytest

from stalloc.device.cudnn import workspace_table

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROGRAM = """
import ctypes, json, sys
from stalloc.device import activate, find_gpu, virtual
activate("virtual", find_gpu(sys.argv[1]))
import torch
import torch.nn.functional as F

def requests(function):
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    function()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [event["size"] for event in events if event["action"] == "alloc"]

half, single = ({"device": "cuda", "dtype": dtype} for dtype in (torch.float16, torch.float32))
image, filters = torch.randn(2, 3, 32, 32, **half), torch.randn(16, 3, 4, 4, **half)
network = torch.nn.LSTM(32, 64, num_layers=2, bidirectional=True).cuda()
weights = list(network.parameters())
query = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16)
result = {
    "enabled": torch.backends.cudnn.enabled,
    "version": list(torch._C._cudnn.getCompileVersion()) == list(torch._C._cudnn.getRuntimeVersion()),
    "padded": requests(lambda: F.conv2d(image, filters, stride=4)),
    "last": requests(lambda: F.conv2d(image.to(memory_format=torch.channels_last), filters, stride=4)),
    "single": requests(lambda: F.conv2d(image.float(), filters.float(), stride=2)),
    "bytes of weights": [sum(w.numel() * 4 for w in weights), weights[0].untyped_storage().nbytes(),
                         len({w.untyped_storage().data_ptr() for w in weights})],
    "attention": torch._fused_sdp_choice(query, query, query),
    "asked": [[c.direction, c.input_sizes, c.filter_sizes, c.strides, c.workspace_bytes, c.unknown_bytes]
              for c in virtual.convolutions()],
}
torch.backends.cudnn.benchmark = True
chosen = []
for size in range(32, 52):
    square, window = torch.empty(1, 3, size, size, device="cuda"), filters.float()
    F.conv2d(square, window)  # tries
    chosen.append(len(requests(lambda: F.conv2d(square, window))))
torch.backends.cudnn.benchmark = False
backend, counted = ctypes.CDLL(None), []
make, ask = backend.cudnnBackendCreateDescriptor, backend.cudnnBackendGetAttribute
described = (ctypes.c_void_p * 3)()
for at in range(3):
    assert make(6, ctypes.byref(described, 8 * at)) == 0
for wanted in (0, 1, 2):
    found = ctypes.c_int64()
    rest = ctypes.byref(described, 8) if wanted else None
    assert ask(ctypes.c_void_p(described[0]), 202, 15, ctypes.c_int64(wanted), ctypes.byref(found), rest) == 0
    counted.append(found.value)
result["engines that are found"] = counted
result["chosen by trial"] = [min(chosen), min(c.workspace_bytes for c in virtual.convolutions()[-20:])]
torch.cuda.set_per_process_memory_fraction((3 << 30) / torch.cuda.get_device_properties(0).total_memory)
large, three = torch.empty(64, 64, 256, 256, device="cuda"), torch.empty(64, 64, 3, 3, device="cuda")  # 1 GiB
for _ in range(2):
    result["short of memory"] = requests(lambda: F.conv2d(large, three, padding=1))
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def on_h100(run_checks: Any) -> Any:
    return run_checks(_PROGRAM, "H100")


def test_cudnn_is_on_in_the_version_that_torch_was_built_with(on_h100: Any) -> None:
    assert on_h100["enabled"] is True
    assert on_h100["version"] is True


def test_a_convolution_in_half_precision_copies_its_tensors_with_channels_padded(on_h100: Any) -> None:
    image, filters, output = (8 * 2 * 32 * 32 * 2, 16 * 8 * 4 * 4 * 2, 16 * 2 * 8 * 8 * 2)
    filters += -filters % 512
    assert on_h100["padded"] == [output, image + filters + output + 512]


def test_a_convolution_with_channels_last_has_no_work_space(on_h100: Any) -> None:
    image, output, filters = 2 * 3 * 32 * 32 * 2, 2 * 16 * 8 * 8 * 2, 16 * 3 * 4 * 4 * 2
    assert on_h100["last"] == [image, output, filters]  # the two copies are torch's own


def test_what_is_not_known_for_certain_is_said(on_h100: Any) -> None:
    half, last, single = on_h100["asked"]
    assert half[:4] == ["forward", [2, 3, 32, 32], [16, 3, 4, 4], [4, 4]]
    assert half[5] == 0
    assert last[4] == 0
    assert last[5] > 0
    assert single[3] == [2, 2]
    assert single[4] == on_h100["single"][-1]
    assert single[5] >= single[4]


def test_a_guess_is_no_larger_than_the_tensors_that_it_is_about(on_h100: Any) -> None:
    _, _, single = on_h100["asked"]
    filters = 4 * 16 * 4 * 4 * 4  # three channels are four where they are copied
    tensors = 4 * (2 * 4 * 32 * 32 + 2 * 16 * 15 * 15) + filters
    assert 0 < single[5] <= tensors + 2 * filters


def test_where_memory_is_short_a_convolution_does_without_a_work_space(on_h100: Any) -> None:
    assert on_h100["short of memory"] == [1 << 30]  # its output


def test_whoever_asks_for_one_engine_is_not_told_of_two(on_h100: Any) -> None:
    assert on_h100["engines that are found"] == [2, 1, 2]  # PyTorch 2.15 asks for one, and reads as many as it is told


def test_trials_of_algorithms_choose_the_first(on_h100: Any) -> None:
    num_requests, least = on_h100["chosen by trial"]
    assert num_requests == 2  # the output and a workspace
    assert least > 0


def test_weights_of_recurrent_networks_lie_in_one_buffer_without_gaps(on_h100: Any) -> None:
    parameters, buffer, num_buffers = on_h100["bytes of weights"]
    assert buffer == parameters
    assert num_buffers == 1


@pytest.mark.parametrize(("gpu", "cudnn"), [("H100", True), ("A100-40GB", False)])
def test_attention_goes_to_cudnn_where_torch_prefers_it(run_checks: Any, gpu: str, cudnn: bool) -> None:
    choice = run_checks(_PROGRAM, gpu)["attention"]
    assert (choice == 3) is cudnn  # SDPBackend.CUDNN_ATTENTION


_ANSWERS = """
import json, sys
from stalloc.device import activate, find_gpu, virtual
activate("virtual", find_gpu(sys.argv[1]))
print(json.dumps({"bytes": [virtual.table_workspace(*one) for one in json.loads(sys.argv[2])]}))
"""


def _winograd_4x4(images: int, channels: int, side: int) -> int:
    """Filter, input and output, transformed by cuDNN's Winograd algorithm that is not fused; as many channels out."""
    tiles = images * (side // 4 + bool(side % 4)) ** 2
    return 6 * 6 * 4 * (channels * channels + tiles * 2 * channels)


@pytest.mark.parametrize(
    ("gpu", "cudnn", "expected"),
    [
        (
            "A100-40GB",
            8902,
            [
                ("forward", (1, 64, 56, 56), (256, 64, 1, 1), 1, 1 << 27),
                ("forward", (8, 64, 56, 56), (256, 64, 1, 1), 1, 0),
                ("filter", (8, 512, 7, 7), (2048, 512, 1, 1), 1, 4 * 8 * 7 * 7 * (512 + 2048) + 16),
                ("forward", (32, 64, 56, 56), (64, 64, 3, 3), 1, 4 * (32 * 64 * 56 * 56 + 64 * 64 * 9) + 16),
            ],
        ),
        ("RTX-3090", 8902, [("forward", (4, 64, 32, 32), (128, 64, 3, 3), 1, 4 * 128 * 64 * 5 * 5)]),
        (
            "V100-32GB",
            8902,
            [
                ("forward", (32, 256, 14, 14), (256, 256, 3, 3), 1, _winograd_4x4(32, 256, 14)),
                ("data", (32, 128, 28, 28), (128, 128, 3, 3), 1, _winograd_4x4(32, 128, 28)),
                ("filter", (32, 512, 7, 7), (512, 512, 3, 3), 1, _winograd_4x4(32, 512, 7)),
                ("filter", (8, 64, 56, 56), (64, 64, 3, 3), 1, 29_491_200),  # as recorded
                ("filter", (8, 512, 7, 7), (512, 512, 3, 3), 1, 42_467_328),
            ],
        ),
        (
            "H100",
            91900,
            [("forward", (2, 3, 32, 32), (16, 3, 3, 3), 2, 4 * (8 * 32**2 + 64 * 9 + 2 * 16**3) + 16)],
        ),
    ],
)
def test_work_spaces_of_the_table(run_checks: Any, gpu: str, cudnn: int, expected: list[Any]) -> None:
    asked = json.dumps([(*convolution, cudnn) for *convolution, _ in expected])
    assert run_checks(_ANSWERS, gpu, asked)["bytes"] == [space for *_, space in expected]


def test_every_row_of_the_table_has_its_source() -> None:
    rows = workspace_table()
    assert all(row.source for row in rows)
    seen = [row for row in rows if not row.unknown_bytes]
    assert seen
    assert not any(row.source.startswith("assumed") for row in seen)
    assert all(row.source.startswith("assumed") or "shapes" in row.source for row in rows if row.unknown_bytes)
