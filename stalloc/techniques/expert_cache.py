"""A cache of experts: modules of which a call uses few lie in host memory, and those used most on the device too.

Source: Yu et al., "MoESys: A Distributed and Efficient Mixture-of-Experts Training and Inference System for Internet
Services", 2022, for inference: what is used least goes first, where uses of long ago count less and less; of several
the one that was used last, since layers come in turn. Contract: an expert computes with the values that
its parameters have, whoever changed them, wherever they lay: what goes is written back. At most `room_bytes` of experts
are on the device. Gradients, for which an expert would have to stay, are refused in one sentence.
"""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stalloc.device.known_gpus import parse_memory
from stalloc.errors import BadInputError, StreamError
from stalloc.figures import human_bytes

if TYPE_CHECKING:
    from stalloc.techniques.streamed_layers import StreamedLayer

_HALVED_AFTER = 16  # uses of each expert, on average


def cache_experts(experts: Iterable[Any], *, room: str | int, host: str | int | None = None) -> "ExpertCache":
    """Keep modules, such as the experts of a mixture, in pinned host memory, and those used most on the device too.

    `experts` are torch modules on one device, each called by itself, with parameters of their own; at most `room` of
    them is on the device at once. `host` bounds the host memory. To be called before the experts are, with gradients
    off: `torch.no_grad()`. Results are those without it, to the last bit. What comes back counts `hits` and `misses`,
    and has `undo()`.

    Raises BadInputError for what cannot be cached, with all experts where they were.
    """
    import torch

    from stalloc.techniques.host_store import HostStore
    from stalloc.techniques.parts import aligned
    from stalloc.techniques.repeated_blocks import Block
    from stalloc.techniques.streamed_forward import streamable
    from stalloc.techniques.streamed_layers import Home, StreamedLayer, layer_of
    from stalloc.techniques.transfers import Transfers

    modules = list(experts)
    for one in modules:
        if not isinstance(one, torch.nn.Module):
            raise BadInputError(f"{type(one).__name__} is no torch module: give cache_experts() a list of experts.")
    room_bytes, store = parse_memory(room), HostStore(None if host is None else parse_memory(host))
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


class ExpertCache:
    """Experts by their uses. Invariant: `here_bytes` is what those in `_here` take, at most `room_bytes`."""

    def __init__(self, modules: list[Any], layers: "list[StreamedLayer]", room_bytes: int) -> None:
        self.room_bytes, self.here_bytes, self.most_bytes = room_bytes, 0, 0
        self.hits = self.misses = 0
        self._layers = layers
        self._here: dict[int, tuple[StreamedLayer, Any]] = {}  # by id, the last used last, with the stream it is for
        self._uses = dict.fromkeys(map(id, layers), 0.0)
        self._hooks = [
            module.register_forward_pre_hook(functools.partial(self._about_to_call, layer), prepend=True)
            for module, layer in zip(modules, layers, strict=True)
        ]

    @property
    def hit_rate(self) -> float:
        """The share of calls so far whose expert was on the device, from 0 to 1."""
        return self.hits / max(1, self.hits + self.misses)

    def undo(self) -> None:
        """Bring every expert back to the device, for good."""
        for hook in self._hooks:
            hook.remove()
        self._here.clear()
        for layer in self._layers:
            layer.bring_home()

    def _about_to_call(self, layer: "StreamedLayer", *_: Any) -> None:
        import torch

        if torch.is_grad_enabled():
            raise StreamError(
                f"{layer.name} is cached, and is called with gradients: call the model under torch.no_grad(), or "
                "stream its layers."
            )
        on_gpu = layer.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise StreamError(f"{layer.name} is cached, and a CUDA graph would keep its place: capture none with it.")
        stream = torch.cuda.current_stream(layer.device) if on_gpu else None
        self._count(layer)
        before = self._here.pop(id(layer), None)
        if before is not None and before[1] == stream:
            self.hits += 1
            layer.adopt()
        else:
            self.misses += 1
            if before is not None:  # its memory would be given away without asking this stream
                self._send_away(*before)
            while self._here and self.here_bytes + layer.size_bytes > self.room_bytes:
                self._send_away(*self._here.pop(min(reversed(self._here), key=self._uses.__getitem__)))
            layer.load()
            layer.wait()
            self.here_bytes += layer.size_bytes
            self.most_bytes = max(self.most_bytes, self.here_bytes)
        self._here[id(layer)] = layer, stream

    def _count(self, layer: "StreamedLayer") -> None:
        self._uses[id(layer)] += 1
        if (self.hits + self.misses) % (_HALVED_AFTER * len(self._layers)) == 0:
            self._uses = {one: count / 2 for one, count in self._uses.items()}

    def _send_away(self, layer: "StreamedLayer", stream: Any) -> None:
        import torch

        with torch.cuda.stream(stream):  # that it arrived on, and was used on: the copy comes after both
            layer.adopt()
            layer.store()()
        layer.home.settle()
        self.here_bytes -= layer.size_bytes
