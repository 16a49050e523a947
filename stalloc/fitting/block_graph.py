"""The graph of a program's blocks for Checkmate's program, and its answer as choices of what is recomputed.

Contract: a node for the forward pass of each block, which makes what the block saves, one for its backward pass, which
needs that, and one for what lies between. What a block is given stays in memory, so that each can be recomputed by
itself; this and all that blocks do not save is the `work_bytes` of the nodes, read off the run in which every block is
recomputed.
"""

from collections.abc import Iterator, Mapping

import networkx as nx

from stalloc.columns import Column
from stalloc.fitting.checkmate import optimal_schedule
from stalloc.fitting.frontier import Choice
from stalloc.fitting.observation import ProgramSeen
from stalloc.fitting.run_seen import CallRecorded, Foresight

_Node = tuple[str, int]
_BETWEEN: _Node = ("between", -1)


def optimal_blocks(
    step: ProgramSeen, foresight: Foresight, whole: Mapping[int, Choice], target_bytes: int
) -> tuple[dict[int, Choice] | None, bool]:
    """The blocks to recompute as a whole that cost least within what may be allocated, and whether that is proven.

    None for the blocks: all of them together are not enough, or no choice was found in time.
    """
    graph = block_graph(step, foresight, whole)
    schedule = optimal_schedule(graph, target_bytes)
    if schedule is None:
        return None, True
    again = schedule.again()
    return {row: choice for row, choice in whole.items() if ("forward", row) in again}, schedule.is_optimal


def block_graph(step: ProgramSeen, foresight: Foresight, whole: Mapping[int, Choice]) -> nx.DiGraph:
    """The graph, with nodes ("forward", row), ("between", -1) and ("backward", row) in the order of a step."""
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
