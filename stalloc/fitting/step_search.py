"""Trying the optimizer's step in the backward pass, which costs no time of the device: what follows does so too.

Contract: it is left again if the program needs its gradients, or if nothing is gained, which a note says; what is known
from a look at the program or from what is foreseen is not run.
"""

import dataclasses
from typing import TYPE_CHECKING

from stalloc.fitting.frontier import proposal, whole_blocks
from stalloc.fitting.run_seen import Foresight

if TYPE_CHECKING:
    from stalloc.fitting.candidates import Fitting

_WHAT = "optimizer's step in the backward pass"


def try_step_in_backward(fitting: "Fitting", *, is_named: bool) -> None:
    """Run the program so, and go on from there if that needs less. `is_named`: somebody wants to see what it needs."""
    before, beside, foresight = fitting.base, fitting.beside, fitting.foresight
    fitting.base = dataclasses.replace(before, step_in_backward=True)
    reason = fitting.step.reads_early or fitting.foresee()
    gains = not reason and _is_less(fitting, foresight)
    if not reason and (gains or is_named):
        fitting.beside = len(fitting.candidates)
        reason = fitting.measure(proposal(fitting.step, {}), _WHAT, "step-in-backward").refused
    if not reason and not gains:
        reason = "nothing is gained by making it earlier"
    if reason:
        fitting.base, fitting.beside, fitting.foresight = before, beside, foresight
        fitting.note([f"the optimizer's step stays after the backward pass: {reason.split('. ')[0].rstrip('.')}"])


def _is_less(fitting: "Fitting", before: Foresight | None) -> bool:
    """Whether less is foreseen than before, for the program as it is or with all blocks recomputed."""
    now = fitting.foresight
    if before is None or now is None:
        return False
    again = proposal(fitting.step, whole_blocks(fitting.step)).kept
    return any(now.peak_bytes(kept) < before.peak_bytes(kept) for kept in ({}, again))
