"""Made-up programs for tests: allocations and frees by name, turned into a trace as the recorder would."""

import numpy as np

from stalloc.trace import MARK_STEP, Action, Trace
from stalloc.trace.recorder import from_recorded

MIB = 1 << 20


class Program:
    """Collects the events of one device; every name holds at most one request at a time."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[int, int, int]] = {}
        self._events: list[tuple[int, int, int, int]] = []
        self._marks: list[tuple[int, int, str]] = []
        self._next_address = 0x1000

    @property
    def names(self) -> set[str]:
        """Names that hold a request."""
        return set(self._live)

    def alloc(self, name: str, size: int, stream: int = 0) -> None:
        """Allocate under a name; a request that the name already holds is freed afterwards, as rebinding does."""
        old = self._live.pop(name, None)
        self._live[name] = (self._next_address, size, stream)
        self._next_address += 1  # a fresh address each time: tests see lifespans, never reuse
        self._events.append((Action.ALLOC, *self._live[name]))
        if old is not None:
            self._events.append((Action.FREE_COMPLETED, *old))

    def free(self, name: str) -> None:
        """Free what a name holds."""
        self._events.append((Action.FREE_COMPLETED, *self._live.pop(name)))

    def mark(self, name: str = "step", kind: int = MARK_STEP) -> None:
        """Say something here."""
        self._marks.append((len(self._events), kind, name))

    def trace(self) -> Trace:
        """The record so far."""
        columns = np.array(self._events, np.int64).reshape(-1, 4).T
        streams = range(int(columns[3].max(initial=0)) + 1)
        times = np.arange(columns.shape[1]) * 1000
        return from_recorded(0, *columns, times, self._marks, streams)
