"""The cheapest choice of what is recomputed that keeps a budget: by the frontier, or by Checkmate's integer program.

Contract: at most ROUNDS proposals are run, each asking for less or more by what the one before was over or left.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

from stalloc.fitting.block_graph import optimal_blocks
from stalloc.fitting.frontier import Proposal, between, describe, frontier, proposal, whole_blocks

if TYPE_CHECKING:
    from stalloc.fitting.candidates import Fitting

ROUNDS = 3
_NONE_FOUND = "checkmate found no choice of whole blocks within the budget in its time: all are recomputed"
_NOT_PROVEN = "the integer program of checkmate was stopped by its time limit: a cheaper choice of blocks may exist"
ENOUGH_LEFT = 0.01  #: of the budget, below which no cheaper proposal is looked for


def try_cheapest(fitting: "Fitting") -> None:
    """The cheapest proposal of the frontier that is expected to fit, or one between it and the one before."""

    def propose(target_bytes: int) -> Proposal:
        def first_that_fits(proposals: list[Proposal]) -> int:
            number = bisect_left(proposals, -target_bytes, key=lambda one: -fitting.expected(one))
            return min(number, len(proposals) - 1)

        proposals = frontier(fitting.step)
        number = first_that_fits(proposals)
        finer = between(fitting.step, proposals[max(0, number - 1)], proposals[number])
        return finer[first_that_fits(finer)]

    _approach(fitting, propose, "recompute")


def try_checkmate(fitting: "Fitting") -> None:
    """The cheapest choice of whole blocks that is expected to fit, or a note that it is not proven; all blocks
    where none fits."""

    def propose(target_bytes: int) -> Proposal:
        whole = whole_blocks(fitting.step)
        if fitting.foresight is None:
            return proposal(fitting.step, whole)
        found, is_proven = optimal_blocks(fitting.step, fitting.foresight, whole, target_bytes)
        if found is None or not is_proven:
            fitting.note([_NONE_FOUND if found is None else _NOT_PROVEN])
        return proposal(fitting.step, whole if found is None else found)

    _approach(fitting, propose, "checkmate")


def _approach(fitting: "Fitting", propose: Callable[[int], Proposal], technique: str) -> None:
    """What is proposed for the budget, then for less by what was too much, or for more by what was left."""
    beside = fitting.candidates[fitting.beside]
    target = fitting.budget_bytes - max(0, beside.needed_bytes - beside.expected_bytes)
    tried: set[tuple[int, float]] = set()
    for _ in range(ROUNDS):
        proposed = propose(target)
        meant = fitting.expected(proposed), proposed.seconds  # other blocks of the same kind are no other proposal
        if not proposed.choices or meant in tried:
            break
        tried.add(meant)
        candidate = fitting.measure(proposed, describe(fitting.step, proposed), technique)
        if candidate.runs_short:
            target -= int(fitting.budget_bytes * ENOUGH_LEFT)
            continue
        if candidate.refused:
            tried.clear()  # blocks of that kind are left out from here on
            continue
        left_bytes = fitting.budget_bytes - candidate.needed_bytes
        if 0 <= left_bytes <= fitting.budget_bytes * ENOUGH_LEFT:
            break
        target += left_bytes
