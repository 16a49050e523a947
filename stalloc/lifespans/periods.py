"""Steps: the period with which a program's requests repeat, told from repetitions inside a step.

A stretch of requests that repeats is a step only if memory comes back to where it was: layers of a forward pass
repeat too, but what they allocate is freed in another order later. Step marks, where a program set them, decide.
"""

import itertools

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.lifespans.repetition import Period, longest_runs, runs_at_end
from stalloc.trace import MARK_STEP, Trace

__all__ = ["Period", "find_period", "find_step_period", "may_repeat", "sequence_keys", "sequence_rows"]

TINY_BYTES = 512
"""Requests up to this size are often made by the way (counters, flags) and say little about a step."""
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
