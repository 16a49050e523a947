"""From blocks and their targets to waves of copies: what is free first, slides in the safe direction, cycles broken.

Contract: raises before anything is moved, or returns a Schedule whose execution, wave after wave, leaves each block at
its target and touches nothing but sources, targets and the bounce buffer. One byte of bounce buffer is enough for any
sizes; more only makes fewer and larger copies.

A block waits for the blocks whose sources its target covers. Sources share no bytes, nor do targets, so that those it
waits for are neighbours in order of address and all such pairs are at most twice as many as the blocks. What waits for
nothing that has not moved gets its wave in one compiled pass, and so do plain cycles, whose blocks each wait for just
one other: the smallest goes into the bounce buffer, the others follow one by one, and it comes back last. Only what is
left, where cycles share blocks, becomes a graph in networkx, whose strongly connected components are done one by one:
by whole blocks, of which some wait in the bounce buffer, or, if that is too small, by chasing bytes.
"""

from bisect import bisect_left, bisect_right
from heapq import heapify, heappop

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from stalloc.columns import Column
from stalloc.compaction.schedule import BOUNCE, Copies, Schedule, column
from stalloc.compiled import njit
from stalloc.errors import BadInputError
from stalloc.sizes import ALIGNMENT_BYTES, aligned

#: copies in one schedule; more come only from large blocks that slide by a few bytes
MAX_COPIES = 1 << 22
#: copies of one component; blocks of many sizes that all change places can fall into very many pieces
MAX_PIECES = 100_000
_RECOMPUTE = 100  # blocks up to which components are found anew after one of them was broken
_BATCH_START, _BATCH_END, _USED, _FILLED, _TAKEN = range(5)  # words of `now`: the bounce buffer's batch, the queue

Ranges = list[tuple[int, int]]
Move = tuple[int, int, int]  #: source, target, bytes


class _Waiting:
    """Bytes that have not moved: ranges by target, ascending, each with its distance from target to source."""

    def __init__(self, moves: list[tuple[int, int, int]]) -> None:
        ordered = sorted((target, target + size, source - target) for source, target, size in moves)
        self._low = [low for low, _, _ in ordered]
        self._rest = [(high, shift) for _, high, shift in ordered]

    def __bool__(self) -> bool:
        return bool(self._low)

    def take(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Take what moves into [low, high): (low, high, shift) of the targets."""
        at = max(0, bisect_right(self._low, low) - 1)
        if at < len(self._low) and self._rest[at][0] <= low:
            at += 1
        end = bisect_left(self._low, high)
        if at >= end:
            return []
        taken, kept = [], []
        for start, (stop, shift) in zip(self._low[at:end], self._rest[at:end], strict=True):
            taken.append((max(start, low), min(stop, high), shift))
            if start < low:
                kept.append((start, low, shift))
            if stop > high:
                kept.append((high, stop, shift))
        self._low[at:end] = [start for start, _, _ in kept]
        self._rest[at:end] = [(stop, shift) for _, stop, shift in kept]
        return taken

    def take_first(self, count: int) -> tuple[int, int, int]:
        """Take up to `count` bytes of the lowest range."""
        start, (stop, _) = self._low[0], self._rest[0]
        return self.take(start, min(stop, start + count))[0]


def _chase(moves: list[tuple[int, int, int]], copies: Copies, wave: int, bounce_at: int, bounce_bytes: int) -> int:
    """Add the copies of (source, target, size) moves from `wave` on; the wave after the last one.

    All of the targets that none of these sources covers has to be free. The bounce buffer is [bounce_at,
    bounce_at + bounce_bytes) and is free again afterwards. Raises BadInputError for more than MAX_PIECES copies.
    """
    waiting, left = _Waiting(moves), [MAX_PIECES]
    wave = _follow(waiting, _free_targets(moves), copies, wave, left)
    while waiting:
        low, high, shift = waiting.take_first(bounce_bytes)
        copies.add(wave, low + shift, BOUNCE + bounce_at, high - low)
        wave = _follow(waiting, [(low + shift, high + shift)], copies, wave + 1, left)
        copies.add(wave, BOUNCE + bounce_at, low, high - low)
        wave += 1
    return wave


def _follow(waiting: _Waiting, free: Ranges, copies: Copies, wave: int, left: list[int]) -> int:
    """Move what belongs into free ranges, then what belongs where that was, and so on; the wave after the last."""
    while True:
        taken = [piece for low, high in free for piece in waiting.take(low, high)]
        if not taken:
            return wave
        left[0] -= len(taken)
        if left[0] < 0:
            raise BadInputError(
                f"a cycle would fall into more than {MAX_PIECES} pieces: give a larger bounce buffer, or other targets."
            )
        for low, high, shift in taken:
            copies.add(wave, low + shift, low, high - low)
        free = [(low + shift, high + shift) for low, high, shift in taken]
        wave += 1


def _free_targets(moves: list[tuple[int, int, int]]) -> Ranges:
    sources = sorted((source, source + size) for source, _, size in moves)
    lows = [low for low, _ in sources]
    free = []
    for _, target, size in moves:
        at, end = target, target + size
        for low, high in sources[max(0, bisect_right(lows, target) - 1) : bisect_left(lows, end)]:
            if high <= at:
                continue
            if low > at:
                free.append((at, low))
            at = max(at, high)
        if at < end:
            free.append((at, end))
    return free


class _WholeBlocks:
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


@njit(nogil=True)
def _release(i, freed, behind, back_low, back_high, missing, start, finish, queue, now):
    """The source of a block is free from a wave on: whoever waits for nothing else is queued."""
    for at in range(back_low[i], back_high[i]):
        j = behind[at]
        if j != i and finish[j] < 0:
            start[j] = max(start[j], freed)
            missing[j] -= 1
            if missing[j] == 0:
                queue[now[_FILLED]] = j
                now[_FILLED] += 1


@njit(nogil=True)
def _drain(behind, back_low, back_high, duration, through, missing, start, finish, queue, now):
    """Give waves to what is queued, and to what that lets go. `through`: by the bounce buffer, one after the other."""
    while now[_TAKEN] < now[_FILLED]:
        i = queue[now[_TAKEN]]
        now[_TAKEN] += 1
        if through[i]:
            start[i] = max(start[i], now[_BATCH_END])
            now[_BATCH_START] = now[_BATCH_END] = start[i] + duration[i]
            now[_USED] = 0
        finish[i] = start[i] + duration[i]
        _release(i, finish[i], behind, back_low, back_high, missing, start, finish, queue, now)


@njit(nogil=True)
def _break_plain(
    low, high, behind, back_low, back_high, size, slides, missing, start, finish, queue, now, place, back, limit
):
    """Break the plain cycles that a bounce buffer of `limit` bytes can; how many there were.

    place[i] becomes the place of a block that goes through the bounce buffer and back[i] the wave at which it leaves.
    """
    n = len(low)
    seen = np.zeros(n, np.int64)
    ring = np.zeros(n, np.int64)
    count = 0
    for first in range(n):
        i, length = first, 0
        while i >= 0 and finish[i] < 0 and missing[i] == 1 and seen[i] == 0 and not slides[i]:
            seen[i] = first + 1
            ring[length] = i
            length += 1
            following = -1
            for j in range(low[i], high[i]):
                if j != i and finish[j] < 0:
                    following = j
            i = following
        if i < 0 or length == 0 or seen[i] != first + 1 or finish[i] >= 0:
            continue
        head = 0
        while ring[head] != i:
            head += 1
        members = length - head
        smallest, wave = head, 0
        for at in range(head, length):
            wave = max(wave, start[ring[at]])
            if size[ring[at]] < size[ring[smallest]]:
                smallest = at
        victim = ring[smallest]
        if size[victim] > limit:
            continue
        if now[_USED] + size[victim] > limit:
            now[_BATCH_START], now[_USED] = now[_BATCH_END], 0
        wave = max(wave, now[_BATCH_START])
        place[victim], back[victim] = now[_USED], wave + members
        now[_USED] += (size[victim] + (ALIGNMENT_BYTES - 1)) & -ALIGNMENT_BYTES
        now[_BATCH_END] = max(now[_BATCH_END], wave + members + 1)
        for step in range(members):
            at = smallest - step  # each waits for the one after it, so that they move in the opposite order
            member = ring[at if at >= head else at + members]
            start[member], finish[member] = wave + step, wave + step + 1
        for at in range(head, length):
            _release(ring[at], finish[ring[at]], behind, back_low, back_high, missing, start, finish, queue, now)
        count += 1
    return count


@njit(nogil=True)
def _give_waves(
    low, high, behind, back_low, back_high, size, slides, duration, through, start, finish, place, back, now, limit
):
    """Give waves to all blocks that wait for nothing that has not moved, and to plain cycles."""
    missing, queue = np.zeros(len(low), np.int64), np.zeros(len(low), np.int64)
    for i in range(len(low)):
        missing[i] = high[i] - low[i] - (1 if low[i] <= i < high[i] else 0)
        if missing[i] == 0:
            queue[now[_FILLED]] = i
            now[_FILLED] += 1
    broken = 1
    while broken > 0:
        _drain(behind, back_low, back_high, duration, through, missing, start, finish, queue, now)
        broken = _break_plain(
            low, high, behind, back_low, back_high, size, slides, missing, start, finish, queue, now, place, back, limit
        )


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
        start, finish, place, back, now = np.zeros(n, np.int64), *np.full((3, n), -1, np.int64), np.zeros(5, np.int64)
        waits = (self.low, self.high, by_target, back_low, back_high)
        blocks = (self.size, self.slides, self.duration, self.through)
        _give_waves(*waits, *blocks, start, finish, place, back, now, self.bounce_bytes)
        self.batch = (int(now[_BATCH_START]), int(now[_BATCH_END]), int(now[_USED]))
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
            plan: _WholeBlocks | None = None
            if not any(slides[i] for i in members):
                waits = [(i, j) for i in members for j in graph.successors(i) if j in component]
                plan = _WholeBlocks(moves)
                plan = plan if plan.breaks(nx.DiGraph(waits), self.bounce_bytes) else None
            need = plan.bounce_bytes if plan is not None else self._chunk(self.bounce_bytes)
            if used + need > self.bounce_bytes:
                batch_start, used = batch_end, 0
            start = max(start, batch_start)
            if plan is not None:
                plan.add(self.copies, start, used)
                end = start + plan.num_waves
            else:
                end = _chase([moves[i] for i in members], self.copies, start, used, need)
            for i in members:
                finished[i] = end
            used += aligned(need)
            batch_end = max(batch_end, end)
        rows, starts = np.array(singles, np.int64).reshape(-1, 2).T
        self._add(rows, starts)
