"""What can be done to a program so that it needs less memory: each technique is executed, on the program's own objects.

Contract: a technique changes bytes and time, never a number that the program computes: losses and gradients are those
of the unmodified program to the last bit, or the technique refuses with one sentence. Importing this package imports
no torch.
"""

from stalloc.lazy import loaded_on_use

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that recomputes nothing pays for nothing
    from stalloc.techniques.checkpointing import checkpoint
    from stalloc.techniques.model_streaming import stream_layers
    from stalloc.techniques.optimizer_paging import commit, committed, page_optimizer

__all__ = ["checkpoint", "commit", "committed", "page_optimizer", "stream_layers"]

_MODULES = {
    "checkpoint": ".checkpointing",
    "commit": ".optimizer_paging",
    "committed": ".optimizer_paging",
    "page_optimizer": ".optimizer_paging",
    "stream_layers": ".model_streaming",
}

__getattr__ = loaded_on_use(__name__, _MODULES)
