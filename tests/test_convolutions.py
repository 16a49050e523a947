"""FLOPs of convolutions against closed forms of their geometry: one product and one sum for each weight and place."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_file

PROGRAM = Path(__file__).parent / "programs" / "convolutions.py"
N, BOTH = 2, [True, True]


def case(dims: int, inputs: int, outputs: int, size: int, kernel: int, wants: list[bool] = BOTH, **more: Any) -> Any:
    return {"dims": dims, "batch": N, "inputs": inputs, "outputs": outputs, "wants": wants,
            "size": [size + place for place in range(dims)], "kernel": [kernel] * dims, **more}  # fmt: skip


CASES = [
    *(case(dims, 4, 6, 9, 3) for dims in (1, 2, 3)),
    *(case(dims, 4, 6, 9, 3, stride=2, padding=1) for dims in (1, 2, 3)),
    *(case(dims, 4, 6, 11, 3, dilation=2, padding=2) for dims in (1, 2, 3)),
    *(case(dims, 8, 12, 9, 3, groups=4, stride=2) for dims in (1, 2, 3)),
    *(case(dims, 16, 16, 9, 5, groups=16, padding=2) for dims in (1, 2, 3)),  # depthwise
    *(case(dims, 8, 24, 9, 3, groups=8) for dims in (1, 2, 3)),  # depthwise, three outputs of each
    *(case(dims, 6, 4, 5, 3, transposed=True) for dims in (1, 2, 3)),
    *(case(dims, 6, 9, 5, 3, transposed=True, groups=3, stride=2, output_padding=1) for dims in (1, 2, 3)),
    *(case(dims, 8, 8, 5, 4, transposed=True, groups=8, stride=2, padding=1, dilation=2) for dims in (1, 2, 3)),
    *(case(2, 8, 8, 9, 7, wants, groups=8) for wants in ([True, False], [False, True], [False, False])),
    *(case(2, 8, 8, 9, 7, wants, groups=8, transposed=True) for wants in ([True, False], [False, True])),
    case(2, 8, 8, 9, 3, padding="same", groups=2),
    case(2, 8, 8, 9, 3, [False, False], inference=True, groups=8),
]


def outputs_along(size: int, kernel: int, stride: int = 1, padding: Any = 0, dilation: int = 1) -> int:
    if padding == "same":
        return size
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def closed_form(one: dict[str, Any]) -> int:
    """Each place of the output sums its window over the channels of its group; transposed, each place of the input is
    spread over its window and the outputs of its group."""
    groups = one.get("groups", 1)
    if one.get("transposed"):
        return 2 * N * one["inputs"] * (one["outputs"] // groups) * prod(one["kernel"]) * prod(one["size"])
    given = {name: one[name] for name in ("stride", "padding", "dilation") if name in one}
    places = [outputs_along(size, kernel, **given) for size, kernel in zip(one["size"], one["kernel"], strict=True)]
    return 2 * N * one["outputs"] * (one["inputs"] // groups) * prod(one["kernel"]) * prod(places)


def tensor(*sizes: int) -> dict[str, Any]:
    return {"tensor": ["float32", list(sizes), [prod(sizes[place + 1 :]) for place in range(len(sizes))]]}


X, W, Y = tensor(N, 8, 9, 9), tensor(8, 2, 3, 3), tensor(N, 8, 4, 4)  # four groups, every second place
ONE, TWO, NONE = [1, 1], [2, 2], [0, 0]
GROUPED = 2 * N * 8 * 2 * 9 * 4 * 4
SPREAD = 2 * N * 8 * 2 * 9 * 9 * 9
DEPTHWISE = 2 * N * 8 * 9 * 4 * 4
DENSE = 2 * N * 8 * 8 * 9 * 4 * 4
RECORDED = [
    (["aten::convolution", "", [X, W, None, TWO, NONE, ONE, False, NONE, 4]], GROUPED),
    (["aten::_convolution", "", [X, W, None, TWO, NONE, ONE, False, NONE, 4, *[True] * 4]], GROUPED),
    (["aten::_convolution", "", [X, W, None, TWO, NONE, ONE, True, ONE, 4, *[True] * 4]], SPREAD),
    (["aten::conv2d", "", [X, W, None, TWO, NONE, ONE, 4]], GROUPED),
    (["aten::cudnn_convolution", "", [X, W, NONE, TWO, ONE, 4, *[True] * 3]], GROUPED),
    (["aten::cudnn_convolution_relu", "", [X, W, None, TWO, NONE, ONE, 4]], GROUPED),
    (["aten::cudnn_convolution_add_relu", "", [X, W, Y, 1, None, TWO, NONE, ONE, 4]], GROUPED),
    (["aten::cudnn_convolution_transpose", "", [X, W, NONE, NONE, TWO, ONE, 4, *[True] * 3]], SPREAD),
    (["aten::_conv_depthwise2d", "", [X, tensor(8, 1, 3, 3), [3, 3], None, TWO, NONE, ONE]], DEPTHWISE),
    (["aten::conv_depthwise3d", "",
      [tensor(N, 8, 5, 9, 9), tensor(16, 1, 3, 3, 3), [3] * 3, None, [2] * 3, [0] * 3, [1] * 3]], 2 * N * 16 * 27 * 32),
    (["aten::conv_tbc", "", [tensor(9, N, 4), tensor(3, 4, 6), tensor(6), 1]], 2 * 9 * N * 3 * 4 * 6),
    (["aten::_slow_conv2d_forward", "", [X, tensor(8, 8, 3, 3), [3, 3], None, TWO, NONE]], DENSE),
    (["aten::_slow_conv2d_backward", "output_mask",
      [Y, X, tensor(8, 8, 3, 3), [3, 3], TWO, NONE, [True, True, False]]], 2 * DENSE),
    (["aten::convolution_backward", "",
      [Y, X, W, [8], TWO, NONE, ONE, False, NONE, 4, [True, True, True]]], 2 * GROUPED),
    (["aten::convolution_backward", "",
      [Y, X, W, [8], TWO, NONE, ONE, False, NONE, 4, [False, True, False]]], GROUPED),
    (["aten::convolution_backward", "",
      [tensor(N, 8, 20, 20), X, W, [8], TWO, NONE, ONE, True, ONE, 4, [True, True, False]]], 2 * SPREAD),
]  # fmt: skip


@pytest.fixture(scope="module")
def counted(cuda_torch: None) -> list[Any]:
    asked = json.dumps({"made": CASES, "recorded": [call for call, _ in RECORDED]})
    done = run_file(PROGRAM, asked)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_convolution_and_its_gradients_count_what_their_geometry_says(counted: list[Any]) -> None:
    expected = [[closed_form(one), sum(one["wants"]) * closed_form(one)] for one in CASES]
    assert counted[0] == expected


def test_a_recorded_convolution_counts_the_same_whoever_computes_it(counted: list[Any]) -> None:
    assert counted[1] == [flops for _, flops in RECORDED]
