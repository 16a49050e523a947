"""Memory of the GPU wherever the Trainer of Hugging Face reports: `trainer.add_callback(MemoryScalars(trainer))`."""

from typing import Any

from stalloc.errors import SetupError
from stalloc.integrations.memory_figures import memory_scalars

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise SetupError("the library transformers is not installed: pip install transformers.") from error


class MemoryScalars(TrainerCallback):
    """Logs the scalars after each step for which the Trainer logs (`logging_steps`).

    They go through the Trainer's own `log`, so that every tracker of `report_to` and the history have them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        scalars = memory_scalars() if control.should_log else {}
        if scalars:
            self._trainer.log(scalars)
