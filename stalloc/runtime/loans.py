"""Who borrows memory that CUDA graphs of one device leave idle, and what has to be over before they are replayed.

Contract: as in core/graph_loans.py. Whoever launches a graph says so first, and is refused while a loan of its pool
lives. The device is waited for where the order of work is not known to be that of one stream; never while a graph is
captured, when what would need it is refused, or lends nothing.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core import graph_loans
from stalloc.device.capture import is_per_thread
from stalloc.errors import GraphMemoryError
from stalloc.figures import human_bytes
from stalloc.trace.sites import UNKNOWN

if TYPE_CHECKING:
    from stalloc.runtime.memory import DeviceMemory

_ALL = 0  # no row of a GraphPool
_MAX_NAMED = 3  # loans in an error


class Loans:
    """The loans of graph memory on one device. Streams are raw handles, kinds those of private pools."""

    def __init__(self, memory: "DeviceMemory") -> None:
        self._memory = memory
        self._state = memory.state
        self._address = memory.state.address
        self._rows: dict[int, int] = {}  # kind -> row of its GraphPool, 0: the table is full
        #: names of the lines that asked for blocks, given their addresses
        self.places_of: Callable[[list[int]], list[str]] = lambda addresses: [UNKNOWN] * len(addresses)

    def let_lend(self, kind: int) -> None:
        """Graphs whose replays are seen were captured in pools of this kind."""
        self._rows[kind] = int(graph_loans.let_lend(self._address, kind))

    def lend_no_more(self, kind: int) -> None:
        """Graphs of this kind may be launched unseen from here on. Raises GraphMemoryError while loans live."""
        if row := self._rows.get(kind, 0):
            self.begin_capture()
            graph_loans.lend_no_more(self._address, row)
            self.end_launch()

    def begin(self, stream: int) -> bool:
        """Let this thread borrow on a stream until `end`; False: it or another thread does already."""
        if not is_per_thread(stream):
            self._order(stream)
        return int(graph_loans.begin_borrowing(self._address, threading.get_ident())) == 0

    def end(self) -> None:
        graph_loans.end_borrowing(self._address)

    def _order(self, stream: int) -> None:
        uses = np.full(self._state.record.loans.graph_pools_capacity, -1, np.int64)
        if graph_loans.find_unordered(self._address, stream, uses) and not self._memory.is_captured_now():
            self._memory.source.wait()
            graph_loans.order(self._address, stream, uses)

    def begin_replay(self, kind: int, stream: int) -> bool:
        """A graph is about to be launched: lend nothing until `end_launch`; False: nobody has to be told.

        Raises GraphMemoryError, with nothing begun, if a loan lives in its memory.
        """
        row = self._rows.get(kind, 0)
        if not row:
            return False
        stream = -1 if is_per_thread(stream) else stream
        num_loans, waits = graph_loans.begin_launch(self._address, row, stream)
        if num_loans:  # some may be freed, and wait for other streams
            self._memory.wait_for_deferred()
            num_loans, waits = graph_loans.begin_launch(self._address, row, stream)
            if num_loans:
                raise self._error("replayed")
        if self._memory.poison is not None:
            self._memory.poison.check_loans()
        if waits:
            self._wait_or_end(row)
        return True

    def begin_capture(self) -> None:
        """A graph is about to be captured: lend nothing until `end_launch`, and have borrowers be done.

        Raises GraphMemoryError, with nothing begun, if a loan lives.
        """
        num_loans, has_lent = graph_loans.hold(self._address)
        if num_loans:
            self.end_launch()
            self._memory.wait_for_deferred()
            num_loans, has_lent = graph_loans.hold(self._address)
        if num_loans:
            self.end_launch()
            raise self._error("captured")
        if has_lent:
            self._wait_or_end(_ALL)

    def _wait_or_end(self, row: int) -> None:
        """Wait for what was done to loans of a pool, of which none lives, unless a graph is captured."""
        try:
            if self._memory.is_captured_now():
                raise GraphMemoryError(
                    "stalloc: memory of CUDA graphs was borrowed on another stream, and the device cannot be waited "
                    "for while a graph is captured: borrow on the stream that replays."
                )
            self._memory.source.wait()
            graph_loans.forget_lent(self._address, row)
        except BaseException:
            self.end_launch()
            raise

    def end_launch(self) -> None:
        graph_loans.end_launch(self._address)

    def _error(self, what: str) -> GraphMemoryError:
        addresses, sizes = np.zeros((2, _MAX_NAMED + 1), np.int64)
        count = graph_loans.find_loans(self._address, addresses, sizes)
        places = self.places_of(addresses[:count].tolist())
        named = [
            f"{human_bytes(size)} allocated at {place}" for size, place in zip(sizes.tolist(), places, strict=False)
        ]
        more = " and more" if count > _MAX_NAMED else ""
        return GraphMemoryError(
            f"stalloc: a CUDA graph was to be {what} while the program still holds what it borrowed from graphs by "
            f"stalloc.borrow_graph_memory(): {', '.join(named[:_MAX_NAMED])}{more}. Nothing was {what}. Let go of it "
            "before, or make it outside of the `with` statement, as a graph overwrites what it has lent."
        )
