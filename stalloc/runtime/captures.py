"""CUDA graphs: the pools they are captured into, what their warm-ups tell, and who borrows what they leave idle.

Contract: while one is captured everything is served from a pool of its own, whose memory stays where it is. A call that
an interruption ends is made again. Python handles signals only at calls and loops, so lines without any are done
together, and what has been counted is known.
"""

import bisect
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.core import constants, graph_loans
from stalloc.core.constants import ACTION_ALLOC, ACTION_FREE_COMPLETED, ALIGNMENT
from stalloc.core.records import CaptureEntry, table
from stalloc.core.snapshot import segments
from stalloc.core.state import DeviceState
from stalloc.device.capture import is_captured, is_per_thread
from stalloc.errors import GraphMemoryError
from stalloc.figures import human_bytes
from stalloc.runtime.decisions import is_planned_for_capture
from stalloc.runtime.memory import DeviceMemory
from stalloc.sizes import aligned
from stalloc.trace.sites import UNKNOWN

_ALL = 0  # no row of a GraphPool
_MAX_NAMED = 3  # loans in an error


class Loans:
    """The loans of graph memory on one device. Streams are raw handles, kinds those of private pools.

    Contract: as in core/graph_loans.py. Whoever launches a graph says so first, and is refused while a loan of its pool
    lives. The device is waited for where the order of work is not known to be that of one stream; never while a graph
    is captured, when what would need it is refused, or lends nothing.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory, self._state, self._address = memory, memory.state, memory.state.address
        self._rows: dict[int, int] = {}  # kind -> row of its GraphPool, 0: the table is full
        #: names of the lines that asked for blocks, given their addresses
        self.places_of: Callable[[list[int]], list[str]] = lambda addresses: [UNKNOWN] * len(addresses)

    def let_lend(self, kind: int) -> None:
        self._rows[kind] = int(graph_loans.let_lend(self._address, kind))

    def lend_no_more(self, kind: int) -> None:
        """Graphs of this kind may be launched unseen from here on. Raises GraphMemoryError while loans live."""
        if row := self._rows.get(kind, 0):
            self.begin_capture()
            graph_loans.lend_no_more(self._address, row)
            self.end_launch()

    def begin(self, stream: int) -> bool:
        """Let this thread borrow on a stream until `end`; False: it or another thread does already."""
        uses = np.full(self._state.record.loans.graph_pools_capacity, -1, np.int64)
        is_unordered = not is_per_thread(stream) and graph_loans.find_unordered(self._address, stream, uses)
        if is_unordered and not self._memory.is_captured_now():
            self._memory.source.wait()
            graph_loans.order(self._address, stream, uses)
        return int(graph_loans.begin_borrowing(self._address, threading.get_ident())) == 0

    def end(self) -> None:
        graph_loans.end_borrowing(self._address)

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
        held = zip(sizes.tolist(), places, strict=False)
        named = [f"{human_bytes(size)} allocated at {place}" for size, place in held]
        more = " and more" if count > _MAX_NAMED else ""
        return GraphMemoryError(
            f"stalloc: a CUDA graph was to be {what} while the program still holds what it borrowed from graphs by "
            f"stalloc.borrow_graph_memory(): {', '.join(named[:_MAX_NAMED])}{more}. Nothing was {what}. Let go of it "
            "before, or make it outside of the `with` statement, as a graph overwrites what it has lent."
        )


class Requests(NamedTuple):
    """Requests in order: bytes (rounded), and the events [start, end) between which each lived; (n,) each."""

    size: Column
    start: Column
    end: Column


def last_run(action: Column, address: Column, size: Column) -> Requests:
    """The run in the events (m,) that has most requests, the last of equals: some of its requests live all along.

    What was not freed is no part of it.
    """
    events = np.flatnonzero((action == ACTION_ALLOC) | (action == ACTION_FREE_COMPLETED))
    events = events[np.argsort(address[events], kind="stable")]
    begins, ends = events[:-1], events[1:]
    pairs = (address[begins] == address[ends]) & (action[begins] == ACTION_ALLOC) & (action[ends] != ACTION_ALLOC)
    start, end = begins[pairs], ends[pairs]
    order = np.argsort(start)
    start, end = start[order], end[order]
    if len(start) == 0:
        return Requests(start, start, start)
    is_first = np.append(True, start[1:] > np.maximum.accumulate(end)[:-1])
    first = np.flatnonzero(is_first)
    length = np.diff(np.append(first, len(start)))
    chosen = len(length) - 1 - int(np.argmax(length[::-1]))
    part = slice(first[chosen], first[chosen] + length[chosen])
    return Requests(size[start[part]], start[part], end[part])


def _lowest_gap(used: list[tuple[int, int]], size_bytes: int) -> int:
    offset = 0
    for low, high in used:
        if low - offset >= size_bytes:
            break
        offset = max(offset, high)
    return offset


class WarmUps:
    """Reads what one device was asked for before a capture, and tells the core what to expect of it.

    A wrong guess costs memory, never correctness. The warm-up's requests are planned, and the capture's get these
    places, by size and order. A size of which nothing was ever freed is taken to last, as the workspace that a library
    makes once does. Without a record a capture is served best fit.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._requested: set[int] = set()  # sizes, bytes rounded as the core does it
        self._freed: set[int] = set()
        self._begin = 0  # the first event that was not looked at
        self._sizes = np.empty(0, np.int64)  # which the core reads
        self._run = last_run(*np.empty((3, 0), np.int64))  # what the next capture is expected to request
        self._entries = table(CaptureEntry, 1)  # which the core reads
        self._offset = np.empty(0, np.int64)  # of each of them, once it is planned
        self._places: list[tuple[int, int]] = []  # they had in the capture before this one: address and bytes

    def look(self) -> None:
        action, address, size = self._take_unseen()
        sizes = np.array(sorted(self._requested - self._freed), np.int64)
        self._state.write(persistent_sizes=sizes.ctypes.data, num_persistent_sizes=len(sizes))
        self._sizes = sizes
        address_before = self._state.record.capture.capture_plan_base + self._offset
        self._places = list(zip(address_before.tolist(), self._run.size.tolist(), strict=False))
        self._offset = self._offset[:0]
        self._run = last_run(action, address, size)
        is_planned = is_planned_for_capture(len(self._run.size))
        length = len(self._run.size) if is_planned else 0
        self._state.write(capture_plan_length=length, capture_plan_first=0, capture_plan_base=0, capture_plan_lacks=0)

    def plan(self, base: int, live: Iterable[tuple[int, int]]) -> int:
        """Plan the capture's requests from an address on, around what is `live`; how many bytes the plan reaches.

        `live` are addresses and bytes. Requests at the positions of those that outlived the capture before are
        expected to do so too, and lie as low as they can: a later, larger capture then works above them in one piece.
        """
        from stalloc.planner.planning import plan_arrays

        run, live = self._run, sorted(live)
        taken = [(address - base, address - base + size_bytes) for address, size_bytes in live]
        used, fixed, end = list(taken), {}, run.end.copy()
        for number in self._outliving(live) if len(self._places) == len(run.size) else ():
            size_bytes = int(run.size[number])
            offset = _lowest_gap(used, size_bytes)
            bisect.insort(used, (offset, offset + size_bytes))
            fixed[number], end[number] = offset, run.end.max()
        layout = plan_arrays(run.start, end, run.size, alignment=ALIGNMENT, fixed=fixed, forbidden=taken)
        entries = table(CaptureEntry, len(run.size))
        entries["size_bytes"], entries["offset"] = run.size, layout.offset
        self._offset, self._entries = layout.offset, entries
        self._state.write(capture_plan=entries.ctypes.data)
        return layout.peak_bytes

    def _outliving(self, live: Iterable[tuple[int, int]]) -> list[int]:
        """Which requests of the capture before are still live; of several that had one place, the last."""
        last = {place: number for number, place in enumerate(self._places)}
        return [last[place] for place in live if place in last]

    def skip(self) -> None:
        self._state.write(capture_plan_length=0, num_persistent_sizes=0)
        self._take_unseen()

    def _take_unseen(self) -> tuple[Column, Column, Column]:
        """Action, address and rounded bytes of the events that were not looked at, and note their sizes."""
        end = int(self._state.record.log.num_events)
        begin = self._begin if self._begin <= end else 0  # it began anew
        action, address, size = self._state.recorded_lives(begin, end)
        self._begin = end
        size = aligned(size)
        self._requested.update(np.unique(size[action == ACTION_ALLOC]).tolist())
        self._freed.update(np.unique(size[action == ACTION_FREE_COMPLETED]).tolist())
        return action, address, size


_KINDS_APART = constants.LASTING_BIT + 1  # the bit is not a part of their names
_NONE = 0  # no kind of pool
_UNTOLD = -2, -1  # torch's pools begin with 0
OF_CUPY = -1, -1  #: the pool of CuPy's captures
_UNSEEN = _UNTOLD, OF_CUPY  # their graphs are launched without a word


class Captures:
    """The pools of graphs of one device."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory, self._state = memory, memory.state
        self.pools: dict[tuple[int, int], tuple[int, int]] = {}  #: torch's pool of graphs -> kind of pool, graphs
        self._spare_kinds: list[int] = []  # of pools whose graphs are gone
        self._next_kind = constants.PRIVATE_KINDS
        self._times_shared = 0  # declarations under way that no two new pools are used at once
        self._shared_kind = _NONE  # of the pools that are new meanwhile
        self._warm_ups = WarmUps(memory.state)
        self.loans = Loans(memory)
        self._is_seen = False  # whether the graph that is captured tells when it is replayed
        self._unannounced_stream = 0  # that is captured without a word
        self._counted: dict[int, bool] = {}  # by thread: whether the call that is under way has counted its graph

    def begin(self, graph_pool: tuple[int, int]) -> None:
        """A graph is being captured into a pool of torch's: serve everything from a private pool until `end`."""
        me = threading.get_ident()
        with self._memory.lock:
            self._warm_ups.look()
            kind, users = self.pools.get(graph_pool, (0, 0))
            if not self._counted.get(me):
                if users == 0 and graph_pool in _UNSEEN:
                    kind = self._next_kind
                    self._next_kind += _KINDS_APART
                elif users == 0 and self._shared_kind:
                    kind = self._shared_kind
                elif users == 0:
                    kind = self._spare_kinds[-1] if self._spare_kinds else self._next_kind
                    if self._spare_kinds:
                        del self._spare_kinds[-1]
                    else:
                        self._next_kind += _KINDS_APART
                    if self._times_shared:
                        self._shared_kind = kind
                self.pools[graph_pool] = kind, users + 1
                self._counted[me] = True
            self._is_seen = graph_pool not in _UNSEEN
            self._state.record.hot.private_kind = kind
            self._state.record.capture.capture_is_unannounced = 0
        self._counted[me] = False

    def end(self) -> None:
        with self._memory.lock:
            if self._is_seen and self._state.record.hot.private_kind:
                self.loans.let_lend(int(self._state.record.hot.private_kind))
            self._state.write(private_kind=0, capture_is_unannounced=0)
            self._warm_ups.skip()

    def place_plan(self, pool: int, size_bytes: int) -> bool:
        """At a request (bytes, rounded): do what its planned place lacks; False if that is nothing.

        The places get memory as they are asked for, since a capture may be unlike its warm-up.
        """
        record, paging = self._state.record, self._memory.paging
        if not record.capture.capture_plan_length or self._state.heap.pool_kind(pool) != record.hot.private_kind:
            return False
        if not record.capture.capture_plan_base:
            base = self._plan(pool)
            self._state.write(**({"capture_plan_base": base} if base else {"capture_plan_length": 0}))
            return True
        address = int(record.capture.capture_plan_lacks)
        if address:
            self._state.write(capture_plan_lacks=0)
            if not paging.fill(address, size_bytes):
                self._state.write(capture_plan_length=0)
        return address != 0

    def _plan(self, pool: int) -> int:
        """Plan the capture that begins in a pool; where the plan begins, 0: it fits nowhere.

        What outlived the captures before is planned around, where it lives in a range of pages.
        """
        heap, memory = self._state.heap, self._memory
        if heap.is_idle(pool):
            size_bytes = self._warm_ups.plan(0, ())
            base = heap.find_place(pool, size_bytes)
            if not base and memory.source.paged and not memory.source.refusal:
                base = heap.find_range(pool, size_bytes)
                if not base and memory.paging.add_range(pool, size_bytes):
                    base = heap.find_range(pool, size_bytes)
            return base
        base, kind = heap.find_range(pool, 1), heap.pool_kind(pool)
        if not base:
            return 0
        live = [
            (block.address, block.size_bytes)
            for segment in segments(self._state)
            if segment.kind == kind
            for block in segment.blocks
            if block.state != constants.BLOCK_FREE and block.address >= base
        ]
        return base if heap.find_range(pool, self._warm_ups.plan(base, live)) == base else 0

    def heed(self, captured_stream: int) -> None:
        """At a request on a stream that somebody captures, 0: on none: serve what follows as for a graph of torch.

        It ends at the first request after that capture. When such a graph is gone nobody says, so its memory stays, for
        others of the kind. With the lock held.
        """
        record = self._state.record
        if record.capture.capture_is_unannounced and not is_captured(self._unannounced_stream):
            self.end()
        if captured_stream and not record.hot.private_kind:
            self._unannounced_stream = captured_stream
            self.begin(_UNTOLD)
            record.capture.capture_is_unannounced = 1

    def release(self, graph_pool: tuple[int, int]) -> None:
        me = threading.get_ident()
        with self._memory.lock:
            kind, users = self.pools.get(graph_pool, (0, 0))
            if not self._counted.get(me):
                if users > 1:
                    self.pools[graph_pool] = kind, users - 1
                elif users == 1:
                    is_last = self._num_pools(kind) == 1
                    if is_last:
                        self._state.heap.unpin_pools(kind)
                    del self.pools[graph_pool]
                    if is_last and kind != self._shared_kind:
                        self._spare_kinds += (kind,)
                self._counted[me] = True
        self._counted[me] = False

    def begin_sharing(self) -> None:
        """From here on all new pools are one, as the program says that no two of their graphs run at once."""
        with self._memory.lock:
            self._times_shared += 1

    def end_sharing(self) -> None:
        """New pools are apart again; those that were made meanwhile stay one."""
        with self._memory.lock:
            self._times_shared -= 1
            if self._times_shared == 0:
                kind, self._shared_kind = self._shared_kind, _NONE
                if kind and not self._num_pools(kind):
                    self._spare_kinds += (kind,)

    def _num_pools(self, kind: int) -> int:
        return sum(one == kind for one, _ in self.pools.values())
