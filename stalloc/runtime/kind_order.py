"""In which order kinds of steps come, to say which is next.

Contract: a kind that comes several times in a row is expected as often as the last time, then what followed then; else
what came the last time after the last two. Where kinds are double-buffered, some switch to the other buffer.
"""

from collections.abc import Sequence
from copy import copy


class KindOrder:
    """The kinds of steps of one program, by number."""

    def __init__(self, switches_buffers: Sequence[bool]) -> None:
        """`switches_buffers`: for each kind, whether the tapes of the other buffer are followed after it."""
        self._switches_buffers = switches_buffers
        self._buffer = 0  # whose tapes are followed
        self._followers: dict[tuple[int, int], int] = {}  # two kinds in a row -> the one that came next
        self._run = -1, -1, 0  # the kind before the last one, the last one, and how often that came in a row
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}  # the first two -> how often it was, and what came next
        self._last_two = -1, -1

    def copy(self) -> "KindOrder":
        """As it is now, to look ahead."""
        one = copy(self)
        one._followers, one._runs = self._followers.copy(), self._runs.copy()
        return one

    def after(self, kind: int) -> int:
        """A step of a kind is over: the number of the tape that is expected next, all of the first buffer first."""
        self._buffer ^= self._switches_buffers[kind]
        self._followers[self._last_two] = kind
        self._last_two = self._last_two[1], kind
        before, last, count = self._run
        if kind != last:
            self._runs[before, last] = count, kind
        self._run = (before, last, count + 1) if kind == last else (last, kind, 1)
        return self._buffer * len(self._switches_buffers) + self._expected()

    def _expected(self) -> int:
        before, last, count = self._run
        earlier, following = self._runs.get((before, last), (0, last))
        if count <= earlier:
            return following if count == earlier else last
        return self._followers.get(self._last_two, last)
