"""Planning CSV at the command line: places to keep, and plans for other tools.

Contract: requests go by their ids in the file where it has them, else by their row; whatever is wrong with a file is
one BadInputError that names the line or the id.
"""

import csv
import io
from collections.abc import Hashable
from typing import Any

import numpy as np

from stalloc.errors import BadInputError
from stalloc.files import write_whole
from stalloc.inputs import read_input
from stalloc.planner import Plan
from stalloc.trace import Trace

_MAX_DIGITS = 40  # zeros in front of a number do no harm, thousands of digits take time


def _ids(trace: Trace) -> list[Any]:
    ids = trace.extra.get("id")
    return list(range(trace.num_requests)) if ids is None else ids.tolist()


def check_ids(file: str, trace: Trace) -> None:
    """Raise BadInputError if two requests have one id."""
    seen: set[Hashable] = set()
    for name in _ids(trace):
        if name in seen:
            raise BadInputError(f"{file}: the id {str(name)[:40]} occurs twice: give every row an id of its own.")
        seen.add(name)


def read_fixed(file: str, trace: Trace) -> dict[int, int]:
    """Offsets in bytes by row of the trace, from a CSV with the columns id and offset."""
    data = read_input(file, "a CSV with the columns id,offset")
    try:
        lines = list(csv.reader(data.decode("utf-8-sig").splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{file} is not readable as CSV ({error}): save it as plain UTF-8 text.") from error
    header = [name.strip().lower() for name in lines[0]] if lines else []
    if not {"id", "offset"} <= set(header):
        raise BadInputError(f"{file} has no columns id and offset: name them in its first line.")
    row_of = {str(name): row for row, name in enumerate(_ids(trace))}
    fixed: dict[int, int] = {}
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise BadInputError(f"{file}: line {number} has {len(cells)} cells, the header {len(header)}: correct it.")
        name, offset = cells[header.index("id")].strip(), cells[header.index("offset")].strip()
        if name not in row_of:
            raise BadInputError(f"{file}: line {number}: the trace has no id {name[:40]!r}: correct it.")
        if row_of[name] in fixed:
            raise BadInputError(f"{file}: line {number}: the id {name[:40]} occurs twice: keep one of them.")
        if not (offset.isascii() and offset.isdigit()) or len(offset) > _MAX_DIGITS:
            raise BadInputError(f"{file}: line {number}: offset is {offset[:40]!r}, expected a whole number from 0.")
        fixed[row_of[name]] = int(offset)
    return fixed


def write_csv(file: str, trace: Trace, made: Plan) -> None:
    """The plan as id,lower,upper,size,offset, one line a request."""
    shift = -min(int(trace.start.min(initial=0)), 0)  # what was live before recording starts at -1
    columns = (trace.start + shift, trace.end + shift, trace.size, made.offset)
    rows = np.stack(columns, axis=1).tolist()
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", "lower", "upper", "size", "offset"])
    writer.writerows([name, *row] for name, row in zip(_ids(trace), rows, strict=True))
    write_whole(file, text.getvalue(), "choose another file for --csv")
