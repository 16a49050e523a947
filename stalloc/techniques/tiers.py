"""The tiers of a program that was not written for them: optimizers are paged as they are made, layers as models appear.

Contract: what cannot be kept in host memory stays on the device as it is, and one sentence says why.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stalloc.errors import StreamError
from stalloc.techniques.appearing import when_models_appear, when_optimizers_are_made
from stalloc.techniques.disk_store import PARAMETERS, STATE, Disk, DiskStore
from stalloc.techniques.host_store import HostStore
from stalloc.techniques.paged_optimizer import PagedOptimizer, paged_optimizer
from stalloc.techniques.parameters import parameters_of, why_not_one_by_one
from stalloc.techniques.parts import Shares
from stalloc.techniques.processor_updates import why_not_on_processor
from stalloc.techniques.repeated_blocks import Block
from stalloc.techniques.streamed_forward import stream_blocks
from stalloc.techniques.streamed_layers import layers_of
from stalloc.techniques.technique_settings import TierSettings


class Tiers:
    """The tiers of this process; made before the program begins, and after torch is imported."""

    def __init__(
        self, settings: TierSettings, store: HostStore, say: Callable[[str], None], folder: Path | None = None
    ) -> None:
        """`folder` is for what goes to disk; each optimizer has a folder of its own in it."""
        self.store = store
        self._folder = folder
        self._shared_disk: Disk | None = None
        self._paged: weakref.WeakSet[PagedOptimizer] = weakref.WeakSet()  # of optimizers that the program still has
        self.num_paged = self.streamed_bytes = self.disk_streamed_bytes = 0
        self._unpaged = ""  # why an optimizer is not paged
        self._settings, self._say = settings, say
        if settings.paged_window_bytes:
            when_optimizers_are_made(self._page)
        if settings.streamed_window:
            when_models_appear(self._stream)
            register_optimizer_step_pre_hook(_check_can_step)

    def told(self) -> dict[str, int]:
        return {
            "disk_bytes": self._shared_disk.room.peak_bytes if self._shared_disk is not None else 0,
            "num_paged": self.num_paged,
            "streamed_bytes": self.streamed_bytes,
            "disk_streamed_bytes": self.disk_streamed_bytes,
            **sum((Counter(one.told()) for one in self._paged), Counter()),
        }

    def _page(self, optimizer: Any) -> None:
        paging, reason = paged_optimizer(optimizer), why_not_one_by_one(optimizer)
        if paging is not None and reason:  # a group that it was given later cannot be
            paging.undo(optimizer)
        if reason:
            self._unpaged = self._unpaged or reason
            self._say(f"{reason}: its state stays on the device.")
            return
        if paging is not None:
            return
        settings = self._settings
        shares, reason = settings.shares, why_not_on_processor(optimizer)
        if shares.processor and reason:
            self._say(f"{reason}: its state is paged.")
            shares = Shares(shares.device)
        first = next((one for group in optimizer.param_groups for one in group["params"]), torch.empty(0))
        disk = self._disk(f"optimizer-{self.num_paged}", first.device)
        gradients = {
            "sends_gradients": settings.sends_gradients,
            "updates_beside_backward": settings.updates_beside_backward and shares.processor > 0,
        }
        paging = PagedOptimizer(optimizer, self.store, disk, settings.paged_window_bytes, shares, **gradients)
        self._paged.add(paging)
        self.num_paged += 1

    def _disk(self, name: str, device: torch.device, holds: str = STATE) -> DiskStore | None:
        """A store with a file in a folder of that name; None where no disk is allowed."""
        if not self._settings.disk_bytes:
            return None
        self._shared_disk = self._shared_disk or Disk(self._settings.disk_bytes, self.store, device)
        return DiskStore((self._folder or Path()) / name, self._shared_disk, device, holds)

    def _stream(self, number: int, blocks: list[Block], model: Any) -> None:
        if not blocks:
            return
        if self._unpaged:
            self._say(f"{self._unpaged}: layers stay on the device.")
            return
        disk = self._disk(f"layers-{number}", next(model.parameters()).device, PARAMETERS)
        streaming, reason = stream_blocks(model, blocks, self.store, self._settings.streamed_window, disk)
        for layer in streaming.layers if streaming is not None else ():
            self.streamed_bytes += layer.size_bytes
            self.disk_streamed_bytes += layer.size_bytes * layer.is_on_disk
        if reason:
            self._say(f"{reason}: layers stay on the device.")


def _check_can_step(optimizer: Any, *_: Any) -> None:
    for layer in layers_of(parameters_of(optimizer) if paged_optimizer(optimizer) is None else [])[:1]:
        raise StreamError(
            f"{layer.name} is streamed, and {type(optimizer).__name__} is not known to update it a part at a time: do "
            "not stream this model."
        )
