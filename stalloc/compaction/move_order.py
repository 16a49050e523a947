"""From blocks and their targets to waves of copies: what is free first, slides in the safe direction, cycles broken.

Contract: raises before anything is moved, or returns a Schedule whose execution, wave after wave, leaves each block at
its target and touches nothing but sources, targets and the bounce buffer.

A block waits for the blocks whose sources its target covers. Sources share no bytes, nor do targets, so that those it
waits for are neighbours in order of address and all such pairs are at most twice as many as the blocks. What waits for
nothing that has not moved gets its wave in one pass, and so do plain cycles (levels.py); only what is left, where
cycles share blocks, becomes a graph in networkx, whose strongly connected components are done one by one.
"""

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from stalloc.columns import Column
from stalloc.compaction import levels
from stalloc.compaction.chasing import chase
from stalloc.compaction.schedule import BOUNCE, Copies, Schedule, column
from stalloc.compaction.whole_blocks import broken_by_whole_blocks
from stalloc.errors import BadInputError
from stalloc.sizes import ALIGNMENT_BYTES, aligned

#: copies in one schedule; more come only from large blocks that slide by a few bytes
MAX_COPIES = 1 << 22


def order_moves(
    source: ArrayLike,
    target: ArrayLike,
    size: ArrayLike,
    *,
    bounce_bytes: int = 0,
    fixed: tuple[ArrayLike, ArrayLike] | None = None,
) -> Schedule:
    """Waves that bring n blocks from `source` to `target`: (n,) offsets or addresses and sizes in bytes.

    `bounce_bytes`: how large a bounce buffer may be; only what is needed of it is used. `fixed`: (m,) addresses and
    sizes of blocks that stay. Blocks that are where they belong, and empty ones, are no moves.

    Raises BadInputError: sources or targets that share bytes, targets on fixed blocks, cycles without a bounce buffer.
    """
    a, b, n = (column(x, name) for x, name in ((source, "source"), (target, "target"), (size, "size")))
    if not len(a) == len(b) == len(n):
        raise BadInputError(
            f"{len(a)} sources, {len(b)} targets and {len(n)} sizes do not belong together: give one of each a move."
        )
    if (n < 0).any() or (a < 0).any() or (b < 0).any() or bounce_bytes < 0:
        raise BadInputError("addresses and sizes have to be 0 or more: correct them.")
    _check(a, n, "source")
    _check(b, n, "target")
    rest = (n > 0) & (a == b)
    places = [(a[rest], n[rest])]
    if fixed is not None:
        places.append((column(fixed[0], "fixed"), column(fixed[1], "fixed")))
    moving = np.flatnonzero((n > 0) & (a != b))
    moving = moving[np.argsort(a[moving], kind="stable")]
    a, b, n = a[moving], b[moving], n[moving]
    _check(
        np.concatenate([b, *(low for low, _ in places)]), np.concatenate([n, *(count for _, count in places)]), "target"
    )
    return _Ordering(a, b, n, bounce_bytes).schedule()


def _check(low: Column, size: Column, name: str) -> None:
    """Raise if two ranges share bytes."""
    low, size = low[size > 0], size[size > 0]
    order = np.argsort(low, kind="stable")
    low, size = low[order], size[order]
    clash = np.flatnonzero(low[1:] < (low + size)[:-1])
    if len(clash):
        at = int(low[clash[0] + 1])
        raise BadInputError(f"the {name} at byte {at} lies on another block: no order of moves can do that.")


class _Ordering:
    """The order of one set of moves, sorted by source."""

    def __init__(self, source: Column, target: Column, size: Column, bounce_bytes: int) -> None:
        self.source, self.target, self.size = source, target, size
        self.bounce_bytes = bounce_bytes
        self.copies = Copies()
        # blocks [low, high) have sources under a block's target
        self.low = np.searchsorted(source + size, target, side="right")
        self.high = np.maximum(np.searchsorted(source, target + size, side="left"), self.low)
        distance = np.abs(target - source)
        chunk = self._chunk(bounce_bytes)
        self.slides = distance < size
        # a slide goes in pieces as long as its distance, or through the bounce buffer where that is faster
        self.through = self.slides & (chunk > 2 * distance)
        direct, bounced = -(-size // distance), 2 * -(-size // max(chunk, 1))
        self.duration = np.where(self.through, bounced, np.where(self.slides, direct, 1))
        self.piece = np.where(self.through, chunk, distance)
        if int(self.duration.sum()) > MAX_COPIES:
            raise BadInputError(
                f"sliding by a few bytes takes {int(self.duration.sum())} copies: give a bounce buffer of some MiB."
            )

    @staticmethod
    def _chunk(count: int) -> int:
        return count // ALIGNMENT_BYTES * ALIGNMENT_BYTES if count >= ALIGNMENT_BYTES else count  # copies fast

    def schedule(self) -> Schedule:
        """All copies, in waves."""
        by_target = np.argsort(self.target, kind="stable")
        starts, ends = self.target[by_target], (self.target + self.size)[by_target]
        back_low = np.searchsorted(ends, self.source, side="right")
        back_high = np.maximum(np.searchsorted(starts, self.source + self.size, side="left"), back_low)
        n = len(self.size)
        missing, start, queue = (np.zeros(n, np.int64) for _ in range(3))
        finish, place, back = (np.full(n, -1, np.int64) for _ in range(3))
        now = np.zeros(5, np.int64)
        followers = (by_target, back_low, back_high)
        levels.begin(self.low, self.high, missing, queue, now)
        while True:
            levels.drain(*followers, self.duration, self.through, missing, start, finish, queue, now)
            broken = levels.break_plain(
                self.low,
                self.high,
                *followers,
                self.size,
                self.slides,
                missing,
                start,
                finish,
                queue,
                now,
                place,
                back,
                self.bounce_bytes,
            )
            if not broken:
                break
        self.batch = (int(now[levels.BATCH_START]), int(now[levels.BATCH_END]), int(now[levels.USED]))
        self._add(np.flatnonzero((finish >= 0) & (place < 0)), start[(finish >= 0) & (place < 0)])
        out = np.flatnonzero(place >= 0)
        self.copies.add_columns(start[out], self.source[out], BOUNCE + place[out], self.size[out])
        self.copies.add_columns(back[out], BOUNCE + place[out], self.target[out], self.size[out])
        if (finish < 0).any():
            self._break_cycles(np.flatnonzero(finish < 0), finish)
        return self.copies.schedule(int(self.size.sum()))

    def _add(self, rows: Column, start: Column) -> None:
        """The copies of blocks that begin at given waves."""
        whole = ~self.slides[rows]
        plain = rows[whole]
        self.copies.add_columns(start[whole], self.source[plain], self.target[plain], self.size[plain])
        for row, wave in zip(rows[~whole].tolist(), start[~whole].tolist(), strict=True):
            self._slide(row, wave)

    def _slide(self, row: int, wave: int) -> None:
        """A block whose target covers part of its source, piece by piece from the end that goes first."""
        source, target, size = int(self.source[row]), int(self.target[row]), int(self.size[row])
        piece = int(self.piece[row])
        at = np.arange(0, size, piece)
        count = np.minimum(piece, size - at)
        if target > source:
            at = size - at - count
        nth = np.arange(len(at))
        if self.through[row]:
            place = np.full(len(at), BOUNCE)
            self.copies.add_columns(wave + 2 * nth, source + at, place, count)
            self.copies.add_columns(wave + 2 * nth + 1, place, target + at, count)
        else:
            self.copies.add_columns(wave + nth, source + at, target + at, count)

    def _break_cycles(self, rows: Column, finish: Column) -> None:
        """Blocks in cycles and behind them: components in the order in which they wait for each other."""
        # the same columns as lists, which are faster one by one
        lows, highs, slides = self.low.tolist(), self.high.tolist(), self.slides.tolist()
        moves = dict(enumerate(zip(self.source.tolist(), self.target.tolist(), self.size.tolist(), strict=True)))
        singles: list[tuple[int, int]] = []
        inside = set(rows.tolist())
        graph = nx.DiGraph()
        graph.add_nodes_from(rows.tolist())
        graph.add_edges_from((i, j) for i in rows.tolist() for j in range(lows[i], highs[i]) if j != i and j in inside)
        finished = finish.tolist()
        # the bounce buffer serves several cycles at once, in batches: [batch_start, batch_end) of waves
        batch_start, batch_end, used = self.batch
        # edges lead to what a block waits for, and Tarjan's algorithm gives components after those they lead to
        for component in nx.strongly_connected_components(graph):
            members = sorted(component)
            start = 0
            for i in members:
                for j in range(lows[i], highs[i]):
                    if j not in component:
                        start = max(start, finished[j])
                        assert finished[j] >= 0, "components come in the order in which they wait"
            if len(members) == 1:
                row = members[0]
                if self.through[row]:
                    start = max(start, batch_end)
                    batch_start = batch_end = start + int(self.duration[row])
                    used = 0
                singles.append((row, start))
                finished[row] = start + int(self.duration[row])
                continue
            if self.bounce_bytes == 0:
                first = int(self.source[members[0]])
                raise BadInputError(
                    f"{len(members)} blocks change places in a cycle (the first at byte {first}) "
                    "and no byte is free to hold one meanwhile: give a bounce buffer."
                )
            # a block that slides waits for itself, so whole blocks cannot do it
            plan = None
            if not any(slides[i] for i in members):
                waits = [(i, j) for i in members for j in graph.successors(i) if j in component]
                plan = broken_by_whole_blocks(waits, moves, self.bounce_bytes)
            need = plan.bounce_bytes if plan is not None else self._chunk(self.bounce_bytes)
            if used + need > self.bounce_bytes:
                batch_start, used = batch_end, 0
            start = max(start, batch_start)
            if plan is not None:
                plan.add(self.copies, start, used)
                end = start + plan.num_waves
            else:
                end = chase([moves[i] for i in members], self.copies, start, used, need)
            for i in members:
                finished[i] = end
            used += aligned(need)
            batch_end = max(batch_end, end)
        rows, starts = np.array(singles, np.int64).reshape(-1, 2).T
        self._add(rows, starts)
