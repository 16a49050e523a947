"""Ways to recompute blocks: the cheapest choice that keeps a budget, and those that are known by name.

Contract: of the cheapest, by the frontier or by Checkmate's integer program, at most ROUNDS proposals are run, each for
a target corrected by how far the last one missed the budget. One that is known by name is tried whether it is expected
to fit or not, unless it finds nothing to recompute.
"""

from bisect import bisect_left
from collections.abc import Callable

from stalloc.figures import plural
from stalloc.fitting import frontier
from stalloc.fitting.checkmate import optimal_blocks
from stalloc.fitting.fit_record import Candidate
from stalloc.fitting.frontier import Proposal, proposal, whole_blocks
from stalloc.fitting.proposals import Base, Known, Proposals, Way
from stalloc.techniques.policy_names import ATTENTION, KEEP_ATTENTION

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

        proposals = frontier.frontier(known.step)
        number = first_that_fits(proposals)
        finer = frontier.between(known.step, proposals[max(0, number - 1)], proposals[number])
        return finer[first_that_fits(finer)], ""

    return _approach(known, base, propose, "recompute")


def by_checkmate(known: Known, base: Base) -> Proposals:
    """The cheapest choice of whole blocks that is expected to fit, or a note that it is not proven; all blocks
    where none fits."""

    def propose(target_bytes: int) -> tuple[Proposal, str]:
        blocks = whole_blocks(known.step)
        if base.foresight is None:
            return proposal(known.step, blocks), ""
        found, is_proven = optimal_blocks(known.step, base.foresight, blocks, target_bytes)
        note = _NONE_FOUND if found is None else "" if is_proven else _NOT_PROVEN
        return proposal(known.step, blocks if found is None else found), note

    return _approach(known, base, propose, "checkmate")


def _approach(known: Known, base: Base, propose: Callable[[int], tuple[Proposal, str]], technique: str) -> Proposals:
    """Run the proposal for the budget, then for a budget lower by the excess, or higher by what was left."""
    target = known.budget_bytes
    if base.alone is not None:
        target -= max(0, base.alone.needed_bytes - base.alone.expected_bytes)
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
        candidate: Candidate = yield Way(base, proposed, frontier.describe(known.step, proposed), technique)
        left_bytes = known.budget_bytes - candidate.needed_bytes
        if candidate.runs_short:
            target -= int(known.budget_bytes * ENOUGH_LEFT)
        elif candidate.refused:
            tried.clear()  # blocks of that kind are left out from here on
        elif 0 <= left_bytes <= known.budget_bytes * ENOUGH_LEFT:
            break
        else:
            target += left_bytes
    return None


def all_but_attention(known: Known, base: Base) -> Proposals:
    choices = frontier.keeping(known.step, ATTENTION)
    if choices:
        yield Way(base, proposal(known.step, choices), "recompute all but attention", KEEP_ATTENTION[0])
    elif known.step.has_operation(ATTENTION):
        yield "results of attention are not kept, as random numbers are drawn after them"
    return None


def core_of_attention(known: Known, base: Base, *, is_named: bool = False) -> Proposals:
    """The core of attention alone; `is_named`: say why where there is none."""
    choices = frontier.selective(known.step)
    if choices:
        yield Way(base, proposal(known.step, choices), "recompute the core of attention", "selective")
    elif is_named:
        why = "no block has attention that is written out (a product, softmax, a product)"
        if known.step.has_operation(ATTENTION):
            why = "attention is one fused operation here, which does not save scores and probabilities"
        yield f"selective finds nothing to recompute: {why}"
    return None


def whole(known: Known, base: Base, num_blocks: int | None = None) -> Proposals:
    choices = whole_blocks(known.step, num_blocks)
    if choices:
        name = "blocks" if num_blocks is None else f"blocks:{num_blocks}"
        yield Way(base, proposal(known.step, choices), f"recompute {plural(len(choices), 'whole block')}", name)
    return None
