"""Steps: the period with which a program's requests repeat, told from repetitions inside a step.

A stretch of requests that repeats is a step only if memory comes back to where it was: layers of a forward pass
repeat too, but what they allocate is freed in another order later. Step marks, where a program set them, decide.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.compiled import BORROWING, inner, njit
from stalloc.trace import MARK_STEP, Trace

_BUCKETS = 64


@dataclass(frozen=True, order=True)
class Period:
    """A stretch of a sequence that repeats: keys[i] == keys[i + length] for i in [first, first + covered - length)."""

    first: int  #: index where the repetition begins
    length: int  #: entries in one period
    covered: int  #: entries in the stretch, the last period perhaps not whole

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


__all__ = ["Period", "find_period", "find_step_period", "may_repeat", "sequence_keys", "sequence_rows"]

TINY_BYTES = 512  #: requests up to this size are often made by the way (counters, flags) and say little about a step
_MAX_NET_GROWTH = 0.01
_MAX_NEVER_FREED = 0.25
_MIN_SHARE = 0.2
_MIDDLE = 32  # requests in the middle that are looked for elsewhere


def find_period(keys: Column, min_repeats: int = 2, min_length: int = 1, *, at_end: bool = False) -> Period | None:
    """The exact period of a sequence (n,) of int64: that of the longest stretch which repeats at least
    `min_repeats` times, the shortest period of it; None when nothing repeats so often.

    With `at_end` only stretches count that reach the end of the sequence.
    """
    runs = runs_at_end(keys, min_repeats, min_length) if at_end else longest_runs(keys, min_repeats, min_length)
    return runs[0] if runs else None


def sequence_rows(trace: Trace, minimum_size: int) -> Column:
    """Rows of the requests of at least `minimum_size` bytes that were seen to be allocated, in order."""
    return np.flatnonzero((trace.size >= minimum_size) & (trace.start >= 0))


def sequence_keys(trace: Trace, rows: Column) -> Column:
    """(len(rows),) int64: one number for each (size, stream), the same for equal pairs."""
    _, size_index = np.unique(trace.size[rows], return_inverse=True)
    return size_index.astype(np.int64) * max(len(trace.streams), 1) + trace.stream[rows]


def may_repeat(keys: Column) -> bool:
    """Whether a sequence (n,) of int64 may repeat over more than half of itself; False is certain, and cheap to find.

    What repeats over so much covers the middle, so that what stands there stands elsewhere too.
    """
    middle, length = len(keys) // 2, min(_MIDDLE, len(keys) // 16)
    found = np.arange(length, len(keys) + 1)
    for back in range(1, length + 1):
        found = found[keys[found - back] == keys[middle + length - back]]
    return len(found) > 1


def find_step_period(
    trace: Trace,
    *,
    min_repeats: int = 2,
    min_length: int = 1,
    min_share: float = _MIN_SHARE,
    ignore_tiny: bool = True,
    minimum_size: int | None = None,
    at_end: bool = False,
) -> Period | None:
    """The period of one step, in the sequence of `sequence_rows(trace, minimum_size)`; None when none is confirmed.

    `minimum_size` defaults to 513 bytes with `ignore_tiny`, else to 0. With step marks, whole steps are compared and
    the shortest cycle of steps that repeats is the period; without, the longest stretch that repeats and over which
    memory returns to its level; it has to cover `min_share` of the sequence, for the parameters of an optimizer repeat
    too. Repetitions shorter than `min_length` requests are passed over. Of steps that are marked the cycle that covers
    most is chosen, `at_end` the one of those that the last of them is a part of.
    """
    if minimum_size is None:
        minimum_size = TINY_BYTES + 1 if ignore_tiny else 0
    rows = sequence_rows(trace, minimum_size)
    keys = sequence_keys(trace, rows)
    marks = distinct(trace.mark_event[trace.mark_kind == MARK_STEP])
    if len(marks):
        return _period_of_marked_steps(trace, rows, keys, marks, min_repeats, min_length, at_end)
    for period in longest_runs(keys, min_repeats, min_length):
        if period.covered >= min_share * len(keys) and _returns_to_its_level(trace, rows, period):
            return period
    return None


def _period_of_marked_steps(
    trace: Trace, rows: Column, keys: Column, marks: Column, min_repeats: int, min_length: int, at_end: bool
) -> Period | None:
    bounds = np.searchsorted(trace.start[rows], marks)  # position in the sequence at which each step begins
    contents: dict[bytes, int] = {}
    steps = np.array(
        [contents.setdefault(keys[begin:end].tobytes(), len(contents)) for begin, end in itertools.pairwise(bounds)],
        np.int64,
    )
    for cycle in (runs_at_end if at_end else longest_runs)(steps, min_repeats, 1):
        first, length = int(bounds[cycle.first]), int(bounds[cycle.first + cycle.length] - bounds[cycle.first])
        if length < min_length:
            continue
        end = first + length * cycle.repeats
        while end < len(keys) and keys[end] == keys[end - length]:
            end += 1
        return Period(first, length, end - first)
    return None


def _returns_to_its_level(trace: Trace, rows: Column, period: Period) -> bool:
    """Whether memory is level from one period to the next, leaks apart: what is never freed may be a fourth at most.

    Looks at the last two whole periods: the level at the beginning of each and at the end of the stretch.
    """
    last = period.first + period.repeats * period.length
    bounds = [last - 2 * period.length, last - period.length, last]
    start, end, size = trace.start[rows], trace.end[rows], trace.size[rows]
    events = [int(start[at]) if at < len(rows) else trace.num_events for at in bounds]
    born = size[bounds[0] : bounds[1]]
    never = end[bounds[0] : bounds[1]] >= trace.num_events
    if born[never].sum() > _MAX_NEVER_FREED * born.sum():
        return False
    freed = end < trace.num_events

    def level(event: int) -> int:
        return int(size[(start < event) & (end >= event) & freed].sum())

    # the level at the very end is not asked for: what the last period leaves to the next is never freed
    growth = abs(level(events[1]) - level(events[0]))
    return growth <= _MAX_NET_GROWTH * max(int(born.sum()), 1)
