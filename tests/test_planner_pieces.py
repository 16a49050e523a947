"""How a problem falls apart: what lives throughout lies below, what never meets stands side by side."""

import networkx as nx
import numpy as np
from hypothesis import strategies as st
from properties import holds_for

from stalloc.planner import decomposition, plan


def kinds(graph):
    return [(data["kind"], data["rows"].tolist(), data["base_bytes"]) for _, data in graph.nodes(data=True)]


def test_what_lives_throughout_is_a_stack_under_the_rest():
    #       throughout, then two that never meet
    graph = decomposition([0, 0, 4], [8, 4, 8], [100, 10, 20])
    assert kinds(graph) == [("stack", [0], 0), ("stack", [1], 100), ("stack", [2], 100)]
    assert sorted(graph.edges) == [(0, 1), (0, 2)]


def test_iterations_that_look_alike_are_twins():
    once = np.array([[0, 2, 4], [3, 5, 6], [512, 1024, 512]])
    start, end, size = np.concatenate([once, np.add(once, [[10], [10], [0]]), [[0], [20], [4096]]], axis=1)
    graph = decomposition(start, end, size)
    pieces = {node: data for node, data in graph.nodes(data=True) if data["kind"] == "piece"}
    first, second = pieces
    assert pieces[second]["twin"] == pieces[first]["twin"] == first
    assert {data["base_bytes"] for data in pieces.values()} == {4096}


def test_a_ladder_is_one_piece():
    graph = decomposition([0, 1, 2], [2, 3, 4], [1, 1, 1])
    assert kinds(graph) == [("piece", [0, 1, 2], 0)]


ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=14)


@holds_for(ROWS, few=26, many=300)
def test_the_pieces_packed_by_themselves_are_the_whole_packed(rows):
    start = np.array([row[0] for row in rows])
    end = start + np.array([row[1] for row in rows])
    size = 512 * np.array([row[2] for row in rows])
    graph = decomposition(start, end, size)
    assert nx.is_forest(graph.to_undirected())
    assert sorted(np.concatenate([data["rows"] for _, data in graph.nodes(data=True)])) == list(range(len(rows)))
    highest = 0
    for _, data in graph.nodes(data=True):
        part = data["rows"]
        alone = plan((start[part], end[part], size[part])).peak_bytes
        assert alone >= data["load_bytes"]
        highest = max(highest, data["base_bytes"] + alone)
    assert plan((start, end, size)).peak_bytes == highest
