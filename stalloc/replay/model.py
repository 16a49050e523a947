"""What the compiled models have in common on Python's side: settings, feeding, growing tables, counters and the map.

Contract (the protocol's): feeding at once or in pieces is the same; a feed that runs out of memory at an event does
nothing from there on, and what comes after may be fed as if that event had not been.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

from stalloc.columns import Column, read_only
from stalloc.core.record_types import Record
from stalloc.errors import BadInputError
from stalloc.replay.blocks import FREE, LIVE, WAITING, Owner, make_store
from stalloc.replay.protocol import BlockMap, Counters, Events, Fed, Kind
from stalloc.replay.settings import NoSettings
from stalloc.replay.treap import new_tree


def own_type(settings: type[Any], *more: str) -> type[Record]:
    """The type of the record that a model keeps for itself: its settings and more fields."""
    names = (*(setting.name for setting in fields(settings)), *more) or ("nothing",)  # no record is empty
    made: Any = type("Fields", (Record,), {"__annotations__": dict.fromkeys(names, int)})
    return made


class TableModel:
    """A model whose state is in tables; what differs is its driver, its settings and what else it keeps."""

    name: ClassVar[str]
    settings_type: ClassVar[type[Any]] = NoSettings
    own: ClassVar[type[Record]]  #: record of what it keeps beside the store: see `own_type`
    driver: ClassVar[Callable[..., int]]
    shows: ClassVar[tuple[str, ...]] = ()  #: fields of its own that Counters.more has
    of_requests: ClassVar[tuple[str, ...]] = ()  #: tables of its own with a word for each request
    trees_per_stream: ClassVar[int] = 1
    common_trees: ClassVar[int] = 0  #: trees that belong to no stream, before those of the streams
    memory_end: ClassVar[int] = 1 << 62  #: rows with addresses from here on are no blocks of memory
    num_columns: ClassVar[int] = 2  #: figures that the driver notes after each event

    def __init__(self, settings: Any = None, capacity_bytes: int = 0) -> None:
        check_capacity(capacity_bytes)
        self.options = self.settings_type() if settings is None else settings
        self._store = make_store(capacity_bytes)
        self._own = Owner(self.own, **self._own_tables())
        self._own.write(**{name: value for name, value in vars(self.options).items() if isinstance(value, int)})
        self._start(capacity_bytes)

    def _own_tables(self) -> dict[str, Column]:
        """Tables of the model's own, by the field that holds their address."""
        return {name: np.zeros(1, np.int64) for name in self.of_requests}

    def _start(self, capacity_bytes: int) -> None:
        """Check the settings and set fields of the model's own."""

    def _grow(self) -> None:
        self._store.lengthen(blocks=2 * self._store["num_blocks"], segments=2 * self._store["num_segments"])

    def _make_room(self, events: Events) -> None:
        store, known = self._store, self._store["num_headers"]
        store.lengthen(places=len(events.size), addresses=len(events.size))
        self._own.lengthen(**dict.fromkeys(self.of_requests, len(events.size)))
        trees = self.common_trees + self.trees_per_stream * (int(events.stream.max(initial=0)) + 1)
        if trees > known:
            store.lengthen(headers=trees, blocks=store["num_blocks"] + 2 * trees)
            store.write(num_headers=trees)
            for tree in range(known, trees):
                new_tree(store.pointer, tree)

    def feed(self, events: Events) -> Fed:
        """Go on with these events; see Allocator.feed.

        Raises BadInputError if an event names a request that has no row.
        """
        columns, failed = self._drive(events)
        return Fed(columns[0], columns[1], failed)

    def _drive(self, events: Events, *, keep_going: bool = False) -> tuple[Column, int]:
        """The columns of figures, and the position of the event that was refused, or -1."""
        check_rows(events)
        self._make_room(events)
        num_events, at = len(events.kind), 0
        columns = np.zeros((self.num_columns, num_events), np.int64)
        words = (read_only(column, np.int64) for column in (events.request, events.size, events.stream))
        given, store = (read_only(events.kind, np.int8), *words), self._store
        while True:
            store.write(refused=0)
            at = int(type(self).driver(store.pointer, self._own.pointer, *given, keep_going, at, columns))
            if at == num_events or (store["refused"] and not keep_going):
                break
            self._grow()
        if at == num_events:
            return columns, -1
        columns[0, at:], columns[1, at:] = store["reserved"], store["allocated"]
        return columns, at

    def counters(self) -> Counters:
        counted = ("reserved", "peak_reserved", "allocated", "peak_allocated")
        sizes = {f"{name}_bytes": self._store[name] for name in counted}
        calls = {name: self._store[name] for name in ("device_allocs", "device_frees", "retries")}
        return Counters(**sizes, **calls, more={name: self._own[name] for name in self.shows})

    def addresses(self) -> Column:
        """(n,) where each request was placed last; 0 for a request that never was, or that had no bytes."""
        return self._store.tables["addresses"].copy()

    def used_rows(self) -> Column:
        """The rows of the block table that stand for something; the first of them is row 1."""
        return self._store.tables["blocks"][1 : self._store["blocks_used"]]

    def memory_rows(self) -> Column:
        """Which of the used rows are blocks of memory, by address."""
        rows = self.used_rows()
        chosen = np.flatnonzero(np.isin(rows["state"], (FREE, LIVE, WAITING)) & (rows["address"] < self.memory_end))
        return chosen[np.argsort(rows["address"][chosen])]

    def blocks(self) -> BlockMap:
        """All blocks with their places."""
        chosen = self.memory_rows()
        found = self.used_rows()[chosen]
        begins = np.ones(len(found), bool)  # a segment, or a mapped range
        begins[1:] = found["previous"][1:] != chosen[:-1] + 1
        return BlockMap(
            address=found["address"].copy(),
            size_bytes=found["size"].copy(),
            request=np.where(found["state"] == FREE, -1, found["request"]),
            waiting=(found["state"] == WAITING).astype(np.int64),
            stream=found["stream"].copy(),
            segment=np.cumsum(begins) - 1,
            segment_address=found["address"][begins],
            segment_size=np.add.reduceat(found["size"], np.flatnonzero(begins)),
        )


def check_rows(events: Events) -> None:
    """Raises BadInputError if an event names a request that has no row."""
    num_requests = len(events.size)
    rows = events.request[events.kind < Kind.EMPTY_CACHE]
    if len(rows) and not (rows.min() >= 0 and rows.max() < num_requests):
        raise BadInputError(f"an event names a request outside of the {num_requests} rows: give one row each.")


def check_capacity(capacity_bytes: int) -> None:
    """Raises BadInputError if a device cannot have so many bytes."""
    if capacity_bytes < 0:
        raise BadInputError(f"a capacity of {capacity_bytes} bytes is negative: give 0 for no limit.")
