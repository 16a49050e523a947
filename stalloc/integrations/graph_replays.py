"""Replays of torch's CUDA graphs, and what else may launch them: borrowers of their memory have to be done before.

Contract: stands in the place of torch's methods as long as stalloc serves torch, before any graph is captured, so that
no replay is missed; it costs a replay about a microsecond. What launches a graph otherwise has to ask for it first: its
pool lends nothing from then on.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from stalloc.runtime import Runtime
from stalloc.runtime.loans import Loans

_RAW = "raw_cuda_graph", "raw_cuda_graph_exec"  # in versions of torch that have them


def watch_replays(torch: Any, runtime: Runtime) -> None:
    """Hear of each replay and capture of torch's from here on."""
    graphs, current_stream = torch.cuda.CUDAGraph, torch._C._cuda_getCurrentRawStream
    own_replay, own_begin = graphs.replay, graphs.capture_begin

    def pools_of(graph: Any) -> list[tuple[Loans, int, int]]:
        """On each device that knows the pool of a graph: what is lent there, the pool's kind, the current stream."""
        try:
            pool = graph.pool()
        except RuntimeError:  # nothing was captured
            return []
        return [
            (one.captures.loans, one.captures.pools[pool][0], current_stream(one.device.index))
            for one in runtime.controllers
            if pool in one.captures.pools
        ]

    def lend_no_more(graph: Any) -> None:
        for loans, kind, _ in pools_of(graph):
            loans.lend_no_more(kind)

    @functools.wraps(own_replay)
    def replay(graph: Any) -> Any:
        pools = pools_of(graph)
        if pools and torch.cuda.is_current_stream_capturing():  # it becomes a part of another graph
            lend_no_more(graph)
            return own_replay(graph)
        begun: list[Loans] = []
        try:
            for loans, kind, stream in pools:
                if loans.begin_replay(kind, stream):
                    begun.append(loans)
            return own_replay(graph)
        finally:
            for loans in begun:
                loans.end_launch()

    @functools.wraps(own_begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        with _held(runtime):
            return own_begin(graph, *args, **kwargs)

    def launching_raw(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def raw(graph: Any) -> Any:
            lend_no_more(graph)
            return own(graph)

        return raw

    graphs.replay, graphs.capture_begin = replay, capture_begin
    for name in _RAW:
        if hasattr(graphs, name):
            setattr(graphs, name, launching_raw(getattr(graphs, name)))


@contextlib.contextmanager
def _held(runtime: Runtime) -> Iterator[None]:
    """Nothing is lent on any device meanwhile. Raises GraphMemoryError if a loan lives."""
    with contextlib.ExitStack() as held:
        for controller in runtime.controllers:
            controller.captures.loans.begin_capture()
            held.callback(controller.captures.loans.end_launch)
        yield
