"""Which of the activations that a program saves go to the host, when their memory goes, and which come back ahead.

Contract: what is decided depends on the order and the sizes of what is saved, needed and gone alone, so a step that
repeats does the same each time, and what foresees a run decides as the run itself does. This module loads no torch.
"""

from bisect import bisect_left, insort
from collections import deque


class OffloadOrder:
    """The decisions of one run. Activations are known by numbers, which rise in the order in which they are saved."""

    def __init__(self, ratio: float, window_bytes: int) -> None:
        self._ratio, self._window_bytes = ratio, window_bytes
        self._saved_bytes = self._left_bytes = 0  # since backward was last at work
        self._leaving: deque[tuple[int, int]] = deque()  # numbers and bytes on their way to the host, oldest first
        self._leaving_bytes = 0
        self._hosted: list[int] = []  # numbers of what is in the host, ascending
        self._size_of: dict[int, int] = {}

    def is_wanted(self, size_bytes: int) -> bool:
        """Whether what is saved next goes to the host: the share of bytes that went there never exceeds the ratio."""
        self._saved_bytes += size_bytes
        return self._left_bytes + size_bytes <= self._ratio * self._saved_bytes

    def leaves(self, number: int, size_bytes: int) -> list[int]:
        """It is on its way; the memory of those that come back is to go now, once they are over."""
        self._left_bytes += size_bytes
        self._size_of[number] = size_bytes
        insort(self._hosted, number)
        self._leaving.append((number, size_bytes))
        self._leaving_bytes += size_bytes
        over = []
        while self._leaving and self._leaving_bytes > self._window_bytes:
            oldest, oldest_bytes = self._leaving.popleft()
            self._leaving_bytes -= oldest_bytes
            over.append(oldest)
        return over

    def needed(self, number: int) -> list[int]:
        """Backward needs it: what is to be on the device now, itself first, then those that were saved before it."""
        self._saved_bytes = self._left_bytes = 0
        found, ahead_bytes = [number], 0
        for at in range(bisect_left(self._hosted, number) - 1, -1, -1):
            ahead_bytes += self._size_of[self._hosted[at]]
            if ahead_bytes > self._window_bytes:
                break
            found.append(self._hosted[at])
        return found

    def gone(self, number: int) -> None:
        """Nothing needs it any more."""
        size_bytes = self._size_of.pop(number, None)
        if size_bytes is None:
            return
        del self._hosted[bisect_left(self._hosted, number)]
        if (number, size_bytes) in self._leaving:
            self._leaving.remove((number, size_bytes))
            self._leaving_bytes -= size_bytes
