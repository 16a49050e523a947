"""A cycle of moves broken by whole blocks: some wait in the bounce buffer while the others take their places.

Contract: a component is broken or refused before any copy is added; a plain cycle needs just its smallest block in the
bounce buffer, which is the least that whole blocks can do.
"""

from heapq import heapify, heappop

import networkx as nx

from stalloc.compaction.schedule import BOUNCE, Copies
from stalloc.sizes import aligned

_RECOMPUTE = 100  # blocks up to which components are found anew after one of them was broken

Move = tuple[int, int, int]  #: source, target, bytes


def broken_by_whole_blocks(
    waits: list[tuple[int, int]], moves: dict[int, Move], most_bytes: int
) -> "WholeBlocks | None":
    """How one component is broken with a bounce buffer of at most so many bytes; None if that is too small.

    `waits` are pairs of a block and one that it waits for.
    """
    plan = WholeBlocks(moves)
    return plan if plan.breaks(nx.DiGraph(waits), most_bytes) else None


class WholeBlocks:
    """The copies of one component, in which the smallest blocks wait; where cycles share blocks, several at once."""

    def __init__(self, moves: dict[int, Move]) -> None:
        self._moves = moves
        self._steps: list[tuple[int, int, int]] = []  # wave, block, place in the bounce buffer (-1: not through it)
        self._back: list[tuple[int, int, int]] = []  # wave, block, place: from the bounce buffer to the target
        self.bounce_bytes = 0
        self.num_waves = 0

    def breaks(self, graph: nx.DiGraph, most_bytes: int) -> bool:
        """Find the copies; False if the blocks that wait have no room."""
        waits = {i: set(graph.successors(i)) for i in graph}
        start = dict.fromkeys(graph, 0)
        left, used = set(graph), 0
        ready: list[int] = []
        held: dict[int, int] = {}  # block -> its place in the bounce buffer
        smallest = [(self._moves[i][2], i) for i in graph]
        heapify(smallest)
        while left or held:
            if not ready:
                victim = self._victim(graph, left, smallest)
                count = self._moves[victim][2]
                place, used = used, used + aligned(count)
                if place + count > most_bytes:
                    return False
                self.bounce_bytes = max(self.bounce_bytes, place + count)
                # its own wave does not matter, since nothing was written there yet
                self._steps.append((0, victim, place))
                held[victim] = place
                left.discard(victim)
                freed, wave = victim, 1
            else:
                freed = ready.pop()
                if freed in held:
                    self._back.append((start[freed], freed, held.pop(freed)))
                    self.num_waves = max(self.num_waves, start[freed] + 1)
                    continue
                self._steps.append((start[freed], freed, -1))
                left.discard(freed)
                wave = start[freed] + 1
                self.num_waves = max(self.num_waves, wave)
            for i in graph.predecessors(freed):
                start[i] = max(start[i], wave)
                waits[i].discard(freed)
                if not waits[i] and (i in left or i in held):
                    ready.append(i)
        return True

    def _victim(self, graph: nx.DiGraph, left: set[int], smallest: list[tuple[int, int]]) -> int:
        """The smallest block that is in a cycle; among very many blocks, the smallest that has not moved."""
        if len(left) > _RECOMPUTE or not self._steps:
            while smallest[0][1] not in left:
                heappop(smallest)
            return smallest[0][1]
        components = nx.strongly_connected_components(graph.subgraph(left))
        cycles = [i for component in components if len(component) > 1 for i in component]
        return min(cycles, key=lambda i: (self._moves[i][2], i))

    def add(self, copies: Copies, wave: int, bounce_at: int) -> None:
        """The copies, from a wave on, with the bounce buffer's part that begins at `bounce_at`."""
        for at, i, place in self._steps:
            source, target, count = self._moves[i]
            copies.add(wave + at, source, target if place < 0 else BOUNCE + bounce_at + place, count)
        for at, i, place in self._back:
            _, target, count = self._moves[i]
            copies.add(wave + at, BOUNCE + bounce_at + place, target, count)
