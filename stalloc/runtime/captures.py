"""CUDA graphs: while one is captured everything is served from a pool of its own, whose memory stays where it is.

Contract: a call that an interruption ends is made again. Python handles signals only at calls and loops, so lines
without any are done together, and what has been counted is known.
"""

import threading

from stalloc.core import constants
from stalloc.core.snapshot import segments
from stalloc.device.capture import is_captured
from stalloc.runtime.loans import Loans
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.warm_ups import WarmUps

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
        """A graph is gone; with the last one of its pool the pool's memory may be given back."""
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
