"""Streaming the repeated blocks of a model: which parameters can be, and what room they get elsewhere.

Contract: a parameter whose memory somebody else has a part of (tied weights), or that is no plain dense tensor, stays
on the device; a block that finds no room elsewhere stays there whole.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stalloc.errors import StreamError
from stalloc.techniques.disk_store import DiskStore
from stalloc.techniques.host_store import HostStore
from stalloc.techniques.layer_homes import find_home
from stalloc.techniques.repeated_blocks import Block, why_not
from stalloc.techniques.streamed_forward import Streaming
from stalloc.techniques.streamed_layers import StreamedLayer, layer_of
from stalloc.techniques.update_order import Parameters, is_divided

_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def stream_blocks(
    model: Any,
    blocks: Sequence[Block],
    store: HostStore,
    window: int,
    disk: DiskStore | None = None,
    microbatches: int = 1,
) -> tuple[Streaming | None, str]:
    """Stream the blocks of a model that can be streamed; also returns why others, or all, stay on the device.

    What has no room in `store` goes to `disk`.
    """
    if type(model).__name__ in _PARALLEL or hasattr(model, "_get_fsdp_state"):
        return None, f"{type(model).__name__} has a hold of the parameters of its blocks"
    chosen, layers, reason = [], [], ""
    for block in blocks:
        parameters, why = streamable(model, block)
        home = None if why else find_home(parameters, store, disk)
        if home is None:
            where = "in host memory" if disk is None else "in host memory or on the disk"
            reason = reason or why or f"there is no room {where} for {block.name}"
            continue
        chosen.append(block)
        layers.append(StreamedLayer(block.name, parameters, home))
    return (Streaming(chosen, layers, window, microbatches) if chosen else None), reason


def streamable(model: Any, block: Block) -> tuple[Parameters, str]:
    """The parameters of a block that can be streamed, and why none can."""
    plain = [one for _, one in model.named_parameters(remove_duplicate=False) if type(one) is torch.nn.Parameter]
    users = Counter(
        one.untyped_storage().data_ptr() for one in plain
    )  # others, as of FSDP2, have no memory of their own
    parameters = [one for one in block.module.parameters() if _can_be(one, users)]
    why = why_not(block) or (
        "" if parameters else f"{block.name} has no parameters of its own on a device, whose memory can be let go"
    )
    if not why and len({one.device for one in parameters}) > 1:
        why = f"{block.name} lies on several devices"
    return ([] if why else parameters), why


def _can_be(parameter: Any, users: "Counter[int]") -> bool:
    if type(parameter) is not torch.nn.Parameter:
        return False
    storage = parameter.untyped_storage()
    is_own = users[storage.data_ptr()] == 1 and storage.nbytes() == parameter.nbytes
    return parameter.numel() > 0 and is_own and storage.resizable()


class WeightTier:
    """Brings the layers of a part for their update on the device; as in `Tier`."""

    def __init__(self, is_on_processor: Callable[[torch.Tensor], bool]) -> None:
        self._is_on_processor = is_on_processor

    def bytes_of(self, part: Parameters) -> int:
        """Bytes of those layers of a part that are not on the device."""
        return sum(layer.size_bytes for layer in self._needed(part) if not layer.is_here)

    def fetch(self, part: Parameters) -> Any:
        """Begin to load the part's layers to the device."""
        layers = self._needed(part)
        for layer in layers:
            layer.load()

        def arrived() -> None:
            for layer in layers:
                layer.wait()

        return arrived

    def store(self, part: Parameters) -> Any:
        """Begin to write the part's layers back."""
        layers = self._needed(part)
        stored = [layer.store() for layer in layers]

        def let_go() -> None:
            for one in stored:
                one()

        return sum(layer.size_bytes for layer in layers), let_go

    def _needed(self, part: Parameters) -> list[StreamedLayer]:
        return _layers([one for one in part if not self._is_on_processor(one)])


def _layers(part: Parameters) -> list[StreamedLayer]:
    found = {id(layer): layer for one in part if (layer := layer_of(one)) is not None}
    return list(found.values())


def settle_layers(optimizer: Any) -> None:
    """Let the processor wait until updated layers are whole in the host, where the program may read them."""
    for layer in _layers([one for group in optimizer.param_groups for one in group["params"]]):
        layer.settle()


def check_can_step(optimizer: Any) -> None:
    """Raise StreamError for an optimizer that would update parameters where they are not."""
    if is_divided(optimizer):
        return
    for layer in _layers([one for group in optimizer.param_groups for one in group["params"]])[:1]:
        raise StreamError(
            f"{layer.name} is streamed, and {type(optimizer).__name__} is not known to update it a part at a time: do "
            "not stream this model."
        )
