"""Trying what changes a program beside recomputation and costs no device time; if it helps, later ways keep it.

Contract: it is given up, with a note, if the program cannot have it or if nothing is gained; if that is known from
observing the program or from what is foreseen, it is not run.
"""

import dataclasses

from stalloc.fitting.frontier import proposal, whole_blocks
from stalloc.fitting.proposals import Base, Foresee, Known, Proposals, Way
from stalloc.fitting.run_seen import Foresight


def step_in_backward(known: Known, base: Base, *, is_named: bool) -> Proposals:
    """Try the optimizer's step in the backward pass."""
    changed = Base(dataclasses.replace(base.settings, step_in_backward=True), also="step in backward")
    what, otherwise = "optimizer's step in the backward pass", "the optimizer's step stays after the backward pass"
    reason = known.step.reads_early
    return (yield from build_on(known, base, changed, "step-in-backward", what, otherwise, reason, is_named=is_named))


def build_on(
    known: Known, base: Base, changed: Base, name: str, what: str, otherwise: str, reason: str = "", *, is_named: bool
) -> Proposals:
    """Try a base with other settings, and build on it if that needs less.

    `name` is that of the policy; `what` is done, and `otherwise` what the program does if it is given up, as people
    read it. `reason`: why it is known to be of no use, so that it is not run. `is_named`: the user asked for it, so
    it is run although nothing is foreseen to be gained.
    """
    now: Foresight | str = reason or (yield Foresee(changed.settings))
    if isinstance(now, str):
        reason = now
    else:
        every, before = proposal(known.step, whole_blocks(known.step)).kept, base.foresight
        gains = before is not None and any(now.peak_bytes(kept) < before.peak_bytes(kept) for kept in ({}, every))
        reason = "" if gains else "nothing is gained by it"
        if gains or is_named:
            alone = dataclasses.replace(changed, foresight=now)
            first = yield Way(alone, proposal(known.step, {}), what, name)
            reason = first.refused or reason
            if not reason:
                return dataclasses.replace(alone, alone=first)
    yield f"{otherwise}: {reason.split('. ')[0].rstrip('.')}"
    return None
