"""What can be done to a program so that it needs less memory: each technique is executed, on the program's own objects.

Contract: a technique changes bytes and time, never a number that the program computes: losses and gradients are those
of the unmodified program to the last bit, or the technique refuses with one sentence. What rounds otherwise is for the
program itself to call (`chunked_cross_entropy`). Importing this package imports no torch.
"""

from stalloc.lazy import loaded_on_use

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that recomputes nothing pays for nothing
    from stalloc.techniques.checkpointing import checkpoint, chunked_cross_entropy
    from stalloc.techniques.elsewhere import (
        cache_experts,
        commit,
        committed,
        offload_activations,
        page_optimizer,
        stream_layers,
    )
    from stalloc.techniques.link_turns import SharedLink

__all__ = [
    "SharedLink",
    "cache_experts",
    "checkpoint",
    "chunked_cross_entropy",
    "commit",
    "committed",
    "offload_activations",
    "page_optimizer",
    "stream_layers",
]

_MODULES = {
    "SharedLink": ".link_turns",
    "checkpoint": ".checkpointing",
    "chunked_cross_entropy": ".checkpointing",
    "commit": ".elsewhere",
    "committed": ".elsewhere",
    "offload_activations": ".elsewhere",
    "page_optimizer": ".elsewhere",
    "cache_experts": ".elsewhere",
    "stream_layers": ".elsewhere",
}

__getattr__ = loaded_on_use(__name__, _MODULES)
