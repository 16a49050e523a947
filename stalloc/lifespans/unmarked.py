"""Steps of several kinds that no mark tells apart: where each begins.

Contract: nearly all of the record is steps of two kinds or more that occur in it twice or more, one after the other, in
no order that repeats. One kind of step is found where it repeats at once; what lies between two of its occurrences are
steps of other kinds. What always comes so many times, or always before the same, is a part of a step: a layer, say. Of
several ways to part a record the one is taken that takes least to say: each kind once, and the order of the steps.
"""

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.lifespans.periods import TINY_BYTES, sequence_keys, sequence_rows
from stalloc.lifespans.repetition import longest_runs
from stalloc.trace import MARK_STEP, Trace
from stalloc.trace.record import mark_columns

_MIN_LENGTH = 4  # requests of a step
_OFTEN = 2  # times that a kind of step comes, whether once or several times in a row, and that its parts are together
_MIN_COVERED = 0.9  # of the requests from the first step to the last, that are of steps which recur
_MIN_SHARE = 0.5  # of the record, that this is
_MAX_KINDS = 32
_MAX_OUTLIVING = 0.1  # of the bytes that steps make
_A_STEP = 2  # requests that the name of a step in the order of steps counts for
_FIRST_LETTER = 1 << 16  # beyond the surrogates, which no text has


@dataclass(frozen=True)
class _Parting:
    """A text of requests, parted into steps."""

    first: int  # where the first step begins
    steps: list[str]

    @property
    def cost(self) -> int:
        return sum(map(len, set(self.steps))) + _A_STEP * len(self.steps)

    @property
    def recurring(self) -> set[str]:
        """The kinds of steps that are come back to again and again."""
        runs = Counter(step for step, _ in itertools.groupby(self.steps))
        return {step for step, count in runs.items() if count >= _OFTEN}

    def covers(self, text: str) -> bool:
        """Whether steps that recur are what the text consists of."""
        whole, recurring = sum(map(len, self.steps)), self.recurring
        covered = sum(len(step) for step in self.steps if step in recurring)
        return covered >= _MIN_COVERED * whole and whole >= _MIN_SHARE * len(text)


def with_steps_marked(trace: Trace) -> Trace | None:
    """A trace without marks, with a mark wherever one of its steps begins or the last one ends; None: it has none."""
    rows = sequence_rows(trace, TINY_BYTES + 1)
    _, letters = np.unique(sequence_keys(trace, rows), return_inverse=True)
    text = (letters.astype("<u4") + _FIRST_LETTER).tobytes().decode("utf-32-le")
    partings = [_part(text, anchor) for anchor in _anchors(letters, text)]
    best = min((one for one in partings if one.covers(text)), key=lambda one: one.cost, default=_Parting(0, []))
    if not 1 < len(_merged(best, 1).recurring) <= _MAX_KINDS:
        return None  # perhaps there is but one step, of which these are parts
    bounds = best.first + np.cumsum([0, *map(len, best.steps)])
    begins = np.append(trace.start[rows], trace.num_events)[bounds]
    if _outlive_the_next(trace.start[rows], trace.end[rows], trace.size[rows], begins):
        return None  # layers, say, whose results are needed again later
    names, columns = mark_columns([(event, MARK_STEP, "") for event in begins.tolist()])
    return trace.replace(names=names, **columns)


def _outlive_the_next(start: Column, end: Column, size: Column, begins: Column) -> bool:
    """Whether much of what steps make lives longer than the step after them; (n,) requests, (k,) begins of steps."""
    born, dead = np.searchsorted(begins, start, side="right"), np.searchsorted(begins, end, side="right")
    told = (born > 0) & (born + 2 < len(begins))
    return bool(size[told & (dead > born + 1)].sum() > _MAX_OUTLIVING * size[told].sum())


def _anchors(letters: Column, text: str) -> list[str]:
    """Steps that repeat at once, as they begin where the repetition does, and where it ends."""
    anchors: list[str] = []
    for run in longest_runs(letters.astype(np.int64), 2, _MIN_LENGTH):
        firsts = run.first, run.first + run.covered % run.length
        anchors += [_root(text[first : first + run.length]) for first in firsts]
    return [anchor for anchor in dict.fromkeys(anchors) if len(anchor) >= _MIN_LENGTH]


def _part(text: str, anchor: str) -> _Parting:
    """Part a text at every occurrence of `anchor`."""
    first, *pieces = text.split(anchor)
    known = _kinds_in(_kinds_in({piece for piece in pieces[:-1] if len(piece) >= _MIN_LENGTH}))
    if len(known) > _MAX_KINDS:
        return _Parting(0, [])
    between = {piece: _in_steps(piece, known) if len(piece) >= _MIN_LENGTH else [] for piece in set(pieces[:-1])}
    steps: list[str] = []
    for piece in pieces[:-1]:  # a short one is the end of the step before it
        steps += [anchor, *between[piece]] if between[piece] or not piece else [anchor + piece]
    if not pieces:
        return _Parting(0, [])
    known = sorted(filter(None, {*known, anchor}), key=len, reverse=True)
    while before := [step for step in known if first.endswith(step)]:
        steps.insert(0, before[0])
        first = first.removesuffix(before[0])
    steps.append(anchor)
    last = pieces[-1]
    while following := [step for step in known if last.startswith(step)]:
        steps.append(following[0])
        last = last.removeprefix(following[0])
    return _merged(_Parting(len(first), steps), _OFTEN)


def _kinds_in(pieces: Collection[str]) -> list[str]:
    """The kinds of steps that pieces consist of, the shortest first: longer ones may consist of them."""
    known: list[str] = []
    for piece in sorted(pieces, key=lambda one: (len(one), one)):
        known += [step for step in dict.fromkeys(_in_steps(piece, known)) if step not in known]
        if len(known) > _MAX_KINDS:
            break
    return known


def _in_steps(piece: str, known: list[str]) -> list[str]:
    """What lies between two known steps, as steps: known ones, or new ones that may repeat."""
    for step in sorted((one for one in known if one in piece), key=len, reverse=True):
        first, *others = (_in_steps(part, known) for part in piece.split(step))
        return [*first, *itertools.chain.from_iterable([step, *other] for other in others)]
    root = _root(piece)
    return [root] * (len(piece) // len(root)) if piece else []


def _root(text: str) -> str:
    """The shortest stretch that a text consists of."""
    return text[: (text + text).find(text, 1)]


def _merged(parting: _Parting, often: int) -> _Parting:
    """The parting with parts joined that came together at least `often` times, without incomplete steps at its ends."""
    steps, parts = parting.steps, set[str]()
    while True:
        merged = _with_pairs_merged(_with_runs_merged(steps, often, parts), often, parts)
        if len(merged) == len(steps):
            break
        steps = merged
    begin, end = 0, len(steps)
    while begin < end and steps[begin] in parts:
        begin += 1
    while begin < end and steps[end - 1] in parts:
        end -= 1
    return _Parting(parting.first + sum(map(len, steps[:begin])), steps[begin:end])


def _with_runs_merged(steps: list[str], often: int, parts: set[str]) -> list[str]:
    """Merge what always comes the same number of times in a row; notes what was merged."""
    runs = [(step, len([*same])) for step, same in itertools.groupby(steps)]
    lengths: dict[str, list[int]] = {}
    for step, length in runs[1:-1]:  # of those at the ends the rest may not be there
        lengths.setdefault(step, []).append(length)
    merged: list[str] = []
    for step, length in runs:
        if length > 1 and len(lengths.get(step, ())) >= often and set(lengths[step]) == {length}:
            merged.append(step * length)
            parts.add(step)
        else:
            merged += [step] * length
    return merged


def _with_pairs_merged(steps: list[str], often: int, parts: set[str]) -> list[str]:
    """Merge what others only come after, or only before; notes what was merged."""
    times = Counter(itertools.pairwise(steps))
    after: dict[str, set[str]] = {}
    before: dict[str, set[str]] = {}
    for first, second in times:
        after.setdefault(first, set()).add(second)
        before.setdefault(second, set()).add(first)

    def belong(first: str, second: str) -> bool:
        begins = all(before[one] == {first} for one in after[first])
        ends = all(after[one] == {second} for one in before[second])
        return first != second and times[first, second] >= often and (begins or ends)

    merged: list[str] = []
    at = 0
    while at < len(steps):
        if at + 1 < len(steps) and belong(steps[at], steps[at + 1]):
            merged.append(steps[at] + steps[at + 1])
            parts.update(steps[at : at + 2])
            at += 1
        else:
            merged.append(steps[at])
        at += 1
    return merged
