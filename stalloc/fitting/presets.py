"""Ways to recompute that are known by name: each is one proposal, tried whether it is expected to fit or not.

Contract: a way that finds nothing to recompute in the program is not tried.
"""

from stalloc.figures import plural
from stalloc.fitting.frontier import keeping, proposal, selective, whole_blocks
from stalloc.fitting.proposals import Base, Known, Proposals, Way
from stalloc.techniques.checkpointing import ATTENTION, KEEP_ATTENTION


def all_but_attention(known: Known, base: Base) -> Proposals:
    """All blocks, with the results of attention kept."""
    choices = keeping(known.step, ATTENTION)
    if choices:
        yield Way(base, proposal(known.step, choices), "recompute all but attention", KEEP_ATTENTION[0])
    elif known.step.has_operation(ATTENTION):
        yield "results of attention are not kept, as random numbers are drawn after them"
    return None


def core_of_attention(known: Known, base: Base, *, is_named: bool = False) -> Proposals:
    """The core of attention alone; `is_named`: say why where there is none."""
    choices = selective(known.step)
    if choices:
        yield Way(base, proposal(known.step, choices), "recompute the core of attention", "selective")
    elif is_named:
        why = "no block has attention that is written out (a product, softmax, a product)"
        if known.step.has_operation(ATTENTION):
            why = "attention is one fused operation here, which does not save scores and probabilities"
        yield f"selective finds nothing to recompute: {why}"
    return None


def whole(known: Known, base: Base, num_blocks: int | None = None) -> Proposals:
    """The first blocks, as many as the policy says, or all, each recomputed as a whole."""
    choices = whole_blocks(known.step, num_blocks)
    if choices:
        name = "blocks" if num_blocks is None else f"blocks:{num_blocks}"
        yield Way(base, proposal(known.step, choices), f"recompute {plural(len(choices), 'whole block')}", name)
    return None
