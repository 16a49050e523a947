"""Where a sequence repeats itself, exactly: runs `x[i] == x[i + p]`, found in O(n log n).

Divide and conquer over the middle of the sequence: every run that crosses the middle is seen by extending matches
around it, with the extensions read from Z-functions (Main and Lorentz, "An O(n log n) algorithm for finding all
repetitions in a string", J. Algorithms 5, 1984).
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import njit

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
    _all_runs(keys, min_repeats, max(min_length, 1), best)
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


@njit()
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


@njit()
def _prefix_matches(pattern, text):
    """For each i the length of the longest common prefix of `pattern` and text[i:]."""
    n, m = len(pattern), len(text)
    z = np.empty(n, np.int64)
    _z_function(pattern, z)
    out = np.zeros(m, np.int64)
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
    return out


@njit()
def _offer(best, first, length, covered):
    bucket, rest = 0, length
    while rest > 1:
        rest >>= 1
        bucket += 1
    row = best[bucket]
    if covered > row[0] or (covered == row[0] and (-length > row[1] or (-length == row[1] and first > row[2]))):
        row[0], row[1], row[2] = covered, -length, first


@njit()
def _all_runs(keys, min_repeats, min_length, best):
    stack = [(0, len(keys))]
    while len(stack):
        low, high = stack.pop()
        if high - low < 2 * min_length:
            continue
        middle = (low + high) // 2
        whole, right = keys[low:high], keys[middle:high]
        left_back, whole_back = keys[low:middle][::-1].copy(), whole[::-1].copy()
        num_left, num_right = middle - low, high - middle
        forward = _prefix_matches(right, whole)  # [i]: keys[low + i:] against keys[middle:]
        backward = _prefix_matches(left_back, whole_back)  # [i]: keys[:high - i] against keys[:middle], from behind
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
        stack.append((low, middle))
        stack.append((middle, high))
