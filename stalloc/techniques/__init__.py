"""What can be done to a program so that it needs less memory: each technique is executed, on the program's own objects.

Contract: a technique changes bytes and time, never a number that the program computes: losses and gradients are those
of the unmodified program to the last bit, or the technique refuses with one sentence. Importing this package imports
no torch.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that recomputes nothing pays for nothing
    from typing import Any

    from stalloc.techniques.checkpointing import checkpoint
    from stalloc.techniques.model_streaming import stream_layers
    from stalloc.techniques.optimizer_paging import commit, committed, page_optimizer

__all__ = ["checkpoint", "commit", "committed", "page_optimizer", "stream_layers"]


def __getattr__(name: str) -> "Any":
    if name == "checkpoint":
        from stalloc.techniques.checkpointing import checkpoint

        return checkpoint
    if name in ("commit", "committed", "page_optimizer"):
        from stalloc.techniques import optimizer_paging

        return getattr(optimizer_paging, name)
    if name == "stream_layers":
        from stalloc.techniques.model_streaming import stream_layers

        return stream_layers
    raise AttributeError(f"module 'stalloc.techniques' has no attribute {name!r}")
