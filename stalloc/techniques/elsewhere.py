"""State, layers, experts and activations of a program of one's own in host memory or on disk, without a budget.

Contract: this module loads no torch until it is given an optimizer or modules, or asked for a context.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalloc.device.known_gpus import parse_memory
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.techniques.parts import Shares, aligned
from stalloc.techniques.repeated_blocks import Block, find_blocks

if TYPE_CHECKING:
    from stalloc.techniques.disk_store import DiskStore
    from stalloc.techniques.host_store import HostStore
    from stalloc.techniques.link_turns import SharedLink
    from stalloc.techniques.paged_optimizer import PagedOptimizer
    from stalloc.techniques.saved_activations import SavedActivations
    from stalloc.techniques.streamed_forward import Streaming
    from stalloc.techniques.streamed_layers import ExpertCache


def page_optimizer(
    optimizer: Any,
    *,
    host: str | int | None = None,
    window: str | int = "256MiB",
    processor: float = 0.0,
    device: float = 0.0,
    disk: str | None = None,
    send_gradients: bool = True,
    beside_backward: bool = False,
) -> "PagedOptimizer":
    """Keep the state of a torch optimizer in pinned host memory, and on the device only while it is used.

    In each step the optimizer updates a part of its parameters at a time: the state of the next part comes while one is
    updated, at most `window` of it on the device at once, or what a single part needs. `host` bounds the host memory
    (all there is by default); what has no room there goes to `disk`, "FOLDER:SIZE", or stays on the device.

    `processor` and `device` are shares of the parameters, by bytes, from 0 to 1: of Adam and AdamW the processor can
    make updates, with state in host memory that never leaves it; and state can stay on the device. What comes back has
    `undo(optimizer)`. Parameters are those without it, to the last bit, but for those that the processor updates, which
    differ by rounding. To be called before a scheduler is made of the optimizer.

    Gradients of what the processor updates, and of streamed layers (`stalloc.stream_layers`), leave for host memory as
    backward makes them, unless `send_gradients` is False, and are on the device again where the program reads them or,
    for streamed layers, the device updates them. With `beside_backward` the processor updates streamed layers in host
    memory as their gradients come (STRONGHOLD): who needs these gradients, or the old parameters, between the backward
    pass and the step, as for clipping or accumulation, gets a GradientError.

    Raises BadInputError for an optimizer that is not known to update each parameter by itself, for shares that are
    none, and for a folder that cannot be used.
    """
    import torch

    from stalloc.techniques.paged_optimizer import PagedOptimizer

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInputError(f"{type(optimizer).__name__} is no torch optimizer: give page_optimizer() one.")
    if not (processor >= 0 and device >= 0 and processor + device <= 1):
        raise BadInputError(f"shares of {processor:g} and {device:g} are not possible: give 0 or more, 1 together.")
    if beside_backward and not processor:
        raise BadInputError("nothing is updated beside backward but by the processor: give processor=1.0, or a share.")
    first = next((one for group in optimizer.param_groups for one in group["params"]), torch.empty(0))
    return PagedOptimizer(
        optimizer,
        *_places(host, disk, first.device),
        max(parse_memory(window), 1),
        Shares(device, processor),
        sends_gradients=send_gradients,
        updates_beside_backward=beside_backward,
    )


def commit(optimizer: Any, label: int) -> None:
    """Let the state of an optimizer, as it is now, be what is on disk after any end of this process, bit by bit.

    `label` is a number of your own, such as that of the step: save the parameters under it first. Until the next commit
    the disk holds both this state and the one that is worked with. `stalloc.committed(folder)` gives it back. Raises
    BadInputError if the optimizer has no state on disk, DiskError if it cannot be written: the commit before stays.
    """
    from stalloc.techniques.paged_optimizer import commit_state

    commit_state(optimizer, label)


def committed(folder: str | os.PathLike[str]) -> tuple[int, dict[str, Any]]:
    """The label and the state of the last commit in a folder, for `optimizer.load_state_dict`.

    Large tensors are mapped from the file. Raises BadInputError if there is none, or it is damaged.
    """
    from stalloc.techniques.disk_store import read_committed

    return read_committed(folder)


def stream_layers(
    model: Any, *, window: int = 2, host: str | int | None = None, disk: str | None = None, microbatches: int = 1
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

    from stalloc.techniques.streamed_forward import stream_blocks, why_not_in_microbatches

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
    store, files = _places(host, disk, next(model.parameters(), torch.empty(0)).device, of_model=True)
    streaming, reason = stream_blocks(model, blocks, store, window, files, microbatches)
    if streaming is None:
        raise BadInputError(f"{reason or 'the model has no repeated blocks'}: its layers stay on the device.")
    return streaming


def offload_activations(
    ratio: float = 1.0,
    *,
    window: str | int = "256MiB",
    host: str | int | None = None,
    device: str = "cuda",
    link: "SharedLink | None" = None,
) -> "SavedActivations":
    """A context: what autograd saves in it is kept in pinned host memory, and comes back for backward.

    `ratio` of the saved bytes go there, evenly spread (Yuan et al. 2024). At most `window` is on its way to the host
    and still on the device, and as much comes back ahead of its use. `host` bounds the host memory (all there is by
    default); what has no room there stays on the device. `device`: the type of device whose tensors are meant.
    Gradients are those without it, to the last bit; a tensor that is changed in place between is an OffloadError.
    One context is for all steps, entered once or in each: its host memory is used again. backward may be outside.

    `link`, a `stalloc.SharedLink`, is for ranks of one job whose devices share a link to the host: their copies take
    turns, and each keeps other tensors in the host, as far as the ratio lets it (TMO, Lin et al. 2023).

    Raises BadInputError for a ratio that is none, and for a link whose file cannot be written.
    """
    if not 0 <= ratio <= 1:
        raise BadInputError(f"a ratio of {ratio:g} is not possible: give 0 to 1.")
    from stalloc.techniques.host_store import HostStore
    from stalloc.techniques.saved_activations import SavedActivations
    from stalloc.techniques.technique_settings import ActivationSettings

    store = HostStore(None if host is None else parse_memory(host))
    settings = ActivationSettings(ratio=ratio, window_bytes=parse_memory(window, at_least=0))
    return SavedActivations(settings, store, device, link=link)


def cache_experts(experts: Iterable[Any], *, room: str | int, host: str | int | None = None) -> "ExpertCache":
    """Keep modules, such as the experts of a mixture, in pinned host memory, and those used most on the device too.

    `experts` are torch modules on one device, each called by itself, with parameters of their own; at most `room` of
    them is on the device at once. `host` bounds the host memory. To be called before the experts are, with gradients
    off: `torch.no_grad()`. Results are those without it, to the last bit. What comes back counts `hits` and `misses`,
    and has `undo()`.

    Raises BadInputError for what cannot be cached, with all experts where they were.
    """
    import torch

    from stalloc.techniques.streamed_forward import streamable
    from stalloc.techniques.streamed_layers import ExpertCache, Home, StreamedLayer, layer_of
    from stalloc.techniques.transfers import Transfers

    modules = list(experts)
    for one in modules:
        if not isinstance(one, torch.nn.Module):
            raise BadInputError(f"{type(one).__name__} is no torch module: give cache_experts() a list of experts.")
    room_bytes, (store, _) = parse_memory(room), _places(host, None, None)
    together = torch.nn.ModuleList(modules)
    found = []
    for number, one in enumerate(modules):
        parameters, why = streamable(together, Block(f"expert {number}", one))
        shared = len(parameters) < sum(1 for _ in one.parameters()) or any(map(layer_of, parameters))
        why = why or f"expert {number} has a parameter that lies elsewhere too, or is streamed" * shared
        size_bytes = sum(aligned(one.nbytes) for one in parameters)
        if not why and size_bytes > room_bytes:
            why = f"expert {number} takes {human_bytes(size_bytes)}, and has room for {human_bytes(room_bytes)}"
        slots = None if why else store.take_like(parameters, pinned=parameters[0].is_cuda)
        if slots is None:
            raise BadInputError(f"{why or f'there is no room in host memory for expert {number}'}: nothing is cached.")
        found.append((parameters, slots))
    layers = [
        StreamedLayer(f"expert {number}", parameters, Home(slots, Transfers(parameters[0].device)))
        for number, (parameters, slots) in enumerate(found)
    ]
    return ExpertCache(modules, layers, room_bytes)


def parse_disk(text: str) -> tuple[Path, int]:
    """A folder and the bytes that may be used there, from "FOLDER:SIZE". Raises BadInputError for anything else."""
    folder, colon, size = text.rpartition(":")
    if not colon or not folder:
        raise BadInputError(f"{text[:100]!r} names no folder and size: write FOLDER:SIZE, as in /fast/run7:200GiB.")
    return Path(folder), parse_memory(size)


def _places(
    host: str | int | None, disk: str | None, device: Any, *, of_model: bool = False
) -> "tuple[HostStore, DiskStore | None]":
    from stalloc.techniques.disk_store import PARAMETERS, STATE, Disk, DiskStore
    from stalloc.techniques.host_store import HostStore

    store = HostStore(None if host is None else parse_memory(host))
    if disk is None:
        return store, None
    folder, limit_bytes = parse_disk(disk)
    shared = Disk(limit_bytes, store, device)
    return store, DiskStore(folder, shared, device, PARAMETERS if of_model else STATE)
