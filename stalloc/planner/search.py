"""Better packings and higher bounds for problems that quick placement leaves open.

Contract: never worse than the packing given; the bound returned is proven, so that a packing that reaches it is
optimal. Heights are tried as yes-or-no questions from the bound upwards, never from a capacity. Deterministic for a
seed as long as it is nodes, not seconds, that run out.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.planner import exact_search
from stalloc.planner.exact_search import board
from stalloc.planner.packings import Packing
from stalloc.planner.problem import Problem

#: pairs of a request and an epoch beyond which a node costs too much
MAX_MEMBERS = 3_000_000
#: nodes of the first round at the bound, by request
FIRST_NODES = 64
#: nodes of the first restart, by request
RESTART_NODES = 2
#: work (nodes times requests and epochs) after which heights close below the best are tried, and how close (percent)
BISECTED, NEAR = 100_000_000, 85
#: rounds of those between two long looks at the lowest height that is not excluded
PROVE_EVERY = 16
#: work (nodes times requests and epochs) between two looks at the clock
SLICE = 4_000_000

#: (the hottest epoch first; then W longest, A largest area, Z largest size, or L lowest in the best packing; how to
#: choose an epoch). The last kind is solution-guided search (Beck, JAIR 29, 2007).
STRATEGIES = (
    (True, "W", exact_search.VALLEYS),
    (True, "A", exact_search.VALLEYS),
    (False, "Z", exact_search.VALLEYS),
    (False, "W", exact_search.VALLEYS),
    (False, "A", exact_search.VALLEYS),
    (True, "A", exact_search.FEWEST),
    (False, "Z", exact_search.FEWEST),
    (True, "W", exact_search.WEIGHTED),
    (False, "L", exact_search.VALLEYS),
    (False, "L", exact_search.FEWEST),
    (False, "L", exact_search.WEIGHTED),
)
#: of the logarithms of W, A and Z, from the second round of strategies on
NOISES = (0.3, 0.1, 0.03)
#: the height of the best packing in the same units
LOW_SCALE = 20.0


class Found(NamedTuple):
    """Where a search is."""

    packing: Packing  #: the best so far
    bound_bytes: int  #: no packing is lower
    num_nodes: int  #: spent so far


def searching(problem: Problem, packing: Packing, target: int, *, seed: int = 0) -> Iterator[Found]:
    """Where it is after each slice, for ever or until the best packing reaches `target` or the bound.

    Rounds with twice as many nodes each: the lowest height that is not excluded first, then heights between it and
    the best by bisection, each with a quarter of the nodes. Once that has cost `BISECTED`, heights close below the best
    instead, with other noise every round: where the bound is out of reach, small steps get further.
    """
    bound = problem.bound
    if packing.peak_bytes <= max(target, bound) or len(problem.size) == 0:
        return
    if int((problem.end - problem.start).sum()) > MAX_MEMBERS:
        return
    hunt = _Hunt(problem, packing, target, seed)
    quota, begun_at = FIRST_NODES * len(problem.size), hunt.low
    most_nodes = BISECTED // (len(problem.size) + len(problem.floor))
    while hunt.open and hunt.num_nodes < most_nodes:
        yield from hunt.look(hunt.low, min(quota, most_nodes - hunt.num_nodes), long=True)
        failed = hunt.low
        while hunt.best - failed > 1 and hunt.open and hunt.num_nodes < most_nodes:
            middle = (failed + hunt.best) // 2
            yield from hunt.look(middle, min(quota // 4, most_nodes - hunt.num_nodes))
            failed = max(hunt.low, failed if hunt.best <= middle else middle)
        quota *= 2
    for round_ in itertools.count():
        hunt = hunt.begin_again(seed + round_)
        end = hunt.num_nodes + 2 * most_nodes
        quota = FIRST_NODES * len(problem.size)
        if round_ and round_ % PROVE_EVERY == 0:  # so that whatever can be proven is, sooner or later
            yield from hunt.look(hunt.low, most_nodes << (round_ // PROVE_EVERY), long=True)
        while hunt.open and hunt.num_nodes < end:
            failed = begun_at
            if hunt.best - failed <= 1:  # nothing lies between, only that one height is left
                yield from hunt.look(hunt.low, end - hunt.num_nodes, long=True)
            while hunt.best - failed > 1 and hunt.open and hunt.num_nodes < end:
                near = min(failed + (hunt.best - failed) * NEAR // 100, hunt.best - 1)
                yield from hunt.look(near, min(quota // 2, end - hunt.num_nodes))
                failed = failed if hunt.best <= near else near
            quota *= 2
        if not hunt.open:
            break
    yield hunt.found()


class _Hunt:
    """A board and what is known of the heights, in units of the greatest common divisor of all sizes and floors."""

    def __init__(self, problem: Problem, packing: Packing, target: int, seed: int) -> None:
        floors = distinct(problem.floor)
        self.original = problem
        self.unit = int(np.gcd(np.gcd.reduce(problem.size), np.gcd.reduce(floors)))
        self.problem = Problem(problem.start, problem.end, problem.size // self.unit, problem.floor // self.unit)
        self.packing = packing
        self.seed = seed
        self.best = -(-packing.peak_bytes // self.unit)  #: height of the best packing
        self.bound = self.problem.bound  #: proven
        self.goal = target // self.unit
        self.num_nodes = 0
        self.room = 1
        self.board = board(self.problem, seed)
        self.num_restarts: dict[int, int] = {}  #: by height
        self.learnt = np.zeros(len(problem.floor))  #: failures by epoch
        self.slice = max(1, SLICE // (len(problem.size) + len(problem.floor)))
        self.heat = _hottest(self.problem)

    @property
    def low(self) -> int:
        """The lowest height worth a look."""
        return max(self.bound, self.goal)

    @property
    def open(self) -> bool:
        return self.best > self.low

    def begin_again(self, seed: int) -> "_Hunt":
        """A hunt that has learnt nothing and draws other noise, from the same packing and proven bound."""
        again = _Hunt(self.original, self.packing, self.goal * self.unit, seed)
        again.bound, again.num_nodes = self.bound, self.num_nodes
        return again

    def found(self) -> Found:
        return Found(self.packing, self.bound * self.unit, self.num_nodes)

    def look(self, height: int, quota: int, *, long: bool = False) -> Iterator[Found]:
        """Look for a packing below `height` in restarts of Luby lengths; `long`: begin with one that may prove.

        Every other restart knows which epochs failed before: some problems need that, it leads others astray.
        """
        end = self.num_nodes + quota
        length = quota // 4 if long else 0
        while self.num_nodes < end:
            index = self.num_restarts.get(height, 0)
            self.num_restarts[height] = index + 1
            round_, turn = divmod(index, len(STRATEGIES))
            rule = self._reorder(height, round_, turn)
            if not length:
                length = RESTART_NODES * len(self.problem.size) * _luby(round_ + 1)
            knows = (index + round_) % 2 == 1
            self.board.weight[:] = self.learnt if knows else 0
            exact_search.begin_search(self.board, height)
            status = exact_search.PAUSED
            begun = self.num_nodes
            while status == exact_search.PAUSED and self.num_nodes < begun + length:
                status = exact_search.search(self.board, rule, min(self.slice, begun + length - self.num_nodes))
                self.num_nodes = begun + exact_search.nodes(self.board)
                if status == exact_search.PAUSED:
                    yield self.found()
            length = 0
            self.learnt = self.board.weight + (0 if knows else self.learnt)
            if status == exact_search.FOUND:
                self._found()
            elif status == exact_search.NONE:
                self.bound = max(self.bound, min(exact_search.next_height(self.board), self.best))
            elif status == exact_search.NO_ROOM:
                self._enlarge()
            yield self.found()
            if status in (exact_search.FOUND, exact_search.NONE):
                return

    def _reorder(self, height: int, round_: int, turn: int) -> int:
        """Ranks of the strategy whose turn it is; the epoch rule."""
        hottest_first, letter, rule = STRATEGIES[turn]
        span = np.log((self.problem.end - self.problem.start).astype(np.float64))
        size = np.log(self.problem.size.astype(np.float64))
        key = {
            "W": span + 1e-6 * size,
            "A": span + size + 1e-6 * span,
            "Z": size + 1e-6 * span,
            "L": self.packing.offset * (-LOW_SCALE / self.packing.peak_bytes),
        }[letter]
        if round_:
            noise = NOISES[round_ % len(NOISES)]
            key = key + np.random.default_rng((self.seed, round_, turn, height)).uniform(-noise, noise, len(key))
        order = np.lexsort((-key, -self.heat)) if hottest_first else np.argsort(-key, kind="stable")
        self.board.rank[order] = np.arange(len(order))
        return rule

    def _found(self) -> None:
        offset = self.board.offset * self.unit
        peak = int((self.board.offset + self.problem.size).max())
        if peak < self.best:
            self.best = peak
            self.packing = Packing(offset, peak * self.unit, "exact search")

    def _enlarge(self) -> None:
        if self.room < 64:
            self.room *= 4
            self.board = board(self.problem, self.seed, room=self.room)


def _hottest(problem: Problem) -> Column:
    """(n,) highest floor and load together of any epoch that a request is live in."""
    height = np.append(problem.floor + problem.load, 0)
    return np.maximum.reduceat(height, np.stack([problem.start, problem.end], axis=1).reshape(-1))[::2]


def _luby(index: int) -> int:
    """1, 1, 2, 1, 1, 2, 4, ... for 1, 2, 3, ... (Luby, Sinclair and Zuckerman, 1993)."""
    while True:
        bits = index.bit_length()
        if index == (1 << bits) - 1:
            return 1 << (bits - 1)
        index -= (1 << (bits - 1)) - 1
