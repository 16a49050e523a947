"""What a program promises of its CUDA graphs, so that their pools may share memory, and lend it between replays.

Contract: nothing is inferred. Pools are one only if the program says so, and only those that are new meanwhile; a pool
that is there already stays as it is. Without stalloc the promises change nothing.

`Replays` stands in the place of torch's methods from before the first capture, so that no replay is missed. As long as
nobody has borrowed a replay is only passed on. What launches a graph otherwise has to ask for its handle first, or
makes it a part of another graph: its pool lends nothing from then on.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stalloc import device as devices
from stalloc.integrations.installation import current, installation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stalloc.runtime import Runtime
    from stalloc.runtime.captures import Loans


@contextmanager
def exclusive_graphs() -> Iterator[None]:
    """Let graphs that are captured meanwhile share memory, though they do not share a pool of torch's.

    The program promises of these graphs what torch asks of graphs in one pool: no two run at once, and the output of
    one that is not kept during later captures is read before another is replayed. It holds for all devices and threads
    of the process. May be nested, and used again: each outermost use makes a pool of its own.
    """
    runtime = current()
    controllers = runtime.controllers if runtime is not None else []
    for controller in controllers:
        controller.captures.begin_sharing()
    try:
        yield
    finally:
        for controller in controllers:
            controller.captures.end_sharing()


@contextmanager
def borrow_graph_memory() -> Iterator[None]:
    """Serve what this thread asks for meanwhile from memory that CUDA graphs leave idle until they are replayed.

    It serves requests on the stream that the graphs are replayed on, of the device that is current now; what they
    leave is where no tensor lives in their pools. Other requests, and those for which there is no room, are served as
    ever, and so are all of a thread while another one borrows on this device. The program promises:

    - that nothing allocated inside lives when a graph of that pool is replayed, or any is captured. If something does,
      that raises GraphMemoryError (a RuntimeError) with the line that allocated it, and nothing is replayed;
    - that all graphs of the pool are replayed by `torch.cuda.CUDAGraph.replay`;
    - that an output of which it holds no tensor (a weak reference, an address) has been read before.

    May be nested. Where the replays were on another stream, it waits for the device when it begins.
    """
    runtime, torch = current(), sys.modules.get("torch")
    if runtime is None or installation.replays is None or torch is None or not torch.cuda.is_initialized():
        yield
        return
    installation.replays.heed()
    device = torch.cuda.current_device()
    loans = runtime.controllers[device].captures.loans
    runtime.begin_borrowing()
    try:
        begins = loans.begin(torch._C._cuda_getCurrentRawStream(device))
        checker = None
        if begins and devices.active() == "virtual":
            from stalloc.device.virtual import order_checker

            checker = order_checker()  # who would miss that memory is lent
        try:
            if checker is not None:
                checker.borrows(True)
            yield
        finally:
            if begins:
                loans.end()
            if checker is not None:
                checker.borrows(False)
    finally:
        runtime.end_borrowing()


_RAW = "raw_cuda_graph", "raw_cuda_graph_exec"  # in versions of torch that have them


class Replays:
    def __init__(self, torch: Any, runtime: "Runtime") -> None:
        """Hear of each replay and capture of torch's from here on."""
        self._runtime = runtime
        self._current_stream = torch._C._cuda_getCurrentRawStream
        self._is_capturing = torch.cuda.is_current_stream_capturing
        self._is_heeded = False
        self._unheeded: list[None] = []  # replays that are being passed on
        graphs = torch.cuda.CUDAGraph
        graphs.replay, graphs.capture_begin = self._replaying(graphs.replay), self._capturing(graphs.capture_begin)
        for name in _RAW:
            if hasattr(graphs, name):
                setattr(graphs, name, self._giving_away(getattr(graphs, name)))

    def heed(self) -> None:
        """Somebody borrows: let no replay pass without a look at what is lent."""
        self._is_heeded = True
        while self._unheeded:  # other threads launch them now; the first borrower waits for the device after that
            time.sleep(0)

    def _pools_of(self, graph: Any) -> "list[tuple[Loans, int, int]]":
        """Loans, kind of pool and current stream (handle) on each device that knows the pool of a graph."""
        try:
            pool = graph.pool()
        except RuntimeError:  # nothing was captured
            return []
        return [
            (one.captures.loans, one.captures.pools[pool][0], self._current_stream(one.device.index))
            for one in self._runtime.controllers
            if pool in one.captures.pools
        ]

    def _lend_no_more(self, graph: Any) -> None:
        for loans, kind, _ in self._pools_of(graph):
            loans.lend_no_more(kind)

    def _replaying(self, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(own)
        def replay(graph: Any) -> Any:
            if self._is_capturing():
                done = own(graph)  # newer versions of torch refuse it
                self._lend_no_more(graph)
                return done
            self._unheeded.append(None)
            try:
                if not self._is_heeded:
                    return own(graph)
            finally:
                self._unheeded.pop()
            with contextlib.ExitStack() as begun:
                for loans, kind, stream in self._pools_of(graph):
                    if loans.begin_replay(kind, stream):
                        begun.callback(loans.end_launch)
                return own(graph)

        return replay

    def _capturing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as held:  # nothing is lent on any device meanwhile
                for controller in self._runtime.controllers:
                    controller.captures.loans.begin_capture()  # GraphMemoryError if a loan lives
                    held.callback(controller.captures.loans.end_launch)
                return own(graph, *args, **kwargs)

        return capture_begin

    def _giving_away(self, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(own)
        def raw(graph: Any) -> Any:
            self._lend_no_more(graph)
            return own(graph)

        return raw
