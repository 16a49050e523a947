"""Searching a program: the largest value of a parameter with which it fits, or the smallest card on which it does.

Contract: the answer is that of running every value one by one. With the value itself the program was run and completed
in the memory offered; with the next one it ran out. No value above the largest whose live memory fits can fit, if live
memory grows with the value; each value between was run, or two runs that make the same requests tell that it is too
large. Where that cannot be said, `notes` has a sentence.

Cards are in the order of their memory. The program was run on the answer itself, with its number of multiprocessors and
its architecture, and completed; on the next smaller card it ran out, or what is live at a time is clearly more than
that card has.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stalloc.device import VirtualGPU
from stalloc.device.known_gpus import PLENTY
from stalloc.errors import BadInputError
from stalloc.lifespans import lower_bound
from stalloc.replay.simulation import run_one
from stalloc.sizing.side_by_side import Asked, RunSeen
from stalloc.sizing.tries import NEEDED, Contender, Otherwise, Runner, Tries, Wanted

_MOST_VALUES = 1 << 20
_HOW = "write NAME=FIRST..LAST or NAME=FIRST..LAST:STEP, for example batch=1..512"
_MOST_GUESSES = 4  # for an allocator, before the range is cut into thirds instead
_MOST_BETWEEN = 48  # values that are checked one by one
_MOST_BELOW, _MOST_SHOWN = 16, 4  # values below an answer that are checked; those shown that do not fit
_MOST_DOWN = 8  # values tried from the top, where only a run can say
_CLOSE = 0.9  # the least share of one card's need that another card needs: workspaces differ from card to card


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What `--find` names."""

    name: str
    values: range

    @classmethod
    def parse(cls, text: str) -> "Parameter":
        """What "batch=1..512" or "seq=128..8192:128" says. Raises BadInputError where it says nothing."""
        match = re.fullmatch(r"\s*([A-Za-z_][\w-]{0,63})=(\d{1,12})\.\.(\d{1,12})(?::(\d{1,12}))?\s*", text, re.ASCII)
        if match is None:
            raise BadInputError(f"--find is {text[:60]!r}: {_HOW}, or gpu for the smallest card.")
        first, last, step = int(match[2]), int(match[3]), int(match[4] or 1)
        if step < 1 or last < first:
            raise BadInputError(f"--find is {text[:60]!r}, which has no values: {_HOW}.")
        if (last - first) // step >= _MOST_VALUES:
            raise BadInputError(f"--find is {text[:60]!r}, which has more than a million values: give a step.")
        return cls(name=match[1], values=range(first, last + 1, step))

    @property
    def placeholder(self) -> str:
        return f"{{{self.name}}}"

    def check_in(self, command: Sequence[str]) -> None:
        """Raise BadInputError unless the program has the placeholder among its arguments."""
        if any(self.placeholder in word for word in command):
            return
        others = sorted({found for word in command for found in re.findall(r"\{[A-Za-z_][\w-]*\}", word)})
        has = f"only {' and '.join(others)[:100]}" if others else "nothing of the kind"
        raise BadInputError(
            f"--find looks for {self.name}, but the program's arguments have no {self.placeholder}, {has}: write it "
            f"where the value belongs, for example --{self.name} {self.placeholder}."
        )

    def filled(self, command: Sequence[str], value: int) -> list[str]:
        return [word.replace(self.placeholder, str(value)) for word in command]

    def label(self, value: int) -> str:
        return f"{self.name}={value}"


def last_enough(num: int, enough: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """The last of `num` places in a row that is enough, -1 if the first is not; `enough` tries several side by side.
    That one is enough and the next is not was tried, and no place after one that is not enough may be enough again, as
    with tokens in a cache whose program's weights and activations grow with the value, or cards by their memory."""
    low, high = -1, num
    while high - low > 1:
        third = max((high - low) // 3, 1)
        places = sorted({low + third, high - third} - {low, high})
        for place, is_enough in zip(places, enough(places), strict=True):
            if is_enough:
                low = max(low, place)
            else:
                high = min(high, place)
                break
    return low


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest values that fit, as indices; -1: not even the first fits."""

    needed: int | None  #: the largest value whose live memory fits: no allocator can do more. None if it is not known
    by_allocator: dict[str, int]
    notes: list[str]


def find_largest(tries: Tries) -> Largest:
    """Search the whole range for all allocators at once."""
    search = _Search(tries)
    last = len(tries.values) - 1
    first = sorted({last // 8, last // 3})  # a batch of one is often a special case, and so are very large ones
    tries.do([Wanted("observe", NEEDED, index) for index in first])
    knows_needed = any(tries.fits(NEEDED, index) is not None for index in first)
    if knows_needed:
        search.narrow([NEEDED])
        search.top = search.fitting(NEEDED)
    search.narrow(list(tries.contenders))
    found = {name: search.fitting(name) for name in tries.contenders}
    notes = search.notes + (_not_growing(tries) if knows_needed else []) + _holes(tries, found)
    return Largest(needed=search.top if knows_needed else None, by_allocator=found, notes=notes)


class _Search:
    def __init__(self, tries: Tries) -> None:
        self._tries = tries
        self._num_guesses: Counter[str] = Counter()
        self._num_down = 0
        self.top: int | None = None  #: the largest index whose live memory fits, once that is known
        self.notes: list[str] = []

    def fitting(self, name: str) -> int:
        tries = self._tries
        return max((index for index in range(len(tries.values)) if tries.fits(name, index)), default=-1)

    def narrow(self, names: Sequence[str]) -> None:
        """Narrow the range until nothing is left to find out."""
        while wanted := [one for name in names for one in self._next(name)]:
            self._tries.do(wanted)

    def _next(self, name: str) -> list[Wanted]:
        """What to find out next about one allocator."""
        tries = self._tries
        low = self.fitting(name)
        above = range(low + 1, len(tries.values))
        high = next((index for index in above if tries.fits(name, index) is False), len(tries.values))
        by_run = name != NEEDED and not tries.contenders[name].is_exact
        if by_run and self.top is not None and self._num_down < _MOST_DOWN:
            from_top = self._down(name)
            if from_top:
                return from_top
        elif high - low > 1:
            return self._between(name, low, high)
        if name == NEEDED:
            return []
        ends = [Wanted("confirm", name, low)] if low >= 0 and (name, low) not in tries.limited else []
        if low + 1 < len(tries.values) and (name, low + 1) not in tries.failed:
            ends.append(Wanted("fail", name, low + 1))
        return ends or ([] if by_run else self._doubtful(name, low))

    def _between(self, name: str, low: int, high: int) -> list[Wanted]:
        """Where to look between a value that fits and one that does not."""
        tries = self._tries
        self._num_guesses[name] += 1
        guess = self._guess(name, low, high) if self._num_guesses[name] <= _MOST_GUESSES else None
        if guess is None:
            third = max((high - low) // 3, 1)
            return [Wanted("find out", name, place) for place in {low + third, high - third} if low < place < high]
        if name == NEEDED:
            return [Wanted("observe", name, place) for place in (guess, guess + 1) if low < place < high]
        found = [Wanted("confirm", name, guess)] if guess >= 0 else []
        return [*found, Wanted("fail", name, guess + 1)] if guess + 1 < len(tries.values) else found

    def _guess(self, name: str, low: int, high: int) -> int | None:
        """The largest index that probably fits, in [low, high); None if nothing can be said."""
        top = min(high - 1, self.top if self.top is not None else high - 1)
        if name != NEEDED and top - low <= _MOST_BETWEEN:  # what a cache takes may fall where the value grows
            guesses = {index: self._tries.guess(name, index) for index in range(low + 1, top + 1)}
            return None if None in guesses.values() else max((i for i, one in guesses.items() if one), default=low)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._tries.fits(name, middle)
            fits = self._tries.guess(name, middle) if fits is None else fits
            if fits is None:
                return None
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _down(self, name: str) -> list[Wanted]:
        """The largest value that can fit, and the next value, where only a run tells whether it fits."""
        tries, top = self._tries, self.top if self.top is not None else -1
        index = next((index for index in range(top, -1, -1) if tries.fits(name, index) is not False), -1)
        if index < 0 or tries.fits(name, index):
            return []
        self._num_down += 1
        after = [Wanted("fail", name, index + 1)] if index + 1 < len(tries.values) else []
        return [Wanted("confirm", name, index), *after]

    def _doubtful(self, name: str, found: int) -> list[Wanted]:
        """Values above the answer that are not too large for every allocator, and may fit after all."""
        tries = self._tries
        between = [index for index in range(self.top or 0, found, -1) if tries.fits(name, index) is None]
        shown = tries.contenders[name].shown
        if len(between) > _MOST_BETWEEN:
            note = (
                f"{shown}: not every value between {tries.label(between[-1])} and {tries.label(between[0])} was looked "
                "at; one of them may fit although a smaller one does not."
            )
            self.notes += [note] if note not in self.notes else []
            between = between[-_MOST_BETWEEN:]
        return [Wanted("find out", name, index) for index in between if tries.guess(name, index) is not False]


def _not_growing(tries: Tries) -> list[str]:
    """A sentence if the memory needed does not grow with the value, where the answer depends on that."""
    known = [index for index in sorted(tries.observed) if tries.needed_bytes(index) is not None]
    for low, high in itertools.pairwise(known):
        if tries.fits(NEEDED, high) and not tries.fits(NEEDED, low):
            return [
                f"{tries.label(high)} needs less than {tries.label(low)}: what is needed does "
                "not grow with the value, and larger ones than the answers may fit too."
            ]
    return []


def _holes(tries: Tries, found: dict[str, int]) -> list[str]:
    """A sentence for each allocator under which smaller values than its answer do not fit."""
    lines = []
    for name, answer in found.items():
        known = ((index, tries.fits(name, index)) for index in range(max(answer - _MOST_BELOW, 0), answer))
        failing = [index for index, fits in known if (tries.guess(name, index) if fits is None else fits) is False]
        if failing:
            shown = ", ".join(str(tries.values[index]) for index in failing[:_MOST_SHOWN])
            more = f" and {len(failing) - _MOST_SHOWN} more" if len(failing) > _MOST_SHOWN else ""
            lines.append(
                f"{tries.contenders[name].shown}: smaller values than {tries.values[answer]} do not fit "
                f"({shown}{more}): what a cache takes does not grow evenly."
            )
    return lines


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The smallest cards that are large enough, as indices; the number of cards if none is."""

    by_allocator: dict[str, int]
    seen: dict[tuple[str, int], RunSeen]  #: the runs by allocator and card
    needed_bytes: int | None  #: the most bytes live at a time, on the largest card; None if that is not known
    findings: dict[str, object]
    num_runs: int


def find_smallest(
    cards: Sequence[VirtualGPU], command: list[str], contenders: Sequence[Contender], run: Runner
) -> Smallest:
    """Try cards, the smallest first; `total_bytes` of each is what the program may have."""
    largest = dataclasses.replace(cards[-1], total_bytes=PLENTY)
    work = dataclasses.replace(contenders[0].work, gpu=largest, keep_history=True)
    without_limit = Asked(command=command, work=work, name="without a limit")
    (plenty,) = run([without_limit])
    otherwise = Otherwise(run)
    findings = otherwise.findings_of(without_limit, plenty)
    num_runs = 1
    needed = max((lower_bound(trace) for trace in plenty.traces), default=0) or None
    first = next((at for at, card in enumerate(cards) if card.total_bytes >= (needed or 0) * _CLOSE), len(cards))
    seen: dict[tuple[str, int], RunSeen] = {}
    answers: dict[str, int] = {}
    begun = {one.name: _guess(one, cards, plenty, first) for one in contenders}

    def on(card: VirtualGPU, one: Contender) -> Asked:
        work = dataclasses.replace(one.work, gpu=card, name_holders=True)
        return Asked(command=command, work=work, name=f"{card.name}, {one.shown}")

    while left := [one for one in contenders if one.name not in answers]:
        wanted = []  # up from where each began until one is large enough, then down until one is not
        for one in left:
            known = {at: seen[one.name, at].completes for at in range(len(cards)) if (one.name, at) in seen}
            fitting = min((at for at, completes in known.items() if completes), default=len(cards))
            at = begun[one.name] if not known else fitting - 1 if fitting < len(cards) else max(known) + 1
            if at < first or at in known or at >= len(cards):
                answers[one.name] = fitting
            else:
                wanted.append((one, at))
        num_runs += len(wanted)
        for (one, at), result in zip(wanted, run([on(cards[at], one) for one, at in wanted]), strict=True):
            seen[one.name, at] = result
    if shared := findings.get("shared_blocks"):
        findings["order_decides"] = []
        for one in contenders:
            card = cards[at] if (at := answers[one.name]) < len(cards) else None
            if card is not None and shared["taken_bytes"] > card.total_bytes:
                told = otherwise.decides(one.name, on(card, one), seen[one.name, at])
                findings["order_decides"] += [{**told, "of": card.name}] if told is not None else []
    num_runs += otherwise.num_runs
    return Smallest(by_allocator=answers, seen=seen, needed_bytes=needed, findings=findings, num_runs=num_runs)


def _guess(one: Contender, cards: Sequence[VirtualGPU], plenty: RunSeen, first: int) -> int:
    """The smallest card with the memory that a replay of the run on the largest one needs; else the first."""
    if not plenty.traces or one.candidate is None or not one.is_exact:
        return min(first, len(cards) - 1)
    sizes = enumerate(card.total_bytes for card in cards[first:])
    enough = (at for at, size in sizes if all(run_one(trace, one.candidate, size).fits for trace in plenty.traces))
    return first + next(enough, len(cards) - 1 - first)
