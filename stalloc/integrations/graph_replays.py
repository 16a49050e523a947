"""Replays of torch's CUDA graphs, and what else may launch them: borrowers of their memory have to be done before.

Contract: stands in the place of torch's methods from before the first capture, so that no replay is missed. As long as
nobody has borrowed a replay is only passed on. What launches a graph otherwise has to ask for its handle first, or
makes it a part of another graph: its pool lends nothing from then on.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from stalloc.runtime import Runtime
from stalloc.runtime.captures import Loans

_RAW = "raw_cuda_graph", "raw_cuda_graph_exec"  # in versions of torch that have them


class Replays:
    """Sees the replays and captures of torch's CUDA graphs in this process."""

    def __init__(self, torch: Any, runtime: Runtime) -> None:
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

    def _pools_of(self, graph: Any) -> list[tuple[Loans, int, int]]:
        """Loans, kind of pool and current stream (handle) on each device that knows the pool of a graph."""
        try:
            pool = graph.pool()
        except RuntimeError:  # nothing was captured
            return []
        controllers = [one for one in self._runtime.controllers if pool in one.captures.pools]
        return [
            (one.captures.loans, one.captures.pools[pool][0], self._current_stream(one.device.index))
            for one in controllers
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
            return self._replay(own, graph)

        return replay

    def _replay(self, own: Callable[[Any], Any], graph: Any) -> Any:
        begun: list[Loans] = []
        try:
            for loans, kind, stream in self._pools_of(graph):
                if loans.begin_replay(kind, stream):
                    begun.append(loans)
            return own(graph)
        finally:
            for loans in begun:
                loans.end_launch()

    def _capturing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            with self._held():
                return own(graph, *args, **kwargs)

        return capture_begin

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Nothing is lent on any device meanwhile. Raises GraphMemoryError if a loan lives."""
        with contextlib.ExitStack() as held:
            for controller in self._runtime.controllers:
                controller.captures.loans.begin_capture()
                held.callback(controller.captures.loans.end_launch)
            yield

    def _giving_away(self, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(own)
        def raw(graph: Any) -> Any:
            self._lend_no_more(graph)
            return own(graph)

        return raw
