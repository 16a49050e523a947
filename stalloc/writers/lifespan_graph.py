"""The groups of a trace's lifespans and their overlaps as a file: GraphML for graph tools, JSON for everything else.

Contract: a node is a group of requests that are born in one phase, die in one phase and have one size, the dynamic ones
apart from the others; an edge says that two groups are live together. Phases are numbered in order; -1 is before
recording, the number of phases is never.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from stalloc.errors import BadInputError
from stalloc.lifespans import classify, cut_events, find_step_period, fold, lifespan_graph
from stalloc.trace import Trace
from stalloc.writers.writing import write_chunks


@dataclass(frozen=True, eq=False)
class Relations:
    """How the lifespans of one device hang together."""

    device: int
    graph: nx.Graph  #: the graph of the groups, with plain attributes; nodes are numbered
    cut_events: list[int]
    """Events before which next to nothing but persistent requests is live: there the trace can be split."""


def relations(trace: Trace) -> Relations:
    """Group the requests of a trace and say where it falls apart."""
    step = find_step_period(trace)
    classes = classify(trace, fold(trace, period=step) if step else None)
    groups = lifespan_graph(trace, classes)
    graph = nx.Graph(device=trace.device, phases=len(classes.phases.begin))
    number = {group: index for index, group in enumerate(groups)}
    for (birth, death, size, dynamic), told in groups.nodes(data=True):
        kept = {name: told[name] for name in ("requests", "bytes", "peak_requests", "peak_bytes")}
        index = number[birth, death, size, dynamic]
        graph.add_node(index, birth_phase=birth, death_phase=death, size_bytes=size, dynamic=bool(dynamic), **kept)
    graph.add_edges_from((number[one], number[other]) for one, other in groups.edges)
    return Relations(trace.device, graph, cut_events(trace, classes).tolist())


def write_relations(path: Path, devices: Sequence[Relations]) -> None:
    """Write one file: GraphML of one device if its name ends in .graphml, else JSON with the cuts.

    Raises BadInputError if the file cannot be written, or GraphML is wanted of several devices.
    """
    if path.suffix != ".graphml":
        told = [
            {
                "device": device.device,
                "phases": device.graph.graph["phases"],
                "cut_events": device.cut_events,
                "nodes": [{"id": number, **attributes} for number, attributes in device.graph.nodes(data=True)],
                "edges": [list(edge) for edge in device.graph.edges],
            }
            for device in devices
        ]
        write_chunks(path, [json.dumps({"devices": told}).encode() + b"\n"])
        return
    if len(devices) != 1:
        raise BadInputError(f"{path}: GraphML holds one graph and there are {len(devices)} devices: name a .json file.")
    lines = nx.generate_graphml(devices[0].graph)
    write_chunks(path, (f"{line}\n".encode() for line in lines))
