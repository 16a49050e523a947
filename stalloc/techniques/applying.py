"""Putting settings in force in a program: each technique waits for the objects that it works on.

Contract: to be called once, after torch is imported and before the program makes its model and its optimizer; what the
settings do not name is left as it is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stalloc.techniques.appearing import recompute_as_models_appear
from stalloc.techniques.block_tape import BlockTape
from stalloc.techniques.recompute import MakeTape
from stalloc.techniques.technique_settings import Settings

if TYPE_CHECKING:
    from stalloc.techniques.tiers import Tiers


def apply_settings(
    settings: Settings,
    say: Callable[[str], None],
    make_tape: Callable[[int], MakeTape] = lambda _: BlockTape,
    folder: Path | None = None,
) -> "Tiers | None":
    """Do to the program of this process what the settings name; `say` what cannot be done.

    `make_tape` gives, for the number of a model, what makes the tapes of its recomputed blocks. `folder` is for what
    goes to disk. What comes back knows what is in host memory, if anything is to be.
    """
    if settings.step_in_backward:
        from stalloc.techniques.step_in_backward import step_in_backward

        step_in_backward(say)
    if settings.activation_share < 1:
        import torch._functorch.config as partitioner

        partitioner.activation_memory_budget = settings.activation_share
    if settings.recompute.blocks:
        recompute_as_models_appear(settings.recompute, say, make_tape)
    if not settings.tiers:
        return None
    from stalloc.techniques.tiers import Tiers

    return Tiers(settings.tiers, say, folder)  # after recomputation, which streamed blocks have inside
