"""Trying the optimizer's step in the backward pass, which costs no time of the device: what follows does so too.

Contract: it is left again if the program needs its gradients, or if nothing is gained, which a note says.
"""

import dataclasses
from typing import TYPE_CHECKING

from stalloc.fitting.frontier import proposal, whole_blocks
from stalloc.fitting.run_seen import Foresight

if TYPE_CHECKING:
    from stalloc.fitting.candidates import Fitting

_WHAT = "optimizer's step in the backward pass"


def try_step_in_backward(fitting: "Fitting") -> None:
    """Run the program so, and go on from there if that needs less."""
    before, beside, foresight = fitting.base, fitting.beside, fitting.foresight
    fitting.base = dataclasses.replace(before, step_in_backward=True)
    reason = fitting.step.reads_early or fitting.foresee()
    if not reason:
        fitting.beside = len(fitting.candidates)
        reason = fitting.measure(proposal(fitting.step, {}), _WHAT, "step-in-backward").refused
    if not reason and not _is_less(fitting, foresight):
        reason = "nothing is gained by making it earlier"
    if reason:
        fitting.base, fitting.beside, fitting.foresight = before, beside, foresight
        fitting.note([f"the optimizer's step stays after the backward pass: {reason.split('. ')[0].rstrip('.')}"])


def _is_less(fitting: "Fitting", before: Foresight | None) -> bool:
    """Whether less is foreseen than before, for the program as it is or with all blocks computed again."""
    now = fitting.foresight
    if before is None or now is None:
        return False
    again = proposal(fitting.step, whole_blocks(fitting.step)).kept
    return any(now.peak_bytes(kept) < before.peak_bytes(kept) for kept in ({}, again))
