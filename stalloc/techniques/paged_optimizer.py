"""The state of an optimizer in host memory, on the device only while the parameters that it is of are updated.

Contract: between steps each large tensor of state is a tensor of the host, with the values that the optimizer left;
whoever looks at it there sees them whole. state_dict() hands these on, and load_state_dict() puts what it reads there,
so neither needs memory of the device. What finds no room in the host stays on the device. Values are the optimizer's
own to the last bit, since its own code makes every update.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stalloc.errors import BadInputError
from stalloc.techniques.host_store import HostStore
from stalloc.techniques.layer_streaming import WeightTier, by_layers, settle_layers
from stalloc.techniques.optimizer_facts import why_not_one_by_one
from stalloc.techniques.parts import aligned
from stalloc.techniques.streamed_layers import layer_of
from stalloc.techniques.transfers import Transfers
from stalloc.techniques.update_order import DividedStep, Parameters
from stalloc.techniques.watched_state import WatchedState

LEAST_BYTES = 4096  #: smaller tensors of state, such as the count of steps, stay where they are
WINDOW_BYTES = 256 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Slots = dict[str, torch.Tensor]


class PagedOptimizer:
    """An optimizer whose state is paged. `window_bytes` of state are on the device at once, or what one part needs."""

    def __init__(
        self,
        optimizer: Any,
        store: HostStore,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Raises BadInputError if it cannot be paged."""
        reason = why_not_one_by_one(optimizer)
        if reason:
            raise BadInputError(f"{reason}: its state stays on the device.")
        self.store = store
        self.pager = _StatePager(optimizer, store)
        self.divided = DividedStep(
            optimizer,
            [WeightTier(), self.pager],
            lambda one: by_layers(one, window_bytes),
            window_bytes,
            self._stepping,
        )
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self.pager.settle()),
            optimizer.register_load_state_dict_pre_hook(self.pager.about_to_load),
            optimizer.register_load_state_dict_post_hook(self.pager.loaded, prepend=True),
        ]
        self.pager.take_over(optimizer)

    @contextmanager
    def _stepping(self, optimizer: Any) -> Iterator[None]:
        with self.pager.stepping(optimizer):
            yield
        settle_layers(optimizer)

    def undo(self, optimizer: Any) -> None:
        """Bring the state back to the device, and let the optimizer step as it did."""
        self.divided.undo(optimizer)
        for hook in self._hooks:
            hook.remove()
        self.pager.bring_home(optimizer)


class _StatePager:
    """The state of one optimizer. Invariant: a tensor of state is either the one in `_slots`, or on the device."""

    def __init__(self, optimizer: Any, store: HostStore) -> None:
        self._state = WatchedState(self, optimizer.state)
        self._store = store
        self._slots: Any = WeakIdKeyDictionary()  # parameter -> tensors of the host by name
        self._transfers: Transfers | None = None
        self._loading: list[tuple[torch.Tensor, str, torch.Tensor]] = []

    def take_over(self, optimizer: Any) -> None:
        """Move what there is of state already to the host."""
        optimizer.state = self._state
        part = [one for one in self._state if isinstance(one, torch.Tensor)]
        if part:
            self.store(part)[1]()

    def bring_home(self, optimizer: Any) -> None:
        """The opposite."""
        self.settle()
        for parameter in [one for one in self._state if isinstance(one, torch.Tensor)]:
            self.fetch([parameter])()
        self._slots = WeakIdKeyDictionary()
        optimizer.state = defaultdict(dict, self._state)

    def settle(self) -> None:
        """What is read of the host from here on is whole."""
        if self._transfers is not None:
            self._transfers.settle()

    @contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """The optimizer makes a step."""
        if optimizer.state is not self._state:  # the program has begun anew
            self._state = optimizer.state = WatchedState(self, optimizer.state)
        with self._state.unwatched():
            yield

    def of_device(self, parameter: Any, values: Any) -> Any:
        """The state of a parameter as it would be without paging: a copy, on the device."""
        slots = self._slots.get(parameter, {}) if isinstance(parameter, torch.Tensor) else {}
        if not slots:
            return values
        device = self._device_of(parameter)
        hosted = {name: slot.to(device) for name, slot in slots.items() if values.get(name) is slot}
        return {**values, **hosted}

    def bytes_of(self, part: Parameters) -> int:
        """Of the state that is in the host."""
        return sum(aligned(slot.nbytes) for _, _, slot in self._hosted(part))

    def fetch(self, part: Parameters) -> Callable[[], None]:
        """As of `Tier`."""
        pairs = []
        with self._state.unwatched():
            for parameter, name, slot in self._hosted(part):
                here = torch.empty_like(slot, device=self._device_of(parameter))
                self._state[parameter][name] = here
                pairs.append((here, slot))
        if not pairs:
            return lambda: None
        transfers = self._transfers_of(pairs[0][0].device)
        arrived = transfers.to_device(pairs)
        return lambda: transfers.wait(arrived)

    def store(self, part: Parameters) -> tuple[int, Callable[[], None]]:
        """As of `Tier`."""
        leaving: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        with self._state.unwatched():
            found = list(self._large(part))
            self._make_slots(found)
            for parameter, name, tensor in found:
                slot = self._slots.get(parameter, {}).get(name)
                if slot is not None:
                    self._state[parameter][name] = slot
                    leaving.append(tensor)
                    slots.append(slot)
        if not leaving:
            return 0, lambda: None
        transfers = self._transfers_of(leaving[0].device)
        stored = transfers.to_host(list(zip(slots, leaving, strict=True)))

        def let_go() -> None:
            transfers.wait(stored)
            leaving.clear()

        return sum(aligned(one.nbytes) for one in leaving), let_go

    def about_to_load(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep large tensors back, which would be brought to the device."""
        self.settle()
        self._loading = []
        saved = [one for group in state_dict["param_groups"] for one in group["params"]]
        own = [one for group in optimizer.param_groups for one in group["params"]]
        parameter_of = dict(zip(saved, own, strict=False))
        kept: dict[Any, Any] = {}
        for key, values in state_dict["state"].items():
            parameter = parameter_of.get(key)
            kept[key] = values if parameter is None or not isinstance(values, dict) else dict(values)
            for name, value in list(kept[key].items()) if kept[key] is not values else ():
                if name != "step" and is_large(value):
                    self._loading.append((parameter, name, value))
                    kept[key][name] = value.new_empty(0)
        return {**state_dict, "state": kept}

    def loaded(self, optimizer: Any) -> None:
        """Put what was kept back into the host; into the device where there is no room."""
        self._state = optimizer.state = WatchedState(self, optimizer.state)
        loading, self._loading = self._loading, []
        with torch.no_grad(), self._state.unwatched():
            for parameter, name, value in loading:
                kind = parameter.dtype if parameter.is_floating_point() else value.dtype
                wanted = torch.empty_like(value, dtype=kind, device="meta")
                self._make_slots([(parameter, name, wanted)])
                slot = self._slots.get(parameter, {}).get(name)
                if slot is not None:
                    slot.copy_(value)
                    self._state[parameter][name] = slot
                else:
                    self._state[parameter][name] = value.to(dtype=kind, device=self._device_of(parameter))

    def _large(self, part: Parameters) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """State of some parameters that is on the device."""
        for parameter in part:
            slots = self._slots.get(parameter, {})
            for name, value in self._state.get(parameter, {}).items():
                if is_large(value) and value is not slots.get(name) and value.device == self._device_of(parameter):
                    yield parameter, name, value

    def _hosted(self, part: Parameters) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """State of some parameters that is in the host."""
        with self._state.unwatched():
            for parameter in part:
                for name, slot in self._slots.get(parameter, {}).items():
                    if self._state.get(parameter, {}).get(name) is slot:
                        yield parameter, name, slot

    def _make_slots(self, wanted: list[tuple[torch.Tensor, str, torch.Tensor]]) -> None:
        """Room in the host for what has none, all in one block, or none for any of it."""
        lacking = []
        for parameter, name, tensor in wanted:
            slot = self._slots.get(parameter, {}).get(name)
            if slot is None or slot.shape != tensor.shape or slot.dtype != tensor.dtype:
                self._slots.get(parameter, {}).pop(name, None)
                lacking.append((parameter, name, tensor))
        if not lacking:
            return
        is_cuda = self._device_of(lacking[0][0]).type == "cuda"
        slots = self._store.take_like([tensor for _, _, tensor in lacking], pinned=is_cuda)
        for (parameter, name, _), slot in zip(lacking, slots or (), strict=False):
            self._slots.setdefault(parameter, {})[name] = slot

    def _device_of(self, parameter: torch.Tensor) -> torch.device:
        layer = layer_of(parameter)
        return parameter.device if layer is None else layer.device

    def _transfers_of(self, device: torch.device) -> Transfers:
        if self._transfers is None:
            self._transfers = Transfers(device)
        return self._transfers


def is_large(value: Any) -> bool:
    """Whether a value of an optimizer's state is worth paging."""
    return type(value) in _PLAIN and value.layout == torch.strided and value.nbytes >= LEAST_BYTES
