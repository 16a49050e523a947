"""Programs under torch.compile: how much of what it would save its partitioner may save, found by bisection.

Contract: the partitioner takes a share, not bytes, and what a share needs is only known by running it; each row of the
table was run. What recomputation takes is not known of compiled code: the estimate is a forward pass for share 0, which
is the most, and in proportion above it.
"""

import dataclasses

from stalloc.fitting.fit_record import Candidate
from stalloc.fitting.frontier import Proposal
from stalloc.fitting.proposals import Base, Known, Proposals, Way

_ROUNDS = 4
_ENOUGH_LEFT = 0.02  # of the budget, below which no larger share is looked for
_FORWARD = 1 / 3  # of a step that recomputes nothing


def compiled(known: Known, base: Base) -> Proposals:
    """Search for the largest share of saved memory that keeps the budget, between none and all. Begun in the middle,
    since none may need more than some: a whole model in one graph is recomputed all at once."""
    too_much, enough = 1.0, 0.0
    for _ in range(_ROUNDS):
        share = (too_much + enough) / 2
        # what the base foresees is for the program as it is
        some = Base(dataclasses.replace(base.settings, activation_share=share))
        again = Proposal({}, (1 - share) * _FORWARD * known.step.step_seconds)
        found: Candidate = yield Way(some, again, f"torch.compile saves {share:.0%} of what it would", "compile-budget")
        fits, left_bytes = known.fits(found), known.budget_bytes - found.needed_bytes
        if (fits and left_bytes <= known.budget_bytes * _ENOUGH_LEFT) or (found.refused and not found.runs_short):
            break
        too_much, enough = (too_much, share) if fits else (share, enough)
    return None
