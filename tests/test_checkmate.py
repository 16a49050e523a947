"""Checkmate's program: the cheapest schedule within a budget, against what is known to be optimal."""

import functools
import itertools
import math
import random
import sys

import networkx as nx
import pytest

from stalloc.errors import BadInputError, SetupError
from stalloc.fitting.checkmate import Schedule, optimal_schedule


@pytest.fixture(scope="module")
def scipy() -> None:
    pytest.importorskip("scipy.optimize")


def chain(length: int) -> nx.DiGraph:
    """A chain of unit layers whose states are given back in reverse, each from the state before it."""
    graph = nx.DiGraph()
    forward = [("forward", layer) for layer in range(1, length)]
    graph.add_nodes_from(forward, seconds=1.0, size_bytes=1)
    graph.add_edges_from(itertools.pairwise(forward))
    backward = [("backward", layer) for layer in range(length, 0, -1)]
    graph.add_nodes_from(backward, seconds=0.0, size_bytes=0)
    graph.add_edges_from(itertools.pairwise(backward))
    graph.add_edges_from((("forward", layer - 1), ("backward", layer)) for layer in range(2, length + 1))
    return graph


@functools.cache
def known_optimum(length: int, slots: int) -> float:
    """Forward steps to reverse a chain (Griewank and Walther 2000): go on to a state, reverse what is after it, then
    what is before it. A step of two or more holds two states while it goes on."""
    if length == 1:
        return 0
    if slots == 0:
        return math.inf
    middles = [middle for middle in range(1, length) if middle == 1 or slots >= 2]
    return min(middle + known_optimum(length - middle, slots - 1) + known_optimum(middle, slots) for middle in middles)


def cheapest(graph: nx.DiGraph, budget: int) -> float | None:
    """By trying everything: per stage all sets that are computed, and all that are held on."""
    nodes = list(graph)
    reached = {frozenset[int](): 0.0}
    for stage in range(len(nodes)):
        following: dict[frozenset[int], float] = {}
        for held, cost in reached.items():
            for again in subsets(range(stage)):
                computed = {*again, stage}
                for later in subsets(sorted((held | computed) - {len(nodes)})):
                    if fits(graph, nodes, computed, held, set(later), budget):
                        price = cost + sum(graph.nodes[nodes[node]]["seconds"] for node in computed)
                        following[frozenset(later)] = min(price, following.get(frozenset(later), math.inf))
        reached = following
    return min(reached.values(), default=None)


def subsets(values):
    values = list(values)
    return itertools.chain.from_iterable(itertools.combinations(values, count) for count in range(len(values) + 1))


def fits(graph, nodes, computed, held, later, budget) -> bool:
    """Whether a stage has what it needs, and never more than the budget; what nobody needs any more goes at once."""
    place = {node: row for row, node in enumerate(nodes)}
    there = list(held)
    for node in sorted(computed):
        needs = [place[one] for one in graph.predecessors(nodes[node])]
        there.append(node)
        if not set(needs) <= set(there):
            return False
        used = sum(graph.nodes[nodes[one]]["size_bytes"] for one in there)
        if used + graph.nodes[nodes[node]].get("work_bytes", 0) > budget:
            return False
        for gone in (*needs, node):
            users = {place[one] for one in graph.successors(nodes[gone])}
            if gone not in later and not any(user > node and user in computed for user in users):
                there.remove(gone)
    return later <= set(there)


def check(graph: nx.DiGraph, schedule: Schedule, budget: int) -> None:
    """Every stage of a schedule can be done within the budget."""
    nodes = list(schedule.nodes)
    held: set[int] = set()
    for stage in range(len(nodes)):
        computed = set(schedule.computed[stage].nonzero()[0].tolist())
        later = set(schedule.held[stage + 1].nonzero()[0].tolist()) if stage + 1 < len(nodes) else set()
        assert stage in computed
        assert held == set(schedule.held[stage].nonzero()[0].tolist())
        assert fits(graph, nodes, computed, held, later, budget)
        held = later


@pytest.mark.usefixtures("scipy")
@pytest.mark.parametrize(("length", "budget"), [(5, 2), (5, 3), (5, 4), (8, 3), (8, 4)])
def test_chains_cost_what_is_known_to_be_the_least(length: int, budget: int) -> None:
    schedule = optimal_schedule(chain(length), budget)
    assert schedule is not None
    assert schedule.is_optimal
    assert schedule.seconds == known_optimum(length, budget)
    check(chain(length), schedule, budget)


@pytest.mark.slow
@pytest.mark.usefixtures("scipy")
def test_a_chain_of_33_nodes_costs_what_is_known_to_be_the_least() -> None:
    schedule = optimal_schedule(chain(17), 5)
    assert schedule is not None
    assert schedule.is_optimal
    assert schedule.seconds == known_optimum(17, 5) == 27
    check(chain(17), schedule, 5)


@pytest.mark.usefixtures("scipy")
@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_cost_what_trying_everything_finds(seed: int) -> None:
    numbers = random.Random(seed)
    graph = nx.DiGraph()
    for node in range(5):
        graph.add_node(node, seconds=numbers.randint(1, 5), size_bytes=numbers.randint(1, 4),
                       work_bytes=numbers.randint(0, 3))  # fmt: skip
        graph.add_edges_from((other, node) for other in range(node) if numbers.random() < 0.5)
    for budget in (6, 8, 10):
        schedule = optimal_schedule(graph, budget)
        assert (None if schedule is None else schedule.seconds) == cheapest(graph, budget)
        if schedule is not None:
            check(graph, schedule, budget)


@pytest.mark.usefixtures("scipy")
def test_what_cannot_be_scheduled_is_none_or_a_sentence() -> None:
    assert optimal_schedule(chain(5), 1) is None
    with pytest.raises(BadInputError, match="has a cycle"):
        optimal_schedule(nx.DiGraph([(0, 1), (1, 0)]), 1)


def test_without_scipy_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(SetupError, match="pip install"):
        optimal_schedule(chain(2), 1)
