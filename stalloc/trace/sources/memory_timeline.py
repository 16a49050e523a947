"""Memory timelines of torch.profiler, in raw form: rows of (nanoseconds, action, bytes, category) of one device.

Actions are torch's: 1 was there before, 2 created, 3 changed category (two rows), 4 destroyed. Nothing says which
allocation ends, so it is taken to be the newest of that size and category. The device is not in the file: 0 is given.
"""

from array import array
from pathlib import Path

from stalloc.errors import BadInputError
from stalloc.trace.record import Action, Trace
from stalloc.trace.sources.events import MAX_SIZE_BYTES, NewestFirst, make_trace, whole_number
from stalloc.trace.sources.json_text import decode, list_elements

_BEFORE, _CREATED, _CHANGED, _DESTROYED = 1, 2, 3, 4
_EXPORT = "export it with export_memory_timeline() to a name that ends in .raw.json.gz"
_MAX_NANOSECONDS = (1 << 63) - 1
_MAX_CATEGORY = 1000


def read_memory_timeline(path: Path, data: bytes) -> Trace:
    """The trace of a raw timeline.

    Raises BadInputError when it is cut short, is the summed form, or has rows that no timeline has.
    """
    spans = list_elements(path, data, None)
    assert spans is not None, "the caller saw a list"
    action, identity, size, time_us = array("b"), array("Q"), array("q"), array("q")
    baseline: list[tuple[int, int]] = []
    guess = NewestFirst()
    left = -1  # the category that the first of two rows of a change names
    for number, (begin, end) in enumerate(zip(spans[0].tolist(), spans[1].tolist(), strict=True)):
        where = f"row {number} of the timeline"
        row = decode(path, data[begin:end], where)
        where = f"{path}: {where}"
        if not isinstance(row, list) or len(row) != 4:
            raise BadInputError(f"{where} is not time, action, bytes, category, as of a raw timeline: {_EXPORT}.")
        time = whole_number(row[0], -1, _MAX_NANOSECONDS, where, "time")
        kind = whole_number(row[1], _BEFORE, _DESTROYED, where, "action")
        change = whole_number(row[2], -MAX_SIZE_BYTES, MAX_SIZE_BYTES, where, "bytes")
        category = whole_number(row[3], 0, _MAX_CATEGORY, where, "category")
        if change == 0:
            continue
        if kind != _CHANGED and (change < 0) != (kind == _DESTROYED):
            raise BadInputError(f"{where}: action {kind} cannot change memory by {change} bytes: {_EXPORT} again.")
        if kind == _CHANGED:
            if change < 0:
                left = category
            elif left >= 0:
                guess.relabel(change, left, category)
                left = -1
            continue
        if kind == _BEFORE:
            baseline.append((guess.allocate(change, category), change))
            continue
        created = kind == _CREATED
        action.append(Action.ALLOC if created else Action.FREE_COMPLETED)
        identity.append(guess.allocate(change, category) if created else guess.free(-change, category))
        size.append(abs(change))
        time_us.append(time // 1000)
    return make_trace(
        path,
        "memory timeline",
        action=action,
        identity=identity,
        size=size,
        time_us=time_us,
        baseline=baseline,
        notes=[
            "no addresses in the file: each free is taken to end the newest allocation of its size and category",
            "device and streams are not in the file",
        ],
    )
