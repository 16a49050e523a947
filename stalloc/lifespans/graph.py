"""The lifespan graph: which kinds of requests are live together, and where a trace falls apart.

A node is a group of requests with the same birth phase, death phase and size (the HomoPhase and HomoSize groups of
STAlloc, EuroSys 2026, section 5), an edge says that two groups are live at the same time. There is never an edge for
each overlapping pair of requests: that would be quadratic.
"""

from typing import TYPE_CHECKING

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.lifespans.classes import Classes, LifespanClass
from stalloc.lifespans.load_curves import load_curve
from stalloc.trace import Trace

if TYPE_CHECKING:
    import networkx as nx

_MAX_GROUPS = 2048


def lifespan_graph(trace: Trace, classes: Classes) -> "nx.Graph":
    """The groups of a trace and their overlaps.

    Nodes are (birth phase, death phase, size in bytes) with attributes `requests`, `bytes` (the sum), `peak_requests`
    and `peak_bytes` (live at a time) and `rows` (of the trace). With more than 2048 groups, sizes are rounded up to
    powers of two, then neighbouring phases are taken together in pairs until there are few enough. Edges have no
    attributes; a group has no edge to itself.
    """
    import networkx as nx  # takes long, and whoever only asks for lifespans does without

    birth, death, size = classes.birth_phase, classes.death_phase, trace.size
    keys, group = _groups(birth, death, size)
    if len(keys) > _MAX_GROUPS:
        size = 1 << np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)
        keys, group = _groups(birth, death, size)
    while len(keys) > _MAX_GROUPS:
        birth, death = birth >> 1, death >> 1
        keys, group = _groups(birth, death, size)
    graph = nx.Graph()
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group, minlength=len(keys)))[:-1])
    nodes = [tuple(int(value) for value in key) for key in keys]
    for node, rows in zip(nodes, members, strict=True):
        once = np.ones(len(rows), np.int64)
        graph.add_node(
            node,
            requests=len(rows),
            bytes=int(trace.size[rows].sum()),
            peak_requests=int(load_curve(trace.start[rows], trace.end[rows], once)[1].max()),
            peak_bytes=int(load_curve(trace.start[rows], trace.end[rows], trace.size[rows])[1].max()),
            rows=rows,
        )
    together = _live_together(trace, group, len(keys))
    graph.add_edges_from((nodes[i], nodes[j]) for i, j in zip(*np.nonzero(np.triu(together, 1)), strict=True))
    return graph


def cut_events(trace: Trace, classes: Classes, most_live: float = 0.02) -> Column:
    """Events before which next to nothing but persistent requests is live: there the trace can be split.

    (k,) events, at most one in each stretch in which at most `most_live` of the peak is live; the least of it.
    """
    passing = classes.lifespan != LifespanClass.PERSISTENT
    start = np.maximum(trace.start, 0)[passing]
    events, live = load_curve(start, trace.end[passing], trace.size[passing])
    inside = events < trace.num_events
    events, live = events[inside], live[inside]
    if not len(events):
        return np.empty(0, np.int64)
    quiet = live <= most_live * live.max()
    stretch = np.cumsum(np.concatenate([[True], quiet[1:] != quiet[:-1]]))
    cuts = []
    for number in distinct(stretch[quiet]):
        at = np.flatnonzero(stretch == number)
        cuts.append(events[at[np.argmin(live[at])]] + 1)
    return np.array(cuts, np.int64)


def _groups(birth: Column, death: Column, size: Column) -> tuple[Column, Column]:
    """(g, 3) keys and the (n,) group of each request."""
    rows = np.stack([birth, death, size], axis=1)
    if not len(rows):
        return rows, np.empty(0, np.int64)
    keys, group = np.unique(rows, axis=0, return_inverse=True)
    return keys, group.reshape(-1)


def _live_together(trace: Trace, group: Column, num_groups: int) -> Column:
    """(g, g) bool. One sweep; a group is compared with the others only when it becomes live."""
    at = np.concatenate([trace.end, trace.start])
    begins = np.repeat([0, 1], trace.num_requests)  # at one event, what ends goes first: intervals are half open
    order = np.lexsort((begins, at))
    together = np.zeros((num_groups, num_groups), bool)
    live = np.zeros(num_groups, np.int64)
    for index in order:
        which = group[index % trace.num_requests]
        if begins[index]:
            if live[which] == 0:
                together[which] |= live > 0
            live[which] += 1
        else:
            live[which] -= 1
    return together | together.T
