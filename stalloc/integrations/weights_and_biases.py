"""Memory of the GPU in Weights & Biases: one call a step, with the program's own run."""

from typing import Any

from stalloc.integrations.memory_figures import memory_scalars


def log_scalars(run: Any, step: int | None = None) -> None:
    """Log the scalars of this moment; `run` is what wandb.init() gave, or the module wandb itself.

    Without `step` they belong to the run's next step, as for `run.log`.
    """
    scalars = memory_scalars()
    if scalars:
        run.log(scalars, step=step)
