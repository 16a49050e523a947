"""Memory of the GPU in Weights & Biases: one call a step, with the program's own run."""

from typing import Any

from stalloc.integrations.memory_figures import memory_scalars


def log_scalars(run: Any, step: int | None = None) -> None:
    """Log the scalars of this moment, without `step` for the next one; `run`: what wandb.init() gave, or wandb."""
    scalars = memory_scalars()
    if scalars:
        run.log(scalars, step=step)
