"""Streaming the layers of a model of one's own: the technique without a budget.

Contract: this module loads no torch until it is given a model.
"""

from typing import TYPE_CHECKING, Any

from stalloc.device.known_gpus import parse_memory
from stalloc.errors import BadInputError
from stalloc.techniques.optimizer_paging import parse_disk
from stalloc.techniques.repeated_blocks import find_blocks

if TYPE_CHECKING:
    from stalloc.techniques.streamed_forward import Streaming


def stream_layers(
    model: Any,
    *,
    window: int = 2,
    host: str | int | None = None,
    disk: str | None = None,
    microbatches: int = 1,
) -> "Streaming":
    """Keep the parameters of the repeated blocks of a torch model in pinned host memory while others compute.

    `window` blocks are on the device at once: the one that computes, and those that come next. To be called when the
    model is on its device; its optimizer has to be paged (`stalloc.page_optimizer`), so that it updates a block at a
    time. Between passes parameters are tensors of the host, which can be read, saved and changed. `host` bounds the
    host memory (all there is by default); what has no room there goes to `disk`, "FOLDER:SIZE", where it is for as long
    as the process has it, or stays on the device. Losses and gradients are those without it, to the last bit; a use in
    which they would not be is a StreamError. What comes back has `undo()`.

    With `microbatches` each block takes a batch in so many parts, one after the other, before the next block comes: a
    layer moves once for all of them (L2L). The model is called with the whole batch, whose rows its blocks have to
    treat each by itself: what they make is what a loop over the microbatches makes, to the last bit; what is outside
    of blocks, the loss say, is made of the whole batch, whose sums a loop makes in another order.

    Raises BadInputError for a model of which nothing can be streamed, and for a folder that cannot be used. A DiskError
    in a later pass or step says that the disk does not keep what it was given.
    """
    import torch

    from stalloc.techniques.disk_store import PARAMETERS, open_disk
    from stalloc.techniques.host_store import HostStore
    from stalloc.techniques.layer_streaming import stream_blocks
    from stalloc.techniques.microbatches import why_not_in_microbatches

    if not isinstance(model, torch.nn.Module):
        raise BadInputError(f"{type(model).__name__} is no torch module: give stream_layers() a model.")
    if window < 1:
        raise BadInputError(f"a window of {window} blocks is not possible: give 1 or more.")
    if microbatches < 1:
        raise BadInputError(f"{microbatches} microbatches are not possible: give 1 or more.")
    blocks = find_blocks(model)
    for block in blocks if microbatches > 1 else ():
        if reason := why_not_in_microbatches(block.module):
            raise BadInputError(f"{block.name}: {reason}: stream this model without microbatches.")
    store = HostStore(None if host is None else parse_memory(host))
    first = next(model.parameters(), torch.empty(0))
    files = None if disk is None else open_disk(*parse_disk(disk), store, first.device, PARAMETERS)
    streaming, reason = stream_blocks(model, blocks, store, window, files, microbatches)
    if streaming is None:
        raise BadInputError(f"{reason or 'the model has no repeated blocks'}: its layers stay on the device.")
    return streaming
