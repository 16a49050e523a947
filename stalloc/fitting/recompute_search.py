"""The cheapest choice of what is recomputed that keeps a budget: by the frontier, or by Checkmate's integer program.

Contract: at most ROUNDS proposals are run, each for a target corrected by how far the last one missed the budget.
"""

from bisect import bisect_left
from collections.abc import Callable

from stalloc.fitting.block_graph import optimal_blocks
from stalloc.fitting.fit_record import Candidate
from stalloc.fitting.frontier import Proposal, between, describe, frontier, proposal, whole_blocks
from stalloc.fitting.proposals import Base, Known, Proposals, Way

ROUNDS = 3
_NONE_FOUND = "checkmate found no choice of whole blocks within the budget in its time: all are recomputed"
_NOT_PROVEN = "the integer program of checkmate was stopped by its time limit: a cheaper choice of blocks may exist"
ENOUGH_LEFT = 0.01  #: of the budget, below which no cheaper proposal is looked for


def cheapest(known: Known, base: Base) -> Proposals:
    """The cheapest proposal of the frontier that is expected to fit, or one between it and the one before."""

    def propose(target_bytes: int) -> tuple[Proposal, str]:
        def first_that_fits(proposals: list[Proposal]) -> int:
            number = bisect_left(proposals, -target_bytes, key=lambda one: -base.expected_bytes(known.step, one))
            return min(number, len(proposals) - 1)

        proposals = frontier(known.step)
        number = first_that_fits(proposals)
        finer = between(known.step, proposals[max(0, number - 1)], proposals[number])
        return finer[first_that_fits(finer)], ""

    return _approach(known, base, propose, "recompute")


def by_checkmate(known: Known, base: Base) -> Proposals:
    """The cheapest choice of whole blocks that is expected to fit, or a note that it is not proven; all blocks
    where none fits."""

    def propose(target_bytes: int) -> tuple[Proposal, str]:
        whole = whole_blocks(known.step)
        if base.foresight is None:
            return proposal(known.step, whole), ""
        found, is_proven = optimal_blocks(known.step, base.foresight, whole, target_bytes)
        note = _NONE_FOUND if found is None else "" if is_proven else _NOT_PROVEN
        return proposal(known.step, whole if found is None else found), note

    return _approach(known, base, propose, "checkmate")


def _approach(known: Known, base: Base, propose: Callable[[int], tuple[Proposal, str]], technique: str) -> Proposals:
    """Run the proposal for the budget, then for a budget lower by the excess, or higher by what was left."""
    target, alone = known.budget_bytes, base.alone
    if alone is not None:
        target -= max(0, alone.needed_bytes - alone.expected_bytes)
    tried: set[tuple[int, float]] = set()
    for _ in range(ROUNDS):
        proposed, note = propose(target)
        if note:
            yield note
        # other blocks of the same kind are no other proposal
        meant = base.expected_bytes(known.step, proposed), proposed.seconds
        if not proposed.choices or meant in tried:
            break
        tried.add(meant)
        candidate: Candidate = yield Way(base, proposed, describe(known.step, proposed), technique)
        if candidate.runs_short:
            target -= int(known.budget_bytes * ENOUGH_LEFT)
            continue
        if candidate.refused:
            tried.clear()  # blocks of that kind are left out from here on
            continue
        left_bytes = known.budget_bytes - candidate.needed_bytes
        if 0 <= left_bytes <= known.budget_bytes * ENOUGH_LEFT:
            break
        target += left_bytes
    return None
