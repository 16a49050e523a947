"""Trying the optimizer's step in the backward pass, which costs no device time; if it helps, later ways keep it.

Contract: it is given up, with a note, if the program needs its gradients or if nothing is gained; if that is known from
observing the program or from what is foreseen, it is not run.
"""

import dataclasses

from stalloc.fitting.frontier import proposal, whole_blocks
from stalloc.fitting.proposals import Base, Foresee, Known, Proposals, Way
from stalloc.fitting.run_seen import Foresight

_WHAT = "optimizer's step in the backward pass"


def step_in_backward(known: Known, base: Base, *, is_named: bool) -> Proposals:
    """Try the optimizer's step in backward, and build on it if that needs less; `is_named`: the user asked for it."""
    settings = dataclasses.replace(base.settings, step_in_backward=True)
    now: Foresight | str = known.step.reads_early or (yield Foresee(settings))
    if isinstance(now, str):
        reason = now
    else:
        every, before = proposal(known.step, whole_blocks(known.step)).kept, base.foresight
        gains = before is not None and any(now.peak_bytes(kept) < before.peak_bytes(kept) for kept in ({}, every))
        reason = "" if gains else "nothing is gained by making it earlier"
        if gains or is_named:
            alone = Base(settings, now)
            first = yield Way(alone, proposal(known.step, {}), _WHAT, "step-in-backward")
            reason = first.refused or reason
            if not reason:
                return dataclasses.replace(alone, alone=first)
    yield f"the optimizer's step stays after the backward pass: {reason.split('. ')[0].rstrip('.')}"
    return None
