"""Steps that recur in any order: what lies between two marks of the program, taken as one sequence each.

Contract: two steps are of one kind if they ask for the same sizes on the same streams in the same order. The clock of a
step is the position in that sequence, as on a schedule. A request that outlives its step is handed on, perhaps through
several steps of whatever kind: those of one stream are ranked by size, and each kind of step knows of every stream and
rank how long what was handed on to it has lived in it. What lives longer than the record shows, or for very long, has
no known end.
"""

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column, distinct
from stalloc.lifespans.periods import TINY_BYTES, longest_runs, sequence_keys, sequence_rows
from stalloc.trace import MARK_STEP, Trace
from stalloc.trace.record import mark_columns

_LOOKED_AT = 4  # occurrences of a kind whose lifespans count: the last ones
_MAX_STEPS = 16  # through which a request may be handed on

_NOTHING: Column = np.zeros(0, np.int64)

_Until = dict[int, Column]  # as `StepKind.until`


@dataclass(frozen=True, eq=False, kw_only=True)
class StepKind:
    """One kind of step. `start` of request i is i."""

    size: Column  #: (n,) requested bytes
    stream: Column  #: (n,) index into the trace's streams
    end: Column  #: (n,) position after the last request that it lives beside; beyond n: handed on; 0: not known
    until: dict[int, Column]
    """By stream, (r,) for each rank of what is handed on to this step: the position before which it is gone, n if the
    step after gets it too, -1 if that was not seen."""
    times_seen: int

    @property
    def key(self) -> bytes:
        """Sizes and streams of its requests as bytes: equal for all steps of one kind."""
        return np.stack([self.size, self.stream]).tobytes()

    def with_what_was_known(self, before: "StepKind") -> "StepKind":
        """This kind, completed by what an earlier record told of it: the longest lifespans that either shows."""
        streams = self.until.keys() | before.until.keys()
        until = {one: _longest(self.until.get(one, _NOTHING), before.until.get(one, _NOTHING)) for one in streams}
        times_seen = max(self.times_seen, before.times_seen)
        return replace(self, end=np.maximum(self.end, before.end), until=until, times_seen=times_seen)

    def handed_on(self, stream: int) -> Column:
        """Rows of a stream that outlive the step, by rank: the largest first."""
        return _ranked(self.size, self.end, self.stream == stream)


def recurring_steps(trace: Trace) -> list[StepKind]:
    """The kinds of steps between two marks, in order of first occurrence."""
    rows = sequence_rows(trace, TINY_BYTES + 1)
    births = trace.start[rows]
    marks = distinct(trace.mark_event[trace.mark_kind == MARK_STEP])
    bounds = np.searchsorted(births, marks)
    size, stream = trace.size[rows], trace.stream[rows].astype(np.int64)
    deaths = np.where(trace.end[rows] < trace.num_events, np.searchsorted(births, trace.end[rows]), -1)
    places: dict[bytes, list[int]] = {}
    for step, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        if begin < end:
            places.setdefault(np.stack([size[begin:end], stream[begin:end]]).tobytes(), []).append(step)
    until: dict[int, _Until] = {step: {} for steps in places.values() for step in steps[:1]}
    first_of = {step: steps[0] for steps in places.values() for step in steps}
    ends: list[Column] = []
    for steps in places.values():
        begin, length = int(bounds[steps[0]]), int(bounds[steps[0] + 1] - bounds[steps[0]])
        whole, told = _told(bounds, steps)
        end = _ends(bounds, deaths, told, length)
        ends.append(np.where(end > 0, end, _ends(bounds, deaths, whole, length)))
        own_stream = stream[begin : begin + length]
        for name in distinct(own_stream).tolist():
            ranked = _ranked(size[begin : begin + length], ends[-1], own_stream == name)
            for step in told:
                _note_arrivals(bounds, deaths[bounds[step] + ranked], step, name, first_of, until)
    kinds: list[StepKind] = []
    for steps, end in zip(places.values(), ends, strict=True):
        own, seen = slice(int(bounds[steps[0]]), int(bounds[steps[0] + 1])), until[steps[0]]
        kinds.append(StepKind(size=size[own], stream=stream[own], end=end, until=seen, times_seen=len(steps)))
    return kinds


def _longest(seen: Column, known: Column) -> Column:
    """(r,) what was seen of each rank or was known of it, whichever is longer; -1: neither."""
    both = np.full((2, max(len(seen), len(known))), -1, np.int64)
    both[0, : len(seen)], both[1, : len(known)] = seen, known
    return both.max(axis=0)


def _ranked(size: Column, end: Column, chosen: NDArray[np.bool_]) -> Column:
    rows = np.flatnonzero((end > len(size)) & chosen)
    return rows[np.argsort(-size[rows], kind="stable")]


def _told(bounds: Column, steps: list[int]) -> tuple[list[int], list[int]]:
    """Occurrences that tell how long requests live: the step after them is whole; and those without the first.

    The first may be special. It counts where only it is so long ago that what it made is gone.
    """
    whole = [step for step in steps if step + 2 < len(bounds)]
    return whole[-_LOOKED_AT:], (whole if len(whole) < 2 else whole[1:])[-_LOOKED_AT:]


def _step_of(bounds: Column, death: Column) -> Column:
    """The step in which something is freed; what is freed between two belongs to the one before."""
    return np.searchsorted(bounds, death) - 1


def _ends(bounds: Column, deaths: Column, told: list[int], length: int) -> Column:
    """(n,) the latest end over occurrences of one kind of step, 0 where they do not tell it."""
    latest, through = np.zeros((2, length), np.int64)
    unseen = np.zeros(length, np.int64)  # steps for which a request has lived on, its end not being seen
    for step in told:
        begin = int(bounds[step])
        death = deaths[begin : begin + length]
        dead = death >= 0
        steps_later = _step_of(bounds, death) - step
        latest = np.maximum(latest, np.where(dead, death - begin, 0))
        through = np.maximum(through, np.where(dead, steps_later, 0))
        unseen = np.maximum(unseen, np.where(dead, 0, len(bounds) - 2 - step))
    known = (latest > 0) & (through <= _MAX_STEPS) & (unseen <= through)
    handed = np.minimum(latest, length + np.maximum(np.arange(length), 1))  # at most as long as an iteration
    return np.where(known, np.where(latest > length, handed, latest), 0)


def _note_arrivals(
    bounds: Column, death: Column, step: int, stream: int, first_of: dict[int, int], until: dict[int, _Until]
) -> None:
    """Note in the steps after `step` how long what it handed on lived in them; `death` is (r,), by rank of a stream."""
    last = np.where(death >= 0, _step_of(bounds, death), len(bounds) - 2)
    for after in range(step + 1, min(step + 1 + _MAX_STEPS, len(bounds) - 1)):
        alive, kind = np.flatnonzero(last >= after), first_of.get(after)
        if not len(alive):
            return
        if kind is None:
            continue
        length, ranks = int(bounds[after + 1] - bounds[after]), np.arange(alive[-1] + 1)
        stays = (death[ranks] < 0) | (last[ranks] > after)
        position = np.where(stays, length, death[ranks] - bounds[after])
        position[last[ranks] < after] = -1
        until[kind][stream] = _longest(until[kind].get(stream, _NOTHING), position)


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
