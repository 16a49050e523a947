"""Checkmate's integer program (Jain et al., MLSys 2020, section 4): the cheapest schedule within a budget, by HiGHS.

Contract: nodes are computed one by one in a topological order, stage t ends with the first computation of node t. In a
stage a node is there because it was held since the stage before, or because it is computed (again) in it; what a node
needs is there when it is computed; what is held at any moment fits. A schedule that is called optimal costs least of
all that keep to this.

The graph of a program's blocks has a node for the forward pass of each block, which makes what the block saves, one for
its backward pass, which needs that, and one for what lies between. What a block is given stays in memory, so that each
can be recomputed by itself; this and all that blocks do not save is the `work_bytes` of the nodes, read off the run in
which every block is recomputed.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import networkx as nx
import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.fitting.frontier import Choice
from stalloc.fitting.observation import ProgramSeen
from stalloc.fitting.run_seen import CallRecorded, Foresight
from stalloc.integer_program import IntegerProgram, Terms, find_solver

_Node = tuple[str, int]
_BETWEEN: _Node = ("between", -1)


@dataclass(frozen=True)
class Schedule:
    """Which node is computed, and which is held, in which stage: arrays of truth, (stages, nodes)."""

    nodes: tuple[Hashable, ...]  #: in the order of columns
    computed: Column
    held: Column  #: from the stage before
    seconds: float  #: of all computations
    is_optimal: bool  #: False: the time was over, and a cheaper one may exist

    def again(self) -> set[Hashable]:
        return {node for node, count in zip(self.nodes, self.computed.sum(0).tolist(), strict=True) if count > 1}


def optimal_schedule(graph: nx.DiGraph, budget_bytes: int, *, limit_seconds: float = 60.0) -> Schedule | None:
    """The cheapest schedule of a graph of nodes with `seconds`, `size_bytes` and, while they run, `work_bytes`. Edges
    go to a node from those that it needs; the order of nodes is kept where the edges allow it. None: there is no
    schedule within the budget, or none was found in time. Raises SetupError without SciPy, BadInputError for a graph
    with a cycle."""
    find_solver()
    if not nx.is_directed_acyclic_graph(graph):
        raise BadInputError("the graph of operations has a cycle: nothing can be computed in any order.")
    rank = {node: row for row, node in enumerate(graph)}
    nodes = tuple(nx.lexicographical_topological_sort(graph, rank.__getitem__))
    if not nodes:
        return Schedule((), np.zeros((0, 0), bool), np.zeros((0, 0), bool), 0.0, is_optimal=True)
    program = _Program(nx.relabel_nodes(graph, {node: row for row, node in enumerate(nodes)}), budget_bytes)
    values, is_optimal = program.program.solve(limit_seconds)
    if values is None:
        return None
    computed, held = ((values[rows] > 0.5) & (rows >= 0) for rows in (program.computed, program.held))
    seconds = np.array([graph.nodes[node]["seconds"] for node in nodes], float)
    return Schedule(nodes, computed, held, float(computed.sum(0) @ seconds), is_optimal=is_optimal)


class _Program:
    """Variables and constraints, of nodes that are numbered in the order in which they are computed. Memory is counted
    in budgets and time in the time of one computation of everything, so that numbers stay near one."""

    def __init__(self, graph: nx.DiGraph, budget_bytes: int) -> None:
        num, unit = len(graph), max(1, budget_bytes)
        self._needs = [sorted(graph.predecessors(node)) for node in range(num)]
        self._users = [sorted(graph.successors(node)) for node in range(num)]
        self._size = [graph.nodes[node]["size_bytes"] / unit for node in range(num)]
        self._work = [graph.nodes[node].get("work_bytes", 0) / unit for node in range(num)]
        self._last = [max(nx.descendants(graph, node), default=node) for node in range(num)]
        self._budget = float(budget_bytes > 0)
        self.program = IntegerProgram()
        self.computed, self.held = np.full((num, num), -1), np.full((num, num), -1)
        total = sum(graph.nodes[node]["seconds"] for node in range(num)) or 1.0
        for stage in range(num):
            for node in range(stage + 1):
                cost = graph.nodes[node]["seconds"] / total
                self.computed[stage, node] = self.program.variable(cost, lowest=float(node == stage))
                if node < stage <= self._last[node]:
                    self.held[stage, node] = self.program.variable(0.0)
        for stage in range(num):
            self._presence(stage)
            self._memory(stage)

    def _presence(self, stage: int) -> None:
        """Constrain what a node needs to be there, and what is held to have been there."""
        computed, held = self.computed[stage], self.held[stage]
        for node in range(stage + 1):
            for needed in self._needs[node]:
                self.program.limit([(computed[node], 1), (computed[needed], -1), (held[needed], -1)], -np.inf, 0)
            if node < stage:  # what nobody uses is neither computed nor held in an optimal schedule
                uses = [(computed[user], -1.0) for user in self._users[node] if user <= stage]
                uses += [(self.held[stage + 1, node], -1.0)] if stage + 1 < len(self.held) else []
                self.program.limit([(computed[node], 1), *uses], -np.inf, 0)
                self.program.limit([(held[node], 1), *uses], -np.inf, 0)
            if held[node] >= 0:
                # one that is held is not computed
                self.program.limit([(held[node], 1), (computed[node], 1)], -np.inf, 1)
                before = [(self.computed[stage - 1, node], -1), (self.held[stage - 1, node], -1)]
                self.program.limit([(held[node], 1), *before], -np.inf, 0)

    def _memory(self, stage: int) -> None:
        """The memory held after each node of a stage: a result goes once no later node of the stage needs it."""
        computed, held = self.computed[stage], self.held[stage]
        later = self.held[stage + 1] if stage + 1 < len(self.held) else np.full(len(held), -1)
        there: Terms = [(held[node], self._size[node]) for node in range(stage)]
        before, freed = -1, list[tuple[int, float]]()
        for node in range(stage + 1):
            work = self._work[node]
            now = self.program.variable(0.0, is_integer=False, highest=self._budget)
            former = [(before, -1), *freed] if before >= 0 else [(column, -size) for column, size in there]
            self.program.limit([(now, 1), (computed[node], -self._size[node]), *former], 0, 0)
            if work:
                self.program.limit([(now, 1), (computed[node], work)], -np.inf, self._budget)
            freed = []
            for gone in (*self._needs[node], node):
                column = self.program.variable(0.0, is_integer=False)  # an integer where the others are
                keeps = [later[gone]] if later[gone] >= 0 else []
                keeps += [computed[user] for user in self._users[gone] if node < user <= stage]
                self.program.limit([(column, 1), (computed[node], -1)], -np.inf, 0)
                for kept in keeps:
                    self.program.limit([(column, 1), (kept, 1)], -np.inf, 1)
                self.program.limit([(column, 1), (computed[node], -1), *((kept, 1) for kept in keeps)], 0, np.inf)
                freed.append((column, self._size[gone]))
            before = now


def optimal_blocks(
    step: ProgramSeen, foresight: Foresight, whole: Mapping[int, Choice], target_bytes: int
) -> tuple[dict[int, Choice] | None, bool]:
    """The blocks to recompute as a whole that cost least within what may be allocated, and whether that is proven. None
    for the blocks: all of them together are not enough, or no choice was found in time."""
    schedule = optimal_schedule(_block_graph(step, foresight, whole), target_bytes)
    if schedule is None:
        return None, True
    again = schedule.again()
    return {row: choice for row, choice in whole.items() if ("forward", row) in again}, schedule.is_optimal


def _block_graph(step: ProgramSeen, foresight: Foresight, whole: Mapping[int, Choice]) -> nx.DiGraph:
    """Nodes ("forward", row), ("between", -1) and ("backward", row) in the order of a step."""
    calls = [call for call in foresight.calls if call.block in whole and call.forward and call.again]
    saved = {
        row: max(call.saved_bytes for call in step.calls if call.block == row) * _most_open(calls, row)
        for row in dict.fromkeys(call.block for call in calls)
    }
    peaks = _peaks(foresight.load(dict.fromkeys(whole, ())), calls)
    graph = nx.DiGraph()
    for row, size in saved.items():
        work = max(0, peaks.get(("forward", row), 0) - size)
        graph.add_node(("forward", row), seconds=whole[row].seconds, size_bytes=size, work_bytes=work)
    before = _BETWEEN
    graph.add_node(before, seconds=0.0, size_bytes=0, work_bytes=peaks.get(before, 0))
    for row in reversed(saved):
        node = ("backward", row)
        work = max(0, peaks.get(node, 0) - saved[row])
        graph.add_node(node, seconds=0.0, size_bytes=0, work_bytes=work)
        graph.add_edge(before, node)
        graph.add_edge(("forward", row), node)
        before = node
    return graph


def _most_open(calls: list[CallRecorded], row: int) -> int:
    """How many calls of a block wait for their backward pass at the same time, at the most."""
    own = [call for call in calls if call.block == row]
    begins, ends = [call.forward[0][0] for call in own], [call.again[0][0] for call in own]
    return max(sum(one <= begin for one in begins) - sum(end <= begin for end in ends) for begin in begins)


def _peaks(load: Column, calls: list[CallRecorded]) -> dict[_Node, int]:
    """The most that is allocated during each node: from where it begins until the next begins."""
    begins = list(_begins(calls))
    peaks: dict[_Node, int] = {}
    for (begin, node), (end, _) in zip(begins, [*begins[1:], (len(load), _BETWEEN)], strict=True):
        peaks[node] = max(peaks.get(node, 0), int(load[begin : max(end, begin + 1)].max(initial=0)))
    return peaks


def _begins(calls: list[CallRecorded]) -> Iterator[tuple[int, _Node]]:
    """The events at which nodes begin; what follows the last forward pass of a block belongs to "between"."""
    forward = [(call.forward[0][0], ("forward", call.block), call.forward[-1][1]) for call in calls]
    marks = sorted([*forward, *((call.again[0][0], ("backward", call.block), 0) for call in calls)])
    for number, (begin, node, end) in enumerate(marks):
        yield begin, node
        if node[0] == "forward" and number + 1 < len(marks) and marks[number + 1][1][0] == "backward":
            yield end, _BETWEEN
