"""What the compiled models have in common on Python's side: feeding, growing tables, counters and the block map.

Contract (the protocol's): feeding at once or in pieces is the same; a feed that runs out of memory at an event does
nothing from there on, and what comes after may be fed as if that event had not been.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from stalloc.errors import BadInputError
from stalloc.replay import tables
from stalloc.replay.protocol import BlockMap, Counters, Events, Fed, Kind
from stalloc.replay.tables import OWN, lengthen
from stalloc.trace.record import Column

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class TableModel:
    """A model whose state is `Tables`; what differs is its kernel and the names of its own words."""

    name: str
    kernel: ClassVar[Callable[..., int]]
    own_words: ClassVar[dict[str, int]] = {}  #: counter -> index behind OWN, shown in Counters.more
    num_words: ClassVar[int] = 0
    trees_per_stream: ClassVar[int] = 1
    common_trees: ClassVar[int] = 0  #: trees that belong to no stream, before those of the streams

    def __init__(self, settings: dict[str, Any], capacity_bytes: int = 0) -> None:
        if capacity_bytes < 0:
            raise BadInputError(f"a capacity of {capacity_bytes} bytes is negative: give 0 for no limit.")
        self.settings = settings
        self._tables = tables.make_tables(self.num_words, capacity_bytes)
        self._start()

    def _start(self) -> None:
        """Set words of the model's own."""

    def _set(self, word: int, value: int) -> None:
        self._tables.words[word] = value

    def _grow(self) -> None:
        t = self._tables
        blocks, segments = lengthen(t.blocks, 2 * len(t.blocks)), lengthen(t.segments, 2 * len(t.segments))
        self._tables = t._replace(blocks=blocks, segments=segments)

    def _make_room(self, num_requests: int, num_streams: int) -> None:
        t = self._tables
        self._tables = t._replace(
            roots=lengthen(t.roots, self.common_trees + self.trees_per_stream * num_streams),
            place=lengthen(t.place, num_requests),
            address=lengthen(t.address, num_requests),
        )

    def _extra_columns(self, events: Events) -> tuple[Column, ...]:
        """Further columns for the kernel."""
        return ()

    def feed(self, events: Events) -> Fed:
        """Go on with these events; see Allocator.feed.

        Raises BadInputError if an event names a request that has no row.
        """
        num_events, num_requests = len(events.kind), len(events.size)
        check_rows(events)
        self._make_room(num_requests, int(events.stream.max(initial=0)) + 1)
        reserved, allocated = np.zeros((2, num_events), np.int64)
        columns = (
            np.ascontiguousarray(events.kind, np.int8),
            np.ascontiguousarray(events.request, np.int64),
            np.ascontiguousarray(events.size, np.int64),
            np.ascontiguousarray(events.stream, np.int64),
            *self._extra_columns(events),
        )
        self._tables.words[tables.REFUSED] = 0
        at = 0
        while True:
            at = int(type(self).kernel(self._tables, *columns, at, reserved, allocated))
            if at == num_events or self._tables.words[tables.REFUSED]:
                break
            self._grow()
        if at < num_events:
            reserved[at:] = self._tables.words[tables.RESERVED]
            allocated[at:] = self._tables.words[tables.ALLOCATED]
        return Fed(reserved, allocated, failed=at if at < num_events else -1)

    def counters(self) -> Counters:
        """What was done so far."""
        words = [int(word) for word in self._tables.words]
        return Counters(
            reserved_bytes=words[tables.RESERVED],
            peak_reserved_bytes=words[tables.PEAK_RESERVED],
            allocated_bytes=words[tables.ALLOCATED],
            peak_allocated_bytes=words[tables.PEAK_ALLOCATED],
            device_allocs=words[tables.DEVICE_ALLOCS],
            device_frees=words[tables.DEVICE_FREES],
            retries=words[tables.RETRIES],
            more={name: words[OWN + index] for name, index in self.own_words.items()},
        )

    def addresses(self) -> Column:
        """(n,) where each request was placed last; 0 for a request that never was, or that had no bytes."""
        return self._tables.address.copy()

    def blocks(self) -> BlockMap:
        """Where everything is."""
        t = self._tables
        used = np.flatnonzero(t.segments[:, tables.S_SIZE] > 0)
        used = used[np.argsort(t.segments[used, tables.S_ADDRESS])]
        out = np.zeros((len(t.blocks), 6), np.int64)
        out = out[: tables.copy_blocks(t, used, out)]
        return BlockMap(
            address=out[:, 0].copy(),
            size_bytes=out[:, 1].copy(),
            request=out[:, 2].copy(),
            waiting=out[:, 3].copy(),
            stream=out[:, 4].copy(),
            segment=out[:, 5].copy(),
            segment_address=t.segments[used, tables.S_ADDRESS].copy(),
            segment_size=t.segments[used, tables.S_SIZE].copy(),
        )


def check_rows(events: Events) -> None:
    """Raises BadInputError if an event names a request that has no row."""
    num_requests = len(events.size)
    rows = events.request[events.kind != Kind.EMPTY_CACHE]
    if len(rows) and not (rows.min() >= 0 and rows.max() < num_requests):
        raise BadInputError(f"an event names a request outside of the {num_requests} rows: give one row each.")


def parse_bytes(model: str, key: str, text: str) -> int:
    """Bytes from "512", "64MiB", "2g"; raises BadInputError for anything else."""
    number, unit = text.strip().lower().removesuffix("ib").removesuffix("b"), 1
    if number and number[-1] in "kmgt":
        number, unit = number[:-1], _UNITS[number[-1]]
    try:
        value = float(number) * unit
        if value >= 0 and value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise BadInputError(f"the setting {key} of {model} is {text!r}: give a number of bytes, as 64MiB or 2GiB.")


def parse_flag(model: str, key: str, text: str) -> int:
    """0 or 1; raises BadInputError for anything else."""
    if text not in ("0", "1"):
        raise BadInputError(f"the setting {key} of {model} is {text!r}: give 0 or 1.")
    return int(text)


def parse_count(model: str, key: str, text: str) -> int:
    """A whole number from 0; raises BadInputError for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise BadInputError(f"the setting {key} of {model} is {text!r}: give a whole number.")
    return int(text)


def parse_percent(model: str, key: str, text: str) -> int:
    """A whole number from 1 to 100; raises BadInputError for anything else."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:4]) <= 100):
        raise BadInputError(f"the setting {key} of {model} is {text!r}: give a percentage from 1 to 100.")
    return int(text)


def read_settings(model: str, text: str, keys: Mapping[str, Callable[[str, str, str], Any]]) -> dict[str, Any]:
    """Settings from "key:value,…": each value by the reader of its key.

    Raises BadInputError for a key that the model does not have and for a value that its reader refuses.
    """
    settings: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, colon, value = part.partition(":")
        key = key.strip()
        if key not in keys:
            known = ", ".join(sorted(keys)) or "none"
            raise BadInputError(f"{model} has no setting {key!r}: the settings that it has are: {known}.")
        if not colon:
            raise BadInputError(f"the setting {key} of {model} has no value: write {key}:VALUE.")
        settings[key] = keys[key](model, key, value.strip())
    return settings
