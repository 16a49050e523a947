"""Ways to recompute that are known by name: each is one proposal, tried whether it is expected to fit or not.

Contract: what a program has nothing of is not tried.
"""

from typing import TYPE_CHECKING

from stalloc.figures import plural
from stalloc.fitting.frontier import keeping, proposal, selective, whole_blocks
from stalloc.techniques.policy_names import ATTENTION

if TYPE_CHECKING:
    from stalloc.fitting.candidates import Fitting


def try_attention(fitting: "Fitting", name: str = "keep-attention") -> None:
    """All blocks, with the results of attention kept."""
    choices = keeping(fitting.step, ATTENTION)
    if choices:
        fitting.measure(proposal(fitting.step, choices), "recompute all but attention", name)
    elif fitting.step.has_operation(ATTENTION):
        fitting.note(["results of attention are not kept, as random numbers are drawn after them"])


def try_selective(fitting: "Fitting") -> None:
    """The core of attention alone."""
    choices = selective(fitting.step)
    if choices:
        fitting.measure(proposal(fitting.step, choices), "recompute the core of attention", "selective")


def try_whole(fitting: "Fitting", num_blocks: int | None = None) -> None:
    """The first so many blocks, or all, as a whole."""
    choices = whole_blocks(fitting.step, num_blocks)
    if choices:
        name = "blocks" if num_blocks is None else f"blocks:{num_blocks}"
        fitting.measure(proposal(fitting.step, choices), f"recompute {plural(len(choices), 'whole block')}", name)
