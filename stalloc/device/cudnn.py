"""The workspaces that cuDNN asks for, by convolution: the table, and what a program asked of it.

Contract: `cudnn_workspaces.csv` beside this file holds a row for each kind of convolution, or for a single shape, with
the source of its figure; the first row that fits answers. A row whose figure was not seen on a GPU says how far off it
may be (`unknown_bytes`), so that whoever reads a peak can be told how certain it is.

A row reads: workspace = inputs * |input| + filters * |filter| + outputs * |output| + more_bytes, each tensor with its
channels rounded up to `channels`, and its bytes up to `round_bytes`. With `tile` they count as Winograd's algorithm
transforms them: the filter with windows of that size, the others in so large tiles, which give two outputs a side less.
What is not known is at most `unknown_bytes`, and with it the workspace at most `unknown_tensors` times the three
tensors and two filters: what cuDNN copies to another layout cannot be more than they are, and partial sums of a
filter's gradient are as large as it.

`note_of` makes the plain value that a trace keeps of a program's convolutions, `rows_of` the rows that follow from one:
one shape each, for that release of cuDNN and that architecture, with the card as source.
"""

import csv
import ctypes
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal

from stalloc.errors import BadInputError
from stalloc.printable import printable

Workspaces = Literal["least", "likely", "most"]

_MAX_RANK = 8
_FILE = Path(__file__).with_name("cudnn_workspaces.csv")
_DIRECTIONS = ("forward", "data", "filter")
_CHOICES = {  # "any" or nothing is -1
    "layout": {"first": 0, "last": 1},  # channels
    "direction": {name: index for index, name in enumerate(_DIRECTIONS)},
    "window": {"wide": 0, "1": 1, "3": 3},  # of the filter
    **{name: {"1": 0, "more": 1} for name in ("stride", "groups", "batch")},
}
_MOST_CONVOLUTIONS = 4096
_Sizes = ctypes.c_int64 * _MAX_RANK


class _Row(ctypes.Structure):
    """WorkspaceRow of virtual_convolution.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("cudnn_from", "cudnn_below", "architecture_from", "architecture_below")),
        *((name, ctypes.c_int64) for name in ("element_bytes", "layout", "direction", "window", "stride", "groups")),
        ("batch", ctypes.c_int64),
        *((name, _Sizes) for name in ("input", "filter", "strides")),
        *((name, ctypes.c_int64) for name in ("inputs", "filters", "outputs", "channels", "tile", "round_bytes")),
        *((name, ctypes.c_int64) for name in ("more_bytes", "unknown_bytes", "unknown_tensors")),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("rank", ctypes.c_int), ("sizes", _Sizes), ("tensor_strides", _Sizes))


class _Convolution(ctypes.Structure):
    """Convolution of virtual_convolution.h."""

    _fields_ = (
        ("direction", ctypes.c_int),
        *((name, _Tensor) for name in ("input", "filter", "output")),
        *((name, _Sizes) for name in ("strides", "dilations", "paddings")),
    )


class _Asked(ctypes.Structure):
    """AskedConvolution of virtual_convolution.h."""

    _fields_ = (
        ("convolution", _Convolution),
        *((name, ctypes.c_int64) for name in ("row", "workspace_bytes", "unknown_bytes")),
    )


@dataclass(frozen=True, kw_only=True)
class WorkspaceRow:
    """A row of the table, as it is written: empty fields fit everything."""

    fields: dict[str, str]
    unknown_bytes: int
    source: str


@dataclass(frozen=True, kw_only=True)
class AskedConvolution:
    """A convolution that a program made, and the workspace that cuDNN was taken to ask for."""

    direction: str
    input_sizes: tuple[int, ...]
    filter_sizes: tuple[int, ...]
    strides: tuple[int, ...]
    workspace_bytes: int
    unknown_bytes: int | None  #: how far off that may be; 0: seen on a GPU, None: no row of the table fits


@cache
def workspace_table() -> tuple[WorkspaceRow, ...]:
    with _FILE.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        return tuple(
            WorkspaceRow(fields=fields, unknown_bytes=int(fields["unknown_bytes"] or 0), source=fields["source"])
            for fields in lines
        )


def _packed(row: WorkspaceRow) -> _Row:
    packed = _Row()
    for name, text in row.fields.items():
        if name in _CHOICES:
            setattr(packed, name, -1 if text in ("", "any") else _CHOICES[name][text])
        elif name == "shape":
            # "1x512x7x7 by 512x512x3x3 stride 1x1"
            if text:
                sizes, _, rest = text.partition(" by ")
                window, _, stride = rest.partition(" stride ")
                for field, part in (("input", sizes), ("filter", window), ("strides", stride)):
                    setattr(packed, field, _Sizes(*map(int, part.split("x"))))
        elif name != "source":
            setattr(packed, name, int(text or (-1 if name == "element_bytes" else 0)))
    return packed


def load_table(library: ctypes.CDLL) -> None:
    rows = [_packed(row) for row in workspace_table()]
    library.stalloc_virtual_set_workspaces((_Row * len(rows))(*rows), ctypes.c_int64(len(rows)))
    library.stalloc_virtual_convolutions.restype = ctypes.c_int64


def table_answer(
    library: ctypes.CDLL, direction: str, sizes: Sequence[int], window: Sequence[int], stride: int, cudnn_version: int
) -> int:
    """The workspace that the table has for a convolution of fp32 tensors, channels first and without padding lost.

    `sizes` are those of the input and `window` those of the filter, batch and channels included.
    """
    output = [sizes[0], window[0], *(-(-size // stride) for size in sizes[2:])]
    asked = _Convolution(direction=_DIRECTIONS.index(direction))
    for tensor, its in ((asked.input, sizes), (asked.filter, window), (asked.output, output)):
        tensor.rank, tensor.sizes = len(its), _Sizes(*its)
        tensor.tensor_strides = _Sizes(*(prod(its[i + 1 :]) for i in range(len(its))))
    asked.strides = _Sizes(*([stride] * (len(sizes) - 2)))
    asked.dilations = _Sizes(*([1] * (len(sizes) - 2)))
    library.convolution_workspace_bytes.restype = ctypes.c_int64
    return int(library.convolution_workspace_bytes(ctypes.byref(asked), ctypes.c_int(cudnn_version)))


def asked_convolutions(library: ctypes.CDLL) -> list[AskedConvolution]:
    kept = (_Asked * _MOST_CONVOLUTIONS)()
    num = library.stalloc_virtual_convolutions(kept, ctypes.c_int64(_MOST_CONVOLUTIONS))
    return [
        AskedConvolution(
            direction=_DIRECTIONS[one.convolution.direction],
            input_sizes=tuple(one.convolution.input.sizes[: one.convolution.input.rank]),
            filter_sizes=tuple(one.convolution.filter.sizes[: one.convolution.filter.rank]),
            strides=tuple(one.convolution.strides[: one.convolution.input.rank - 2]),
            workspace_bytes=one.workspace_bytes,
            # what is a guess may be missing altogether, too
            unknown_bytes=one.unknown_bytes and max(one.unknown_bytes, one.workspace_bytes) if one.row >= 0 else None,
        )
        for one in kept[:num]
    ]


_LAYOUTS = ("first", "last")
_MOST_BYTES = 1 << 62


def note_of(convolutions: Iterable[tuple[Any, int]], *, card: str, architecture: int, cudnn: int) -> dict[str, Any]:
    """What a trace keeps of its convolutions, each with the bytes of its workspace."""
    return {
        "card": card,
        "architecture": architecture,
        "cudnn": cudnn,
        "work_spaces": [
            {
                "direction": one.direction,
                "input": list(one.input_sizes),
                "filter": list(one.filter_sizes),
                "strides": list(one.strides),
                "element_bytes": one.element_bytes,
                "layout": _LAYOUTS[one.channels_last],
                "bytes": num_bytes,
            }
            for one, num_bytes in convolutions
        ],
    }


def rows_of(note: Any, name: str) -> list[WorkspaceRow]:
    """The rows of a note, in its order. `name` is the file's, for the BadInputError where the note is not one."""
    try:
        cudnn, architecture, card = _whole(note["cudnn"]), _whole(note["architecture"]), printable(note["card"], 80)
        is_old = cudnn < 10_000  # 8902 is 8.9.2, 90100 is 9.1.0
        major, minor = (cudnn // 1000, cudnn // 100 % 10) if is_old else (cudnn // 10_000, cudnn // 100 % 100)
        scale = 1000 if is_old else 10_000
        common = {
            "cudnn_from": str(major * scale),
            "cudnn_below": str((major + 1) * scale),
            "architecture_from": str(architecture),
            "architecture_below": str(architecture + 1),
            "source": f"{card.replace(',', ';')}; cuDNN {major}.{minor}; recorded by stalloc",
        }
        return [_row(one, common) for one in note["work_spaces"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"{name} has a list of workspaces that is not whole: record it again.") from error


def _row(one: dict[str, Any], common: dict[str, str]) -> WorkspaceRow:
    if one["direction"] not in _DIRECTIONS or one["layout"] not in _LAYOUTS:
        raise ValueError
    fields = dict.fromkeys(workspace_table()[0].fields, "") | common
    fields |= {
        "shape": f"{_by(one['input'])} by {_by(one['filter'])} stride {_by(one['strides'])}",
        "element_bytes": str(_whole(one["element_bytes"])),
        "layout": one["layout"],
        "direction": one["direction"],
        "more_bytes": str(_whole(one["bytes"])),
    }
    return WorkspaceRow(fields=fields, unknown_bytes=0, source=fields["source"])


def _by(sizes: list[Any]) -> str:
    return "x".join(str(_whole(size)) for size in sizes)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_BYTES:
        raise ValueError
    return value


def as_csv(rows: list[WorkspaceRow]) -> str:
    """The rows as lines of the table, its heading first."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(workspace_table()[0].fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.fields for row in rows)
    return out.getvalue()
