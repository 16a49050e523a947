"""Where a sequence repeats itself, exactly: runs `x[i] == x[i + p]`, found in O(n log n).

Divide and conquer over the middle of the sequence: every run that crosses the middle is seen by extending matches
around it, with the extensions read from Z-functions (Main and Lorentz, "An O(n log n) algorithm for finding all
repetitions in a string", J. Algorithms 5, 1984).
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import BORROWING, inner, njit

_BUCKETS = 64


@dataclass(frozen=True, order=True)
class Period:
    """A stretch of a sequence that repeats: keys[i] == keys[i + length] for i in [first, first + covered - length)."""

    first: int
    """Index where the repetition begins."""
    length: int
    """Entries in one period."""
    covered: int
    """Entries in the stretch, the last period perhaps not whole."""

    @property
    def repeats(self) -> int:
        """Whole periods in the stretch."""
        return self.covered // self.length


def longest_runs(keys: Column, min_repeats: int, min_length: int) -> list[Period]:
    """Candidates for the period of `keys` (n,) int64: the best stretch for each octave of period lengths.

    Ordered by covered entries, most first; of equals the shorter period, then the later stretch, comes first.
    """
    keys = np.ascontiguousarray(keys, np.int64)
    if len(keys) < 2:
        return []
    best = np.zeros((_BUCKETS, 3), np.int64)  # covered, -length, first: compared in this order
    backwards = np.ascontiguousarray(keys[::-1])
    z, matches = np.empty(len(keys), np.int64), np.empty((2, len(keys)), np.int64)
    _all_runs(keys, backwards, min_repeats, max(min_length, 1), best, z, matches, np.empty((128, 2), np.int64))
    rows = sorted((tuple(int(value) for value in row) for row in best if row[0]), reverse=True)
    return [Period(first, -negative, covered) for covered, negative, first in rows]


def runs_at_end(keys: Column, min_repeats: int, min_length: int) -> list[Period]:
    """Like `longest_runs`, for stretches that reach the end of `keys`; every period length, in O(n)."""
    backwards = np.ascontiguousarray(np.asarray(keys, np.int64)[::-1])
    if len(backwards) < 2:
        return []
    z = np.empty(len(backwards), np.int64)
    _z_function(backwards, z)
    lengths = np.arange(len(backwards))
    covered = z + lengths
    fits = (lengths >= max(min_length, 1)) & (covered >= min_repeats * lengths)
    runs = sorted((-int(covered[length]), int(length)) for length in lengths[fits])
    return [Period(len(backwards) + negative, length, -negative) for negative, length in runs]


@njit(**BORROWING)
def _z_function(text, z):
    n = len(text)
    z[0] = n
    left, right = 0, 0
    for i in range(1, n):
        length = 0
        if i < right:
            length = min(right - i, z[i - left])
        while i + length < n and text[length] == text[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length


@inner(**BORROWING)
def _prefix_matches(pattern, text, z, out):
    """For each i the length of the longest common prefix of `pattern` and text[i:]; `z` is scratch space."""
    n, m = len(pattern), len(text)
    _z_function(pattern, z)
    left, right = 0, 0
    for i in range(m):
        length = 0
        if i < right:
            length = min(right - i, z[i - left])
        while length < n and i + length < m and pattern[length] == text[i + length]:
            length += 1
        out[i] = length
        if i + length > right:
            left, right = i, i + length


@inner(**BORROWING)
def _offer(best, first, length, covered):
    bucket, rest = 0, length
    while rest > 1:
        rest >>= 1
        bucket += 1
    row = best[bucket]
    if covered > row[0] or (covered == row[0] and (-length > row[1] or (-length == row[1] and first > row[2]))):
        row[0], row[1], row[2] = covered, -length, first


@njit(**BORROWING)
def _all_runs(keys, backwards, min_repeats, min_length, best, z, matches, stack):
    """Offer all runs; `z`, `matches` and `stack` are scratch space, the last for the parts that wait."""
    forward, backward = matches[0], matches[1]
    stack[0, 0], stack[0, 1] = 0, len(keys)
    waiting = 1
    while waiting:
        waiting -= 1
        low, high = stack[waiting, 0], stack[waiting, 1]
        if high - low < 2 * min_length:
            continue
        middle = (low + high) // 2
        num_left, num_right, behind_all = middle - low, high - middle, len(keys) - low
        whole_back = backwards[len(keys) - high : behind_all]
        # [i]: keys[low + i:] against keys[middle:], and keys[:high - i] against keys[:middle] from behind
        _prefix_matches(keys[middle:high], keys[low:high], z, forward)
        _prefix_matches(backwards[len(keys) - middle : behind_all], whole_back, z, backward)
        for length in range(min_length, max(num_left, num_right) + 1):
            if length <= num_left:  # matches around the pair (middle - length, middle)
                ahead = forward[num_left - length]
                behind = backward[num_right + length] if length < num_left else 0
                covered = length + ahead + behind
                if covered >= min_repeats * length:
                    _offer(best, middle - length - behind, length, covered)
            if length <= num_right:  # matches around the pair (middle, middle + length)
                ahead = forward[num_left + length] if length < num_right else 0
                behind = backward[num_right - length]
                covered = length + ahead + behind
                if covered >= min_repeats * length:
                    _offer(best, middle - behind, length, covered)
        stack[waiting, 0], stack[waiting, 1] = low, middle
        stack[waiting + 1, 0], stack[waiting + 1, 1] = middle, high
        waiting += 2
