"""Ways to recompute that are known by name: each is one proposal, tried whether it is expected to fit or not.

Contract: what a program has nothing of is not tried.
"""

from typing import TYPE_CHECKING

from stalloc.figures import plural
from stalloc.fitting.frontier import keeping, proposal, selective, whole_blocks
from stalloc.techniques.policy_names import ATTENTION, KEEP_ATTENTION

if TYPE_CHECKING:
    from stalloc.fitting.candidates import Fitting


def try_attention(fitting: "Fitting") -> None:
    """All blocks, with the results of attention kept."""
    choices = keeping(fitting.step, ATTENTION)
    if choices:
        fitting.measure(proposal(fitting.step, choices), "recompute all but attention", KEEP_ATTENTION[0])
    elif fitting.step.has_operation(ATTENTION):
        fitting.note(["results of attention are not kept, as random numbers are drawn after them"])


def try_selective(fitting: "Fitting", *, is_named: bool = False) -> None:
    """The core of attention alone; `is_named`: say why where there is none."""
    choices = selective(fitting.step)
    if choices:
        fitting.measure(proposal(fitting.step, choices), "recompute the core of attention", "selective")
    elif is_named:
        why = "no block has attention that is written out (a product, softmax, a product)"
        if fitting.step.has_operation(ATTENTION):
            why = "attention is one fused operation here, which does not save scores and probabilities"
        fitting.note([f"selective finds nothing to recompute: {why}"])


def try_whole(fitting: "Fitting", num_blocks: int | None = None) -> None:
    """The first so many blocks, or all, as a whole."""
    choices = whole_blocks(fitting.step, num_blocks)
    if choices:
        name = "blocks" if num_blocks is None else f"blocks:{num_blocks}"
        fitting.measure(proposal(fitting.step, choices), f"recompute {plural(len(choices), 'whole block')}", name)
