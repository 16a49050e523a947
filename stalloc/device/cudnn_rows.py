"""Rows for the table of cuDNN's workspaces, from what a recording says of a program's convolutions.

Contract: `note_of` makes the plain value that a trace keeps, `rows_of` the rows of `cudnn_workspaces.csv` that follow
from one, in the table's own form: one shape each, for that release of cuDNN and that architecture, with the card as
source.
"""

import csv
import io
from collections.abc import Iterable
from typing import Any

from stalloc.device.cudnn import WorkspaceRow, workspace_table
from stalloc.errors import BadInputError
from stalloc.printable import printable

_DIRECTIONS = ("forward", "data", "filter")
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
    direction, layout = _DIRECTIONS.index(one["direction"]), _LAYOUTS.index(one["layout"])
    fields = dict.fromkeys(workspace_table()[0].fields, "") | common
    fields |= {
        "shape": f"{_by(one['input'])} by {_by(one['filter'])} stride {_by(one['strides'])}",
        "element_bytes": str(_whole(one["element_bytes"])),
        "layout": _LAYOUTS[layout],
        "direction": _DIRECTIONS[direction],
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
