"""A picture of the lifespan graph of one step: phases from left to right, sizes from bottom to top.

Contract: what is drawn is `stalloc.lifespans.lifespan_graph` of the trace, without the groups below `LEAST_BYTES`.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import networkx as nx

from stalloc.figures import human_bytes
from stalloc.lifespans import classify, find_step_period, fold, lifespan_graph
from stalloc.trace import load_traces

LEAST_BYTES = 1 << 20
#: square points for each MiB that a group holds at most
AREA = 4.0


def draw(file: Path, picture: Path) -> None:
    """Draw the second step of a recording of three, which has a phase that rises and one that falls."""
    trace = load_traces(file)[0]
    period = find_step_period(trace)
    classes = classify(trace, fold(trace, period=period) if period else None)
    graph = lifespan_graph(trace, classes)
    rise = 2
    fall = rise + 1
    assert classes.phases.name[rise : fall + 1] == ("rise", "fall"), "the recording's second step has other phases"
    shown = graph.subgraph(
        node
        for node, told in graph.nodes(data=True)
        if node[0] <= fall and node[1] >= rise and told["peak_bytes"] >= LEAST_BYTES
    )
    columns = {}  # by phases of birth and death within the step
    for node in shown:
        columns.setdefault((max(node[0], rise - 1), min(node[1], fall + 1)), []).append(node)
    ordered = sorted(columns, key=lambda column: (sum(column), column))
    sizes = sorted({node[2] for node in shown})
    place = {node: (ordered.index(column), sizes.index(node[2])) for column, nodes in columns.items() for node in nodes}
    heaviest = sorted(shown, key=lambda node: (-shown.nodes[node]["bytes"], node))
    colours = nx.greedy_color(shown, lambda _, __: heaviest)
    figure, axes = plt.subplots(figsize=(11, 6.5), layout="constrained")
    nx.draw_networkx_edges(shown, place, ax=axes, edge_color="#8894a8", alpha=0.25, width=0.7)
    nx.draw_networkx_nodes(
        shown,
        place,
        ax=axes,
        node_size=[30 + AREA * shown.nodes[node]["peak_bytes"] / (1 << 20) for node in shown],
        node_color=[colours[node] for node in shown],
        cmap="viridis",
        alpha=0.85,
        edgecolors="white",
    )
    for node, (x, y) in place.items():
        told = f"{shown.nodes[node]['peak_requests']} x {human_bytes(node[2])}"
        axes.annotate(told, (x, y), xytext=(30, -3), textcoords="offset points", fontsize=8)
    called = {rise - 1: "before", rise: "forward", fall: "backward, update", fall + 1: "later"}
    ticks = [f"born: {called[born]}\ndies: {called[dies]}" for born, dies in ordered]
    axes.set_xticks(range(len(ordered)), ticks)
    axes.tick_params(left=False, labelleft=False, bottom=True, labelbottom=True)
    axes.set_xlim(-0.6, len(ordered) - 0.4)
    axes.margins(y=0.1)
    axes.set_ylabel("size of a request, larger ones higher")
    axes.set_title(
        f"{len(shown)} groups of one step that hold 1 MiB or more, and which are live together "
        f"({shown.number_of_edges()} overlaps)",
        fontsize=11,
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(picture, dpi=90, metadata={"Software": None})
    plt.close(figure)
