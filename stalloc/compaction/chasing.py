"""Cycles of moves broken through a bounce buffer that is smaller than their blocks.

Contract: whatever the sizes, one byte of bounce buffer is enough; more only makes fewer and larger copies.

Byte by byte a move plan is a one-to-one map, so its bytes form paths, which end in free space, and cycles. What can
be done is followed backwards from what is free: the bytes whose targets are free move, which frees their sources, and
so on. What is left are cycles: a chunk of them goes into the bounce buffer, its place is free, the bytes that belong
there move, and so on until the chunk's own targets are free.
"""

from bisect import bisect_left, bisect_right

from stalloc.compaction.schedule import BOUNCE, Copies
from stalloc.errors import BadInputError

#: copies of one component; blocks of many sizes that all change places can fall into very many pieces
MAX_PIECES = 100_000

Ranges = list[tuple[int, int]]


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


def chase(moves: list[tuple[int, int, int]], copies: Copies, wave: int, bounce_at: int, bounce_bytes: int) -> int:
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
    """The parts of the targets that no source covers."""
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
