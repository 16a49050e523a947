"""Updates by the processor: gradients come to the host, where the optimizer's own code updates copies of parameters.

Contract: each update begins with the values that a parameter has on the device, whoever changed them, and ends with the
new ones there; state lies in host memory only. Arithmetic is that of torch's fused Adam for processors, whose results
differ from the device's by rounding. (Ren et al., ZeRO-Offload, 2021, section 4; their one-step delayed update is left
out, since it changes what is computed.) A virtual GPU has no values: the step is made on tensors of device "meta".
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from stalloc.techniques.host_gradients import HostGradients
from stalloc.techniques.host_store import HostStore, dense_strides, has_values
from stalloc.techniques.parameters import Parameters, own_gradient, own_step
from stalloc.techniques.parts import aligned
from stalloc.techniques.streamed_layers import device_of, layer_of
from stalloc.techniques.transfers import DeviceTransfers

_OPTIONS = ("fused", "foreach")  # of a group, which depend on the device
_SCALING = ("grad_scale", "found_inf")  # what a GradScaler gives a fused optimizer


def why_not_on_processor(optimizer: Any) -> str:
    """Why the processor cannot make the updates of an optimizer; empty if it can."""
    kind = type(optimizer)
    if own_step(kind) is not own_step(torch.optim.Adam) and own_step(kind) is not own_step(torch.optim.AdamW):
        return f"the processor updates for Adam and AdamW alone, and not for {kind.__name__}"
    for group in optimizer.param_groups:
        if not all(one.is_floating_point() for one in group["params"]):
            return f"{kind.__name__} has parameters that are no real numbers"
    return ""


@dataclass
class _OnItsWay:
    """One part between its gradients' copy and the copy of its new values."""

    block: int
    values: Parameters = field(default_factory=list)
    """On the host: parameters of layers streamed from there, copies of others."""
    gradients: Parameters = field(default_factory=list)
    copied: Any = None  #: event
    read: Callable[[], None] = lambda: None  #: waits for reads from a file
    kept: Parameters = field(default_factory=list)  #: sources of copies that are no gradients themselves


class ProcessorUpdates:
    """As in `Tier`. Two blocks of host memory take turns, so that one part comes while another is updated."""

    def __init__(
        self, store: HostStore, is_on_processor: Callable[[torch.Tensor], bool], in_host: HostGradients
    ) -> None:
        self._store, self._is_on_processor, self._in_host = store, is_on_processor, in_host
        self._blocks: list[torch.Tensor] = []
        self._uploaded: list[Any] = [None, None]
        self._written: list[list[Callable[[], None]]] = [[], []]  # what waits for copies to a file, by block
        self._next = 0
        self._parts: dict[int, _OnItsWay] = {}  # by the id of the first parameter
        self._transfers = DeviceTransfers()

    def make_room(self, size_bytes: int, device: torch.device) -> bool:
        """Have so many bytes of host memory for copies; False if there is no room."""
        if sum(block.nbytes for block in self._blocks) < size_bytes:
            self.forget()
            found = [self._store.take(size_bytes // 2, pinned=device.type == "cuda") for _ in range(2)]
            self._blocks = [block for block in found if block is not None] if None not in found else []
        return len(self._blocks) == 2

    def forget(self) -> None:
        """Give back the memory for copies."""
        for block in range(2):
            self._finish_writing(block)
        for event in self._uploaded:
            if event is not None:
                event.synchronize()
        self._uploaded, self._blocks = [None, None], []

    def begin_state(self, optimizer: Any, parameter: torch.Tensor) -> dict[str, Any]:
        """The state that an optimizer begins with for a parameter, large tensors on device "meta"."""
        group = next(one for one in optimizer.param_groups if any(each is parameter for each in one["params"]))
        copy = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
        copy.grad = torch.empty_like(copy)
        lists: list[list[Any]] = [[] for _ in range(6)]
        optimizer._init_group({**group, "params": [copy], "fused": False}, *lists)
        return dict(optimizer.state.pop(copy))

    def bytes_of(self, part: Parameters) -> int:
        return 0

    def fetch(self, part: Parameters) -> Callable[[], None]:
        if not self._is_on_processor(part[0]):
            return lambda: None
        transfers = self._transfers[device_of(part[0])]
        number, self._next = self._next, 1 - self._next
        transfers.wait(self._uploaded[number])
        self._finish_writing(number)
        begin = 0

        def take(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            nonlocal begin
            size_bytes = like.numel() * dtype.itemsize
            piece = self._blocks[number][begin : begin + size_bytes].view(dtype)
            begin += aligned(size_bytes)
            return piece.as_strided(like.shape, dense_strides(like))

        way = _OnItsWay(number)
        pairs = []
        layer = layer_of(part[0])  # which is a part of its own
        if layer is not None:
            way.values, way.read = layer.lend(part, lambda one: take(one, one.dtype))
        for one in part:
            if self._in_host.holds(one):
                way.gradients.append(self._in_host.in_host(one))
            else:
                gradient: Any = own_gradient(one)
                host = take(one, gradient.dtype)
                if gradient.stride() != host.stride():  # torch's fused Adam goes through all of them in a row
                    gradient = torch.empty_like(gradient).as_strided(host.shape, host.stride()).copy_(gradient)
                    way.kept.append(gradient)
                way.gradients.append(host)
                pairs.append((host, gradient))
            if layer is None:
                way.values.append(take(one, one.dtype))
                pairs.append((way.values[-1], one.detach()))
        way.copied = transfers.to_host(pairs)
        self._parts[id(part[0])] = way

        def arrived() -> None:
            if way.copied is not None:
                way.copied.synchronize()
            way.kept.clear()
            way.read()

        return arrived

    @contextmanager
    def stand_ins(self, optimizer: Any, part: Parameters) -> Iterator[Parameters]:
        """Parameters of the host in place of a part's, with its state, for one update."""
        if not self._is_on_processor(part[0]):
            yield part
            return
        way = self._parts[id(part[0])]
        computes = has_values(device_of(part[0]))
        state, copies = optimizer.state, []
        for one, value, gradient in zip(part, way.values, way.gradients, strict=True):
            copy = torch.nn.Parameter(value if computes else value.to("meta"))
            copy.grad = gradient if computes else gradient.to("meta")
            state[copy] = _on_processor(state[one], computes)
            copies.append(copy)
        options = [
            (group, {name: group.get(name) for name in ("fused", "foreach")}) for group in optimizer.param_groups
        ]
        scaling = {name: vars(optimizer)[name] for name in _SCALING if name in vars(optimizer)}
        for group, _ in options:
            group["fused"], group["foreach"] = computes, False
        for name, value in scaling.items():
            setattr(optimizer, name, value.cpu() if computes and isinstance(value, torch.Tensor) else None)
        try:
            yield copies
        finally:
            for group, before in options:
                group.update(before)
            vars(optimizer).update(scaling)
            for copy in copies:
                state.pop(copy)
        torch.autograd.graph.increment_version(part)

    def update_of(self, optimizer: Any, parameter: torch.Tensor, value: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """A function that updates a parameter in the host with a gradient in the host; any thread may call it."""
        group = next(one for one in optimizer.param_groups if any(each is parameter for each in one["params"]))
        computes = has_values(device_of(parameter))
        twin = object.__new__(type(optimizer))  # whose groups and state nobody else changes meanwhile
        copy = torch.nn.Parameter(value if computes else value.to("meta"))
        options = {**group, "params": [copy], "fused": computes, "foreach": False}
        values = _on_processor(optimizer.state[parameter], computes)
        vars(twin).update({**vars(optimizer), "param_groups": [options], "state": {copy: values}})

        def update(gradient: torch.Tensor) -> None:
            copy.grad = gradient if computes else gradient.to("meta")
            own_step(type(optimizer))(twin)

        return update

    def store(self, part: Parameters) -> tuple[int, Callable[[], None]]:
        way = self._parts.pop(id(part[0]), None)
        if way is None:
            return 0, lambda: None
        layer = layer_of(part[0])
        if layer is not None:
            self._uploaded[way.block] = None
            self._written[way.block].append(layer.take_back(part, way.values))
            return 0, lambda: self._finish_writing(way.block)
        transfers = self._transfers[device_of(part[0])]
        pairs = [(one.detach(), value) for one, value in zip(part, way.values, strict=True)]
        uploaded = self._uploaded[way.block] = transfers.to_device(pairs)
        return 0, lambda: transfers.wait(uploaded)

    def _finish_writing(self, block: int) -> None:
        while self._written[block]:
            self._written[block].pop()()


def _on_processor(state: dict[str, Any], computes: bool) -> dict[str, Any]:
    """The state of a parameter, which moves to the processor; a stand-in where nothing is computed."""
    state |= {name: it.cpu() for name, it in state.items() if isinstance(it, torch.Tensor)}
    if computes:
        return state
    return {
        name: it.to("meta") if isinstance(it, torch.Tensor) and name != "step" else it for name, it in state.items()
    }
