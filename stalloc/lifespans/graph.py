"""The lifespan graph: which kinds of requests are live together, and where a trace falls apart.

A node is a group of requests with the same birth phase, death phase and size (the HomoPhase and HomoSize groups of
STAlloc, EuroSys 2026, section 5), those that vary from step to step apart from those that do not; an edge says that two
groups are live at the same time. There is never an edge for each overlapping pair of requests: that would be quadratic.
"""

from typing import TYPE_CHECKING

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.compiled import njit
from stalloc.lifespans.classes import Classes, LifespanClass, Regularity
from stalloc.lifespans.load_curves import load_curve
from stalloc.trace import Trace

if TYPE_CHECKING:
    import networkx as nx

_MAX_GROUPS = 2048


def lifespan_graph(trace: Trace, classes: Classes) -> "nx.Graph":
    """The groups of a trace and their overlaps.

    Nodes are (birth phase, death phase, size in bytes, whether dynamic), of which there are at most 2048, with the
    attributes and edges that `group_graph` gives them.
    """
    dynamic = classes.regularity == Regularity.DYNAMIC
    keys = few_keys(classes.birth_phase, classes.death_phase, trace.size, dynamic, _MAX_GROUPS)
    return group_graph(trace.start, trace.end, trace.size, keys)


def few_keys(birth: Column, death: Column, size: Column, dynamic: Column, most: int) -> Column:
    """(n, 4) keys of n requests: birth phase, death phase, size and whether dynamic, of which at most `most` differ.

    If there are more, sizes are rounded up to powers of two, then neighbouring phases are taken together in pairs until
    there are few enough.
    """
    keys = np.stack([birth, death, size, dynamic], axis=1).astype(np.int64)
    if len(_numbered(keys)[0]) > most:
        keys[:, 2] = 1 << np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)
    while len(_numbered(keys)[0]) > most and (keys[:, :2] >> 1 != keys[:, :2]).any():
        keys[:, :2] >>= 1
    return keys


def group_graph(start: Column, end: Column, size: Column, keys: Column) -> "nx.Graph":
    """The groups of n requests with equal `keys` (n, k) and their overlaps; lifespans [start, end), sizes in bytes.

    Nodes are the keys, ascending, with attributes `requests`, `bytes` (the sum), `peak_requests` and `peak_bytes` (live
    at a time) and `rows`. Edges have no attributes; a group has no edge to itself.
    """
    import networkx as nx  # takes long, and whoever only asks for lifespans does without

    graph = nx.Graph()
    if not len(keys):
        return graph
    distinct_keys, group = _numbered(keys)
    num_groups = len(distinct_keys)
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group, minlength=num_groups))[:-1])
    nodes = [tuple(key) for key in distinct_keys.tolist()]
    for node, rows in zip(nodes, members, strict=True):
        once = np.ones(len(rows), np.int64)
        graph.add_node(
            node,
            requests=len(rows),
            bytes=int(size[rows].sum()),
            peak_requests=int(load_curve(start[rows], end[rows], once)[1].max()),
            peak_bytes=int(load_curve(start[rows], end[rows], size[rows])[1].max()),
            rows=rows,
        )
    # at one event, what ends goes first: intervals are half open
    changes = np.argsort(np.concatenate([end, start]), kind="stable")
    together = np.zeros((num_groups, num_groups), bool)
    _live_together(changes, group, together)
    graph.add_edges_from((nodes[i], nodes[j]) for i, j in np.argwhere(np.triu(together, 1)).tolist())
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


def _numbered(keys: Column) -> tuple[Column, Column]:
    """The (g, k) different rows of (n, k) keys, ascending, and the (n,) number of each row."""
    order = np.lexsort(keys.T[::-1])
    differs = (np.diff(keys[order], axis=0) != 0).any(axis=1)
    group = np.empty(len(keys), np.int64)
    group[order] = np.concatenate([[0], np.cumsum(differs)])[: len(keys)]
    return keys[order[np.concatenate([[True], differs])[: len(keys)]]], group


@njit()
def _live_together(changes, group, together):
    """Write (g, g) which groups are ever live together; `changes`: i ends if below n, else i - n begins.

    A group is compared with the others only when it becomes live.
    """
    num_requests = len(group)
    live = np.zeros(len(together), np.int64)
    for change in changes:
        if change < num_requests:
            live[group[change]] -= 1
            continue
        mine = group[change - num_requests]
        if live[mine] == 0:
            for other in range(len(live)):
                if live[other] > 0:
                    together[mine, other] = together[other, mine] = True
        live[mine] += 1
