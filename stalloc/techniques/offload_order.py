"""Which of the activations that a program saves go to the host, when their memory goes, and which come back ahead.

Contract: what is decided depends on the order and the sizes of what is saved, needed and gone alone, so a step that
repeats does the same each time, and what foresees a run decides as the run itself does. This module loads no torch.
"""

from bisect import bisect_left, insort
from collections import deque

from stalloc.cost.disjoint_sets import DisjointSets


class OffloadOrder:
    """The decisions of one run. Activations are known by numbers, which rise in the order in which they are saved. Each
    of several ranks offloads others, as far as the ratio allows."""

    def __init__(self, ratio: float, window_bytes: int, rank: int = 0, num_ranks: int = 1) -> None:
        self._window_bytes, self._rank = window_bytes, rank
        self._sets = DisjointSets(ratio, num_ranks)  # since backward was last at work
        self._leaving: deque[tuple[int, int]] = deque()  # numbers and bytes on their way to the host, oldest first
        self._leaving_bytes = 0
        self._hosted: list[int] = []  # numbers of what is in the host, ascending
        self._size_of: dict[int, int] = {}

    def is_wanted(self, size_bytes: int) -> bool:
        """Whether what is saved next goes to the host: the share of bytes that went there never exceeds the ratio."""
        takers = self._sets.takers(size_bytes)
        for rank in takers:
            if rank != self._rank:
                self._sets.left(rank, size_bytes)
        return self._rank in takers

    def leaves(self, number: int, size_bytes: int) -> list[int]:
        """Note that it is on its way to the host; returns those whose device memory is to go now, once copied."""
        self._sets.left(self._rank, size_bytes)
        self._size_of[number] = size_bytes
        insort(self._hosted, number)
        self._leaving.append((number, size_bytes))
        self._leaving_bytes += size_bytes
        over = []
        while self._leaving and self._leaving_bytes > self._window_bytes:
            over.append(self._leaving.popleft())
            self._leaving_bytes -= over[-1][1]
        return [oldest for oldest, _ in over]

    def needed(self, number: int) -> list[int]:
        """Backward needs it: returns what is to be on the device now, itself first, then those saved before it."""
        self._sets.restart()
        found, ahead_bytes = [number], 0
        for at in range(bisect_left(self._hosted, number) - 1, -1, -1):
            ahead_bytes += self._size_of[self._hosted[at]]
            if ahead_bytes > self._window_bytes:
                break
            found.append(self._hosted[at])
        return found

    def gone(self, number: int) -> None:
        if (size_bytes := self._size_of.pop(number, None)) is None:
            return
        del self._hosted[bisect_left(self._hosted, number)]
        if (number, size_bytes) in self._leaving:
            self._leaving.remove((number, size_bytes))
            self._leaving_bytes -= size_bytes
