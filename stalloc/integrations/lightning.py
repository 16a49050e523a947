"""Memory of the GPU in whatever logger a Lightning Trainer has: `Trainer(callbacks=[MemoryScalars()])`."""

from typing import Any

from stalloc.errors import SetupError
from stalloc.integrations.memory_figures import memory_scalars

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise SetupError("Lightning is not installed: pip install lightning.") from error


class MemoryScalars(Callback):
    """Logs the scalars after each batch of training for which the Trainer logs (`log_every_n_steps`)."""

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step % max(trainer.log_every_n_steps, 1):
            return
        scalars = memory_scalars()
        for logger in trainer.loggers if scalars else ():
            logger.log_metrics(scalars, step=trainer.global_step)
