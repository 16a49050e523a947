"""The graph of operations: which needs what which other made, in which order, and where it can be cut.

Contract: an operation has an edge from each that it has to come after. Of kind `value`: it reads or changes what the
other made or changed last, `requests` of `bytes` together. Of kind `order`: it changes what the other has read. The
graph has no circle, and the rows themselves are one order that it allows.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from stalloc.columns import Column, Rows
from stalloc.trace import Trace
from stalloc.trace.operations import ACCESS_WRITTEN, Operations

if TYPE_CHECKING:
    import networkx as nx

_RANDOM = ("dropout", "rand", "bernoulli", "normal_", "uniform_", "exponential_", "multinomial", "attention")


def operation_graph(trace: Trace, operations: Operations, rows: Rows) -> "nx.DiGraph":
    """The graph of some operations, given in their order, such as those of a steady step.

    Nodes are rows with attributes `name` and `made` (rows of the requests that the operation made).
    """
    import networkx as nx  # takes long, and whoever only asks for operations does without

    graph = nx.DiGraph()
    made: dict[int, list[int]] = defaultdict(list)
    for request, maker in enumerate(operations.made_by.tolist()):
        made[maker].append(request)
    last: dict[int, int] = {}  # of each request: who made or changed it last
    readers: dict[int, list[int]] = defaultdict(list)  # since then
    bounds = np.searchsorted(operations.access_op, np.stack([rows, rows + 1]))
    for row, low, high in zip(rows.tolist(), *bounds.tolist(), strict=True):
        graph.add_node(row, name=operations.name_of(row), made=made.get(row, []))
        accesses = operations.access_request[low:high].tolist(), operations.access_kind[low:high].tolist()
        for request, kind in zip(*accesses, strict=True):
            if request in last:
                _need(graph, last[request], row, request, int(trace.size[request]))
            if kind == ACCESS_WRITTEN:
                for reader in readers.pop(request, ()):
                    if reader != row and not graph.has_edge(reader, row):
                        graph.add_edge(reader, row, kind="order", requests=[], bytes=0)
                last[request] = row
            else:
                readers[request].append(row)
        for request in made.get(row, ()):
            last[request] = row
    return graph


def _need(graph: "nx.DiGraph", maker: int, user: int, request: int, num_bytes: int) -> None:
    if maker == user:
        return
    if not graph.has_edge(maker, user) or graph.edges[maker, user]["kind"] == "order":
        graph.add_edge(maker, user, kind="value", requests=[], bytes=0)
    edge = graph.edges[maker, user]
    edge["requests"].append(request)
    edge["bytes"] += num_bytes


def random_draws(operations: Operations, rows: Rows) -> list[int]:
    """The rows, of some, that may draw random numbers: what they draw depends on those before them."""
    return [row for row in rows.tolist() if any(part in operations.name_of(row) for part in _RANDOM)]


def crossing_bytes(trace: Trace, graph: "nx.DiGraph") -> Column:
    """(k,) after each operation, in order: bytes of the requests made so far in the graph that a later one needs."""
    place = {row: number for number, row in enumerate(graph)}
    last_use: dict[int, int] = {}
    made_at: dict[int, int] = {}
    for row in graph:
        for request in graph.nodes[row]["made"]:
            made_at[request] = place[row]
    for _, user, told in graph.edges(data=True):
        for request in told["requests"]:
            last_use[request] = max(last_use.get(request, -1), place[user])
    change = np.zeros(len(graph) + 1, np.int64)
    for request, begun in made_at.items():
        if last_use.get(request, -1) > begun:
            change[begun] += trace.size[request]
            change[last_use[request]] -= trace.size[request]
    return np.cumsum(change)[:-1]


def cut_operations(graph: "nx.DiGraph") -> list[int]:
    """Operations after which only what they made themselves, of all made so far in the graph, is needed later.

    There the graph falls into two parts that have one operation in common.
    """
    place = {row: number for number, row in enumerate(graph)}
    furthest, cuts = -1, []
    for row in graph:
        if furthest <= place[row]:
            cuts.append(row)
        furthest = max([furthest, *(place[user] for user in graph.successors(row))])
    return cuts[1:] if cuts and place[cuts[0]] == 0 else cuts
