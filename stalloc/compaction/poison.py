"""STALLOC_POISON=1: patterns in fresh and freed memory, checked when it is used again, at the free and on demand.

Contract: a block is filled before its owner gets it and after its owner gave it up, on the stream that allocated it.
A byte of freed memory that changed was written after the free; a byte between the end of what was requested and the
end of the block that changed was written out of bounds. What is found is one error that names the block.

Fresh memory is all ones, which reads as NaN in every floating-point type, so that a kernel that reads what nobody
wrote shows. It is a mode for finding errors: every allocation and free becomes a launch.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from stalloc.errors import StallocError

FRESH = b"\xff"
FREED = b"\xfb"
GUARD = b"stalloc!"


class CorruptionError(StallocError, RuntimeError):
    """Memory was written by somebody who did not own it."""


def wanted() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get("STALLOC_POISON", "") not in ("", "0")


class Poison:
    """The patterns of one device: what is freed, what is live, and whether they are whole."""

    def __init__(self, fill: Callable[..., None] | None = None, mismatches: Callable[..., Any] | None = None) -> None:
        """`fill` and `mismatches` as in stalloc.kernels: (addresses, bytes, pattern); by default the kernels."""
        if fill is None or mismatches is None:
            from stalloc import kernels

            fill, mismatches = fill or kernels.batched_fill, mismatches or kernels.batched_mismatches
        self._fill, self._mismatches = fill, mismatches
        self._low: list[int] = []  # freed ranges that hold their pattern, ascending
        self._high: list[int] = []
        self._live: dict[int, tuple[int, int]] = {}  # address -> requested, rounded bytes

    def allocated(self, address: int, requested_bytes: int, block_bytes: int) -> None:
        """A block of `block_bytes` is about to be handed out. Raises CorruptionError if it was written while free."""
        pieces = self._take_freed(address, address + block_bytes)
        self._require(pieces, FREED, "was written after it was freed")
        self._fill([address], [requested_bytes], FRESH)
        self._fill([address + requested_bytes], [block_bytes - requested_bytes], GUARD)
        self._live[address] = (requested_bytes, block_bytes)

    def freed(self, address: int) -> None:
        """A block was freed. Raises CorruptionError if something wrote past the end of what was requested."""
        requested, rounded = self._live.pop(address)
        self._fill_freed(address, rounded, self._guard(address, requested, rounded))

    def _fill_freed(self, address: int, rounded: int, guard: list[tuple[int, int]]) -> None:
        try:
            self._require(guard, GUARD, "was written past its end")
        finally:  # the block is free all the same
            self._fill([address], [rounded], FREED)
            at = bisect_left(self._low, address)
            self._low.insert(at, address)
            self._high.insert(at, address + rounded)

    def returned(self, low: int, high: int) -> None:
        """The range [low, high) goes back to the device. Raises CorruptionError if it was written while free."""
        self._require(self._take_freed(low, high), FREED, "was written after it was freed")

    def check(self) -> None:
        """Look at everything now, at a step boundary for instance. Raises CorruptionError for the first that is off."""
        self._require(list(zip(self._low, self._high, strict=True)), FREED, "was written after it was freed")
        guards = [piece for address, sizes in self._live.items() for piece in self._guard(address, *sizes)]
        self._require(guards, GUARD, "was written past its end")

    @staticmethod
    def _guard(address: int, requested: int, rounded: int) -> list[tuple[int, int]]:
        return [(address + requested, address + rounded)] if rounded > requested else []

    def _take_freed(self, low: int, high: int) -> list[tuple[int, int]]:
        """The freed parts of [low, high), which are freed no longer."""
        at = max(0, bisect_right(self._low, low) - 1)
        end = bisect_left(self._low, high)
        pieces, kept = [], []
        for start, stop in zip(self._low[at:end], self._high[at:end], strict=True):
            kept += [(a, b) for a, b in ((start, min(stop, low)), (max(start, high), stop)) if a < b]
            if max(start, low) < min(stop, high):
                pieces.append((max(start, low), min(stop, high)))
        self._low[at:end], self._high[at:end] = [a for a, _ in kept], [b for _, b in kept]
        return pieces

    def _require(self, pieces: list[tuple[int, int]], pattern: bytes, what: str) -> None:
        if not pieces:
            return
        counts = self._mismatches([low for low, _ in pieces], [high - low for low, high in pieces], pattern)
        for (low, high), count in zip(pieces, counts, strict=True):
            if count:
                raise CorruptionError(
                    f"memory at {low:#x} to {high:#x} {what} ({int(count)} bytes differ): look for a kernel or a "
                    "pointer that outlives its tensor, or an index out of bounds."
                )
