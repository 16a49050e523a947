"""Paging an optimizer of one's own, and committing state that lies on a disk: the technique without a budget.

Contract: this module loads no torch until it is given an optimizer.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalloc.device.known_gpus import parse_memory
from stalloc.errors import BadInputError

if TYPE_CHECKING:
    from stalloc.techniques.paged_optimizer import PagedOptimizer


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

    from stalloc.techniques.disk_store import open_disk
    from stalloc.techniques.host_store import HostStore
    from stalloc.techniques.paged_optimizer import PagedOptimizer
    from stalloc.techniques.parts import Shares

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInputError(f"{type(optimizer).__name__} is no torch optimizer: give page_optimizer() one.")
    if not (processor >= 0 and device >= 0 and processor + device <= 1):
        raise BadInputError(f"shares of {processor:g} and {device:g} are not possible: give 0 or more, 1 together.")
    if beside_backward and not processor:
        raise BadInputError("nothing is updated beside backward but by the processor: give processor=1.0, or a share.")
    store = HostStore(None if host is None else parse_memory(host))
    files = None
    if disk is not None:
        first = next((one for group in optimizer.param_groups for one in group["params"]), torch.empty(0))
        files = open_disk(*parse_disk(disk), store, first.device)
    return PagedOptimizer(
        optimizer,
        store,
        max(parse_memory(window), 1),
        Shares(device, processor),
        files,
        sends_gradients=send_gradients,
        updates_beside_backward=beside_backward,
    )


def commit(optimizer: Any, label: int) -> None:
    """Let the state of an optimizer, as it is now, be what is on disk after any end of this process, bit by bit.

    `label` is a number of your own, such as that of the step: save the parameters under it first. Until the next commit
    the disk holds both this state and the one that is worked with. `stalloc.committed(folder)` gives it back. Raises
    BadInputError if the optimizer has no state on disk, DiskError if it cannot be written: the commit before stays.
    """
    from stalloc.techniques.state_commit import commit_state

    commit_state(optimizer, label)


def committed(folder: str | os.PathLike[str]) -> tuple[int, dict[str, Any]]:
    """The label and the state of the last commit in a folder, for `optimizer.load_state_dict`.

    Large tensors are mapped from the file. Raises BadInputError if there is none, or it is damaged.
    """
    from stalloc.techniques.state_folder import committed

    return committed(folder)


def parse_disk(text: str) -> tuple[Path, int]:
    """A folder and the bytes that may be used there, from "FOLDER:SIZE". Raises BadInputError for anything else."""
    folder, colon, size = text.rpartition(":")
    if not colon or not folder:
        raise BadInputError(f"{text[:100]!r} names no folder and size: write FOLDER:SIZE, as in /fast/run7:200GiB.")
    return Path(folder), parse_memory(size)
