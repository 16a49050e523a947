"""Steps that are alike in part: what they have in common is a cycle of static requests, the rest comes between these.

In a mixture of experts the sizes of what an expert asks for come from the data. Such steps are aligned: requests of one
size on one stream that come in one order in most steps are static. All others are dynamic: known by the static request
before which they come, and by how many dynamic ones came there before them. The clock is that of a cycle of the static
requests, so a dynamic request lives for as long as static ones are allocated.

The longest common subsequence is found a word of bits at a time, which takes as long however much the steps differ
(M. Crochemore, C. S. Iliopoulos, Y. J. Pinzon and J. F. Reid, "A fast and practical bit-vector algorithm for the
longest common subsequence problem", Information Processing Letters 80, 2001); the rows are kept, to trace it back.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.compiled import BORROWING, njit
from stalloc.lifespans.periods import TINY_BYTES, sequence_keys, sequence_rows
from stalloc.lifespans.repeating_schedule import Schedule
from stalloc.sizes import LITTLE_BYTES
from stalloc.trace import MARK_STEP, Trace

_STEADY_SHARE = 8  # a key that one step has less often than another by more than one in so many is the data's
_ALIKE_SHARE = 8  # steps are alike if one asks for more than the other by no more than one byte in so many
_NOTHING: Column = np.zeros(0, np.int64)
_MOST_BITS = 1 << 31  # of the rows that are kept of a pair of steps: a quarter of a gigabyte


@dataclass(frozen=True, eq=False)
class Aligned:
    """What steps have in common."""

    key: Column  #: (n,) of each static request
    seen: Column  #: (n,) steps that have it
    sites: list[Column]  #: of each step, for each of its requests: which static one it is, -1: it is dynamic


def align(steps: Sequence[Column], little: Column) -> Aligned:
    """What steps, each the keys (int64) of its requests in order, have in common; nothing if they are too long.

    A key stands for a size and a stream; `little` are those of requests that the heap serves together. A request is
    static if most steps have it, and all have its key about equally often, a little one just as often. What is of a
    size by chance, or since no expert takes more tokens, would be paired with any others; so would lists of tokens.
    """
    key = distinct(np.concatenate(steps))
    counts = np.sort([np.bincount(np.searchsorted(key, step), minlength=len(key)) for step in steps], axis=0)
    least, most = counts[0], counts[-1]
    some = len(steps) // _STEADY_SHARE  # steps in which something dynamic may be of the size by chance, too
    most = np.where((least > 0) & (least == counts[len(steps) - 1 - some]), least, most)
    key = key[(_STEADY_SHARE * least >= (_STEADY_SHARE - 1) * most) & ((least == most) | ~np.isin(key, little))]
    rows = [np.flatnonzero(np.isin(step, key)) for step in steps]
    tokens = [np.searchsorted(key, step[row]) for step, row in zip(steps, rows, strict=True)]
    merged, seen = tokens[0], np.ones(len(tokens[0]), np.int64)
    places = [np.arange(len(merged))]
    for step in tokens[1:]:
        pairs = _pairs(merged, step, len(key))
        if pairs is None:
            return Aligned(_NOTHING, _NOTHING, [np.full(len(step), -1, np.int64) for step in steps])
        merged, seen, places = _with_one_more(merged, seen, places, step, pairs)
    static = 2 * seen > len(steps)
    number = np.where(static, np.cumsum(static) - 1, -1)
    sites = [np.full(len(step), -1, np.int64) for step in steps]
    for site, row, place in zip(sites, rows, places, strict=True):
        site[row] = number[place]
    return Aligned(key[merged[static]], seen[static], sites)


def _with_one_more(
    merged: Column, seen: Column, places: list[Column], step: Column, pairs: Column
) -> tuple[Column, Column, list[Column]]:
    """A sequence that all steps so far are parts of, made one of another step too; `pairs` are of the two."""
    had = np.flatnonzero(pairs >= 0)
    own = np.full(len(step), -1, np.int64)
    own[pairs[had]] = had
    new = np.flatnonzero(own < 0)
    after = np.maximum.accumulate(own)[new]  # what is new comes after what the step has in common before it
    order = np.argsort(np.concatenate([np.arange(len(merged)), after + 0.5]), kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    own[new] = len(merged) + np.arange(len(new))
    times = np.concatenate([seen + (pairs >= 0), np.ones(len(new), np.int64)])
    return np.concatenate([merged, step[new]])[order], times[order], [place[one] for one in (*places, own)]


def _pairs(one: Column, other: Column, num_tokens: int) -> Column | None:
    """(len(one),) with which request of another step each one is paired, -1: with none; None if they are too long."""
    pairs = np.full(len(one), -1, np.int64)
    begin = _alike(one, other)
    end = _alike(one[begin:][::-1], other[begin:][::-1])
    pairs[:begin] = np.arange(begin)
    pairs[len(one) - end :] = np.arange(len(other) - end, len(other))
    one, other = one[begin : len(one) - end], other[begin : len(other) - end]
    if len(one) * len(other) > _MOST_BITS:
        return None
    if len(one) and len(other):
        words = len(one) // 64 + 1
        masks, rows = np.zeros((num_tokens, words), np.uint64), np.empty((len(other) + 1, words), np.uint64)
        _pair(one, other, begin, masks, rows, pairs)
    return pairs


def _alike(one: Column, other: Column) -> int:
    """With how many equal ones both begin."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


@njit(nogil=True, **BORROWING)
def _pair(one, other, begin, masks, rows, pairs):
    """Note the pairs of a longest common subsequence, the earliest of equal ones; all begin at `begin`.

    Bits stand for `one` from behind, a row for what `other` has from a place on; a bit is 0 where to leave out the
    request of `one` there makes what the two have in common from there on shorter.
    """
    n, m, words = len(one), len(other), rows.shape[1]
    unit, full = np.uint64(1), ~np.uint64(0)
    for i in range(n):
        bit = n - 1 - i
        masks[one[i], bit >> 6] |= unit << np.uint64(bit & 63)
    for word in range(words):
        rows[0, word] = full
    for row in range(m):
        last, own, mask, carry = rows[row], rows[row + 1], masks[other[m - 1 - row]], np.uint64(0)
        for word in range(words):
            before = last[word]
            met = before & mask[word]
            total = before + met
            over = np.uint64(total < before)
            total += carry
            carry = over | np.uint64(total < carry)
            own[word] = total | (before ^ met)
    i = j = 0
    while i < n and j < m:
        bit = n - 1 - i
        if one[i] == other[j]:
            pairs[begin + i] = begin + j
            i += 1
            j += 1
        elif rows[m - j, bit >> 6] >> np.uint64(bit & 63) & unit == unit:
            i += 1
        else:
            j += 1


def _alike_in_bytes(size: Column) -> Column:
    """Which steps, of so many bytes each, are like the last two, if these are alike, or like most."""
    alike = np.abs(size[:, None] - size) * _ALIKE_SHARE <= np.minimum(size[:, None], size)
    last, order = len(size) - 1, np.argsort(size, kind="stable")  # of as many the least: others may begin with more
    like = last if alike[last, last - 1] else order[alike.sum(axis=0)[order].argmax()]
    return np.flatnonzero(alike[like])


class AlignedSteps:
    """The steps between the marks of a trace, aligned. Raises ValueError if there are fewer than two.

    The first step may be special, and lifespans are those that the record shows to its end. `some`: not all of them are
    aligned, but those that ask for about as much as the last two do, or as most do.
    """

    def __init__(self, trace: Trace, *, some: bool = False) -> None:
        self._trace, self._rows = trace, sequence_rows(trace, TINY_BYTES + 1)
        self._births = trace.start[self._rows]
        marks = distinct(trace.mark_event[trace.mark_kind == MARK_STEP])
        self._marks, self._bounds = marks, np.searchsorted(self._births, marks)
        if len(self._bounds) < 3:
            raise ValueError("steps can be aligned if there are two at least")
        keys, size = sequence_keys(trace, self._rows), trace.size[self._rows]
        bounds = list(itertools.pairwise(self._bounds.tolist()))
        step_bytes = np.array([size[begin:end].sum() for begin, end in bounds])
        self._steps = [bounds[step] for step in _alike_in_bytes(step_bytes).tolist()] if some else bounds
        self.num_steps = len(self._steps)
        self._aligned = align([keys[begin:end] for begin, end in self._steps], keys[size < LITTLE_BYTES])

    @property
    def static_share(self) -> float:
        """Bytes of static requests over those of all, in the step that has least of them."""
        size = self._trace.size[self._rows]
        of_steps = zip([size[begin:end] for begin, end in self._steps], self._aligned.sites, strict=True)
        return min(float(own[sites >= 0].sum() / max(int(own.sum()), 1)) for own, sites in of_steps)

    @property
    def _length(self) -> int:
        return len(self._aligned.key)

    @property
    def _whole(self) -> Column:
        """Rows of the trace that are requests of whole steps."""
        return self._rows[int(self._bounds[0]) : int(self._bounds[-1])]

    @cached_property
    def _sites(self) -> Column:
        """(requests of whole steps,) the tick at which each static one comes, -1: it is none, -2: no aligned step."""
        ticks = np.full(len(self._whole), -2)
        for number, ((begin, end), sites) in enumerate(zip(self._steps, self._aligned.sites, strict=True)):
            first = int(self._bounds[0])
            ticks[begin - first : end - first] = np.where(sites >= 0, sites + number * self._length, -1)
        return ticks

    @cached_property
    def _times(self) -> tuple[Column, Column, Column]:
        """When requests of whole steps come, how long they lived, and how long they have lived on: (r,) ticks each.

        A dynamic request comes when the next static one would, or at 0 if none came before it. One that was not freed
        has lived 0 ticks, one that was freed has lived on for 0.
        """
        first, last = int(self._bounds[0]), int(self._bounds[-1])
        sites, born, end = self._sites, self._births[first:last], self._trace.end[self._rows[first:last]]
        is_static = sites >= 0
        following = np.concatenate([[0], sites[is_static] + 1])  # after so many static ones
        birth = np.where(is_static, sites, following[np.searchsorted(born[is_static], born)])
        is_freed = end < self._trace.num_events
        death = np.where(is_freed, following[np.searchsorted(born[is_static], end)], following[-1])
        # a static request is itself the last before whatever is freed next
        lived = death - birth + ~is_static
        return birth, np.where(is_freed, lived, 0), np.where(is_freed, 0, lived)

    def schedule(self) -> Schedule:
        """The cycle of the static requests; to be asked for where there are any."""
        length, is_static = self._length, self._sites >= 0
        (birth, lived, age), rows = (column[is_static] for column in self._times), self._whole[is_static]
        longest, oldest = np.zeros((2, length), np.int64)
        np.maximum.at(longest, birth % length, lived)
        np.maximum.at(oldest, birth % length, age)
        planned = (longest > 0) & (longest <= length) & (oldest <= longest)
        shown = np.zeros(length, np.int64)
        shown[birth[::-1] % length] = rows[::-1]  # the first that is one
        start = np.arange(length)
        return Schedule(
            size=self._trace.size[shown],
            stream=self._trace.stream[shown].astype(np.int64),
            start=start,
            end=start + np.where(planned, longest, 1),
            planned=planned,
            row=shown,
            num_prologue=0,
            cycle_start=0,
            cycle_end=length,
            period_requests=length,
            covered_requests=length * self.num_steps,
            minimum_size=TINY_BYTES + 1,
        )

    def with_dynamic(self, cycle: Schedule) -> Schedule:
        """The cycle that `schedule` made, with the dynamic requests of the last step, on a clock that counts these too.

        `row` is the entry of the cycle, -1: a dynamic one. Little ones, and those that live on after the step, are none
        of it: the heap has them.
        """
        sites, (begin, stop) = self._aligned.sites[-1], self._steps[-1]
        rows, births = (column[begin:stop] for column in (self._rows, self._births))
        size, stream, number = self._trace.size[rows], self._trace.stream[rows].astype(np.int64), np.arange(len(rows))
        is_static, unit = sites >= 0, len(sites)
        last = np.maximum.accumulate(np.where(is_static, number, -1))  # static request before each, or itself
        time = np.append(sites[last] * unit + number - last, cycle.cycle_end * unit)
        freed, over = self._trace.end[rows], self._marks[np.searchsorted(self._bounds, stop)]
        end = np.searchsorted(births, freed)
        beside = np.flatnonzero(~is_static & (last >= 0) & (freed <= over) & (size >= LITTLE_BYTES))
        start = np.concatenate([cycle.start * unit, time[beside]])
        order, count = np.argsort(start, kind="stable"), len(start)
        return replace(
            cycle,
            size=np.concatenate([cycle.size, size[beside]])[order],
            stream=np.concatenate([cycle.stream, stream[beside]])[order],
            start=start[order],
            end=np.concatenate([cycle.end * unit, time[end[beside]]])[order],
            planned=np.concatenate([cycle.planned, np.ones(len(beside), bool)])[order],
            row=np.concatenate([np.arange(self._length), np.full(len(beside), -1)])[order],
            cycle_end=cycle.cycle_end * unit,
            period_requests=count,
            covered_requests=count,
        )

    def between(self) -> tuple[Column, ...]:
        """What steps have beside the n static requests, or leave out of them, as the runtime's `Between` has it.

        (n,) how many dynamic requests of a step come before each, at most; (n,) at least; (s,) for how long each of
        these lives, in that order, in ticks and one, 0: not known; (s, 2) how its size is to that of the one before it,
        0: not known; (n,) for one that some steps leave out, the next one that all have, or n; (n,) which one it is
        where no dynamic one came before it.
        """
        birth, lived, _ = self._times
        dynamic = (self._sites == -1) & (birth > 0)
        size = self._trace.size[self._whole[dynamic]]
        most, least, lasts, ratios = _sites_between(
            birth[dynamic], lived[dynamic], size, self._aligned.seen, self.num_steps
        )
        next_sure = _next_of(self._aligned.seen == self.num_steps)
        return most, least, lasts, ratios, next_sure, self._without(least > 0)

    def _without(self, needs: Column) -> Column:
        """(n,) the request that one of this size is where no dynamic one came before it, which `needs` some otherwise.

        If dynamic ones always come before it, as those of an expert before its result, it is left out with them: what
        is asked for is the first request before which they need not come, if those up to it are all of this size.
        """
        key, number = self._aligned.key, np.arange(self._length)
        last = _next_of(np.append(key[1:] != key[:-1], True))  # of those in a row that are alike
        following = _next_of(~needs)
        return np.where(following <= last, following, number)


def _next_of(chosen: Column) -> Column:
    """(n,) for each place the first from there on that is chosen (bool), n: none is."""
    places = np.where(chosen, np.arange(len(chosen)), len(chosen))
    return np.minimum.accumulate(places[::-1])[::-1]


def _sites_between(
    tick: Column, lived: Column, size: Column, seen: Column, num_steps: int
) -> tuple[Column, Column, Column, Column]:
    """The first four of `AlignedSteps.between`, from when dynamic requests come, how long they lived and their sizes.

    Where steps differ in how many come, any of them may be any other: all count as living as long as the longest.
    """
    length, begins = len(seen), np.flatnonzero(np.diff(tick, prepend=-1))  # of runs without a static request between
    counts = np.diff(np.append(begins, len(tick)))
    place, number = tick[begins] % length, np.arange(len(tick)) - np.repeat(begins, counts)
    most, runs, least = np.zeros(length, np.int64), np.zeros(length, np.int64), np.full(length, len(tick))
    np.maximum.at(most, place, counts)
    np.minimum.at(least, place, counts)
    np.add.at(runs, place, 1)
    first = np.cumsum(most) - most
    lasts = np.zeros(int(most.sum()), np.int64)
    slot = np.repeat(first[place], counts) + number
    np.maximum.at(lasts, slot, lived)
    is_whole = np.repeat(counts == most[place], counts)
    # the first step's head, and the last one's tail, may be missing
    varies = (most > 0) & ((least < most) | (runs < num_steps - 1))
    for at in np.flatnonzero(varies).tolist():
        own = slice(first[at], first[at] + most[at])
        lasts[own] = lasts[own].max()
    return most, np.where(runs == seen, least, 0), lasts, _ratios(size, slot, number, is_whole, len(lasts))


def _ratios(size: Column, slot: Column, number: Column, is_whole: Column, num_slots: int) -> Column:
    """(num_slots, 2) how the size of each dynamic request is to that of the one before it, 0: not known.

    What an expert asks for grows alike with its tokens. Of dynamic requests without a static one between, those of the
    last step that had all of them (`is_whole`) count; the first of them may be another expert's than the one before,
    where steps do not agree.
    """
    pairs = np.stack([size[1:], size[:-1]], axis=1)
    pairs = pairs // np.gcd(pairs[:, :1], pairs[:, 1:])
    slot, number, is_whole = slot[1:], number[1:], is_whole[1:]
    ratios = np.zeros((num_slots, 2), np.int64)
    ratios[slot[is_whole]] = pairs[is_whole]
    differs = slot[(number == 0) & (pairs != ratios[slot]).any(axis=1)]
    ratios[differs] = 0
    return ratios
