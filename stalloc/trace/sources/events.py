"""Traces from sources of plain events: each names what it allocates or frees by an address or by a number of its own.

Upheld: a source that has no addresses gets none made up; what was live before recording comes first, with start -1.
"""

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.errors import BadInputError
from stalloc.trace.record import SEGMENT_COLUMNS, Action, Trace, empty_columns, index_streams, mark_columns
from stalloc.trace.recorder import pair_events

MAX_SIZE_BYTES = 1 << 44
"""No device holds more; it also keeps every sum of sizes within 64 bits."""
MAX_ADDRESS = (1 << 64) - 1

Mark = tuple[int, int, str]
"""(event index, mark kind, name), ordered by event index."""


class NewestFirst:
    """Which allocation a free of so many bytes ends, in a source that does not say: the newest of that size.

    The load is the same however frees are paired within a size. Newest first suits programs whose temporaries die
    young and whose backward pass frees in reverse: over recordings that do have addresses it finds more of the true
    pairs than oldest first does, but seldom most of them. A label narrows the choice where the source has one.
    """

    def __init__(self) -> None:
        self._live: dict[tuple[int, Hashable], list[int]] = {}
        self._count = 0

    def allocate(self, size: int, label: Hashable = None) -> int:
        """A number for a new allocation, counted from 0."""
        self._count += 1
        self._live.setdefault((size, label), []).append(self._count - 1)
        return self._count - 1

    def free(self, size: int, label: Hashable = None) -> int:
        """The number of the allocation that ends; a new one when none is live, so it predates the recording."""
        numbers = self._live.get((size, label))
        if numbers:
            return numbers.pop()
        self._count += 1
        return self._count - 1

    def relabel(self, size: int, old: Hashable, new: Hashable) -> None:
        """Move the newest allocation of a size from one label to another; nothing happens when none is live."""
        numbers = self._live.get((size, old))
        if numbers:
            self._live.setdefault((size, new), []).append(numbers.pop())


def make_trace(
    path: Path,
    source: str,
    *,
    action: Iterable[int],
    identity: Iterable[int],
    size: Iterable[int],
    device: int = 0,
    raw_stream: Iterable[int] | None = None,
    time_us: Iterable[int] | None = None,
    marks: Sequence[Mark] = (),
    baseline: Sequence[tuple[int, int]] = (),
    has_addresses: bool = False,
    reserved_start_bytes: int = 0,
    notes: Sequence[str] = (),
    more_info: dict[str, Any] | None = None,
) -> Trace:
    """The Trace of one device's events.

    `action`, `identity` (an address, or a number that stands for one), `size` (bytes, at most MAX_SIZE_BYTES),
    `raw_stream` (default: one stream, 0) and `time_us` are (m,). `baseline` is (identity, bytes) of what the source
    says was live before its first event; a free of any other unknown identity adds to it; without either the recording
    is complete, unless `more_info`, which overrides what is put into Trace.info, says otherwise.

    Raises BadInputError when there are no events, or something is allocated or freed twice with nothing between.
    """
    actions, identities = np.asarray(action, np.int8), np.asarray(identity, np.uint64)
    sizes, num_events = np.asarray(size, np.int64), len(actions)
    if not np.any(actions <= Action.FREE_COMPLETED):
        raise BadInputError(f"{path}: holds no allocations and no frees: record at least one step.")
    streams, stream = index_streams(np.zeros(num_events, np.int64) if raw_stream is None else np.asarray(raw_stream))
    pairs = pair_events(actions, identities, sizes, stream, f"{path}: device {device}")
    freed = set(pairs.address[pairs.start < 0].tolist())
    lasting = np.array([bytes_ for number, bytes_ in baseline if number not in freed], np.int64)
    names, mark_table = mark_columns(marks)
    requests = pairs.columns(lasting)
    complete = not np.any(requests["start"] < 0)
    return Trace(
        device=device,
        **requests,
        action=actions,
        address=identities if has_addresses else np.zeros(num_events, np.uint64),
        event_size=sizes,
        event_stream=stream,
        time_us=np.zeros(num_events, np.int64) if time_us is None else np.asarray(time_us, np.int64),
        **mark_table,
        **empty_columns(SEGMENT_COLUMNS),
        streams=streams,
        names=names,
        reserved_start_bytes=reserved_start_bytes,
        info={"source": source, "file": path.name, "complete": complete, "notes": list(notes)} | (more_info or {}),
        extra={},
    )


def whole_number(value: Any, lowest: int, highest: int, where: str, what: str) -> int:
    """The value, if it is a whole number from `lowest` to `highest`, both included; BadInputError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        shown = repr(value)[:40] if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
        raise BadInputError(f"{where}: {what} is {shown}, expected {lowest} to {highest}: record or export it again.")
    return value
