"""The state of one optimizer, brought to the device for an update and taken away again.

Contract: between steps each large tensor of state that is not to stay on the device is a tensor of the host, or one
mapped from a file, with the values that the optimizer left; whoever reads it there sees them whole, and a change made
there counts. What finds no room stays on the device: tensors that come together get room together, or none of them any.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stalloc.errors import DiskError
from stalloc.techniques.disk_store import DiskStore, Region, viewed
from stalloc.techniques.host_store import HostStore, dense_strides, has_values
from stalloc.techniques.parameters import Parameters, parameters_of
from stalloc.techniques.parts import Place, aligned
from stalloc.techniques.streamed_layers import device_of
from stalloc.techniques.transfers import DeviceTransfers

LEAST_BYTES = 4096  #: smaller tensors of state, such as the count of steps, stay where they are
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Named = tuple[torch.Tensor, str, torch.Tensor]
"""A parameter, the name of a tensor of its state, and that tensor."""
_InRegion = tuple[torch.Tensor, str, torch.Tensor, Region]


def _watched(name: str) -> Any:
    own = getattr(defaultdict, name)

    def look_and_call(self: Any, *args: Any) -> Any:
        self.look()
        return own(self, *args)

    return look_and_call


class WatchedState(defaultdict[Any, Any]):
    """An optimizer's state that, before anybody but the step reads it, waits for what is on its way to the host. A
    copy, or a pickle, of it is as it would be without paging."""

    def __init__(self, pager: "StatePager", state: Any) -> None:
        super().__init__(dict, state)
        self._pager, self._watched = pager, True

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """A context for work that knows what is on its way, in which nothing waits."""
        before, self._watched = self._watched, False
        try:
            yield
        finally:
            self._watched = before

    def look(self) -> None:
        """Somebody reads it, or is about to change it."""
        if self._watched:
            self._pager.looked()

    __getitem__, get, values, items = map(_watched, ("__getitem__", "get", "values", "items"))

    def __reduce__(self) -> Any:
        found = {key: self._pager.of_device(key, values) for key, values in self.items()}
        return defaultdict, (dict, found)


class StateSlots:
    """The slots of an optimizer's state, by parameter and name: tensors of the host, or mapped from a region of a file.
    A tensor keeps its slot as long as its shape and type stay."""

    def __init__(self, store: HostStore, disk: DiskStore | None) -> None:
        self._store, self._disk = store, disk
        self._slots: Any = WeakIdKeyDictionary()  # parameter -> by name

    def of(self, parameter: Any) -> dict[str, tuple[torch.Tensor, Region | None]]:
        return self._slots.get(parameter, {}) if isinstance(parameter, torch.Tensor) else {}

    def get(self, parameter: torch.Tensor, name: str) -> tuple[torch.Tensor | None, Region | None]:
        return self.of(parameter).get(name, (None, None))

    def make(self, wanted: list[Named], device: torch.device, *, to_disk: bool) -> None:
        """Make slots for tensors that have none: for all of these, or for none."""
        lacking = []
        for parameter, name, tensor in wanted:
            slot, _ = self.get(parameter, name)
            if slot is None or slot.shape != tensor.shape or slot.dtype != tensor.dtype:
                self.of(parameter).pop(name, None)
                lacking.append((parameter, name, tensor))
        if not lacking:
            return
        tensors = [tensor for _, _, tensor in lacking]
        slots = self._store.take_like(tensors, pinned=device.type == "cuda")
        for (parameter, name, _), made in zip(lacking, slots or (), strict=False):
            self._slots.setdefault(parameter, {})[name] = made, None
        if slots is None and to_disk and self._disk is not None:
            regions = self._disk.take([tensor.nbytes for tensor in tensors])
            for one, region in zip(lacking, regions or (), strict=False):
                self.map(*one, region)

    def map(self, parameter: torch.Tensor, name: str, like: torch.Tensor, region: Region) -> torch.Tensor:
        assert self._disk is not None
        slot = viewed(self._disk.memory(region), like)
        self._slots.setdefault(parameter, {})[name] = slot, region
        return slot


class StatePager:
    """The state of one optimizer. Invariant: a tensor of state is either the one in `_slots`, or on the device."""

    def __init__(
        self, optimizer: Any, store: HostStore, disk: DiskStore | None, place_of: Callable[[torch.Tensor], Place]
    ) -> None:
        self.state = WatchedState(self, optimizer.state)
        self._store, self._disk, self._place_of = store, disk, place_of
        self._slots = StateSlots(store, disk)
        self._has_step_on_device = bool(optimizer.defaults.get("fused"))
        self._looks = 0  # how often somebody looked
        self._stored: Any = WeakIdKeyDictionary()  # parameter -> looks when it was written to the file
        self._transfers = DeviceTransfers()
        self._loading: list[Named] = []

    def take_over(self, optimizer: Any) -> None:
        optimizer.state = self.state
        for parameter in self._known():
            if self._place_of(parameter) is not Place.DEVICE:
                self._take_away([parameter])[1]()

    def bring_home(self, optimizer: Any) -> None:
        self.settle()
        for parameter in self._known():
            self._bring([parameter])()
        optimizer.state = defaultdict(dict, {one: self.of_device(one, values) for one, values in self.state.items()})
        self._slots = StateSlots(self._store, self._disk)

    def forget(self) -> None:
        """The optimizer is gone: drop its state, except for tensors that somebody else holds."""
        with suppress(DiskError):
            self.settle()
        self.state = WatchedState(self, {})
        self._slots = StateSlots(self._store, None)
        self._disk = None

    def looked(self) -> None:
        """Somebody else reads or changes state from here on: wait until it is whole."""
        self._looks += 1
        self.settle()

    def settle(self) -> None:
        for copies in self._transfers.values():
            copies.settle()
        if self._disk is not None:
            self._disk.settle()

    @contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        if optimizer.state is not self.state:  # the program has begun anew
            self.state = optimizer.state = WatchedState(self, optimizer.state)
        with self.state.unwatched():
            yield

    def of_device(self, parameter: Any, values: Any) -> Any:
        """The state of a parameter as it would be without paging: what is elsewhere is a copy, on the device."""
        if not isinstance(parameter, torch.Tensor) or not isinstance(values, dict):
            return values
        device, slots = device_of(parameter), self._slots.of(parameter)
        small = {} if self._place_of(parameter) is not Place.PROCESSOR else {
            name: value for name, value in values.items()
            if isinstance(value, torch.Tensor) and (name != "step" or self._has_step_on_device)
        }  # fmt: skip
        hosted = {name: slot for name, (slot, _) in slots.items() if values.get(name) is slot}
        return {**values, **{name: value.to(device) for name, value in (small | hosted).items()}}

    def bytes_of(self, part: Parameters) -> int:
        return sum(aligned(slot.nbytes) for _, _, slot, _ in self.elsewhere(self._used_on_device(part)))

    def fetch(self, part: Parameters) -> Callable[[], None]:
        return self._bring(self._used_on_device(part))

    def store(self, part: Parameters) -> tuple[int, Callable[[], None]]:
        return self._take_away([one for one in part if self._place_of(one) is Place.PAGED])

    def begin(self, part: Parameters, of_meta: Callable[[torch.Tensor], dict[str, Any]]) -> bool:
        """Have the whole state of some parameters in host memory, before the processor updates them. `of_meta` gives
        the state that the optimizer begins with, whose large tensors are zeros. False where there is no room, or where
        numbers lie in another order than those of their parameter, which the processor goes through in a row: what
        there was of state is left where it was."""
        with self.state.unwatched():
            self._take_away(part, to_disk=False)[1]()
            new = {one: of_meta(one) for one in part if not self.state.get(one)}
            wanted = [(one, name, value) for one in new for name, value in new[one].items() if is_large(value)]
            self._slots.make(wanted, device_of(part[0]), to_disk=False)
            for one, name, _ in wanted:
                slot, _ = self._slots.get(one, name)
                if slot is None:
                    return False
                if has_values(device_of(one)):
                    slot.zero_()
                new[one][name] = slot
            for one, values in new.items():
                small = {name for name, value in values.items() if isinstance(value, torch.Tensor) and value.is_meta}
                self.state[one] = values | {name: torch.zeros_like(values[name], device="cpu") for name in small}
            found = self.elsewhere(part)
            lies_well = all(region is None and slot.stride() == dense_strides(one) for one, _, slot, region in found)
            return lies_well and not any(True for _ in self._large(part))

    def about_to_load(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hold back large tensors, which loading would bring to the device."""
        self.looked()
        self._loading = []
        saved = [one for group in state_dict["param_groups"] for one in group["params"]]
        parameter_of = dict(zip(saved, parameters_of(optimizer), strict=False))
        kept: dict[Any, Any] = {}
        for key, values in state_dict["state"].items():
            large = {}
            if key in parameter_of and isinstance(values, dict):
                large = {name: value for name, value in values.items() if name != "step" and is_large(value)}
            self._loading += [(parameter_of[key], name, value) for name, value in large.items()]
            kept[key] = {**values, **{name: value.new_empty(0) for name, value in large.items()}} if large else values
        return {**state_dict, "state": kept}

    def loaded(self, optimizer: Any) -> None:
        """Put held back tensors where state lies between steps, or on the device where there is no room."""
        self.state = optimizer.state = WatchedState(self, optimizer.state)
        loading, self._loading = self._loading, []
        with torch.no_grad(), self.state.unwatched():
            for parameter, name, value in loading:
                place = self._place_of(parameter)
                kind = parameter.dtype if parameter.is_floating_point() else value.dtype
                wanted = torch.empty_like(value, dtype=kind, device="meta")
                if place is not Place.DEVICE:
                    device = device_of(parameter)
                    self._slots.make([(parameter, name, wanted)], device, to_disk=place is Place.PAGED)
                slot, region = self._slots.get(parameter, name)
                if place is Place.DEVICE or slot is None:
                    self.state[parameter][name] = value.to(dtype=kind, device=device_of(parameter))
                elif region is not None:
                    self._write([(parameter, name, value.to(dtype=kind, copy=True), region)])()
                else:
                    slot.copy_(value)
                    self.state[parameter][name] = slot
        self.settle()

    def put_down(self) -> None:
        """Write to the file the state that somebody may have changed in memory."""
        for parameter in self._known():
            if self._stored.get(parameter) != self._looks:
                self._write([(*one, region) for *one, region in self.elsewhere([parameter]) if region is not None])()

    def region_of(self, parameter: torch.Tensor, name: str, value: Any) -> Region | None:
        """Where a tensor of state lies in the file, if it does."""
        slot, region = self._slots.get(parameter, name)
        return region if slot is value else None

    def elsewhere(self, part: Parameters) -> Iterator[tuple[torch.Tensor, str, torch.Tensor, Region | None]]:
        """State of some parameters that is not on the device: parameter, name, tensor, and its region if it has one."""
        with self.state.unwatched():
            for parameter in part:
                for name, (slot, region) in self._slots.of(parameter).items():
                    if self.state.get(parameter, {}).get(name) is slot:
                        yield parameter, name, slot, region

    def _known(self) -> Parameters:
        return [one for one in self.state if isinstance(one, torch.Tensor)]

    def _bring(self, part: Parameters) -> Callable[[], None]:
        pairs, reads = [], []
        with self.state.unwatched():
            for parameter, name, slot, region in list(self.elsewhere(part)):
                here = torch.empty_like(slot, device=device_of(parameter))
                self.state[parameter][name] = here
                if region is None or self._stored.get(parameter) != self._looks:
                    pairs.append((here, slot))
                else:
                    reads.append((here, region))
        if not pairs and not reads:
            return lambda: None
        transfers = self._transfers[device_of(part[0])]
        arrived = transfers.to_device(pairs) if pairs else None
        read = self._disk.read(reads, transfers) if self._disk is not None and reads else lambda: None

        def wait() -> None:
            transfers.wait(arrived)
            read()

        return wait

    def _take_away(self, part: Parameters, *, to_disk: bool = True) -> tuple[int, Callable[[], None]]:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        written: list[_InRegion] = []
        with self.state.unwatched():
            if found := list(self._large(part)):
                self._slots.make(found, found[0][2].device, to_disk=to_disk)
            for parameter, name, tensor in found:
                slot, region = self._slots.get(parameter, name)
                if region is not None:
                    written.append((parameter, name, tensor, region))
                elif slot is not None:
                    self.state[parameter][name] = slot
                    pairs.append((slot, tensor))
        if not pairs and not written:
            return 0, lambda: None
        transfers = self._transfers[device_of(part[0])]
        stored, wrote = transfers.to_host(pairs) if pairs else None, self._write(written)
        leaving = [tensor for _, tensor in pairs] + [tensor for *_, tensor, _ in written]
        size_bytes = sum(aligned(one.nbytes) for one in leaving)

        def let_go() -> None:
            nonlocal wrote
            transfers.wait(stored)
            wrote()
            wrote = _nothing
            leaving.clear()

        return size_bytes, let_go

    def _write(self, written: list[_InRegion]) -> Callable[[], None]:
        """Begin to write tensors to their regions; the state then has them mapped from the file."""
        if self._disk is None or not written:
            return _nothing
        tensors = [(tensor, region) for *_, tensor, region in written]
        copied = self._disk.write(tensors, self._transfers[device_of(written[0][0])])
        with self.state.unwatched():
            for parameter, name, tensor, region in written:
                self.state[parameter][name] = self._slots.map(parameter, name, tensor, region)
                self._stored[parameter] = self._looks
        return copied

    def _used_on_device(self, part: Parameters) -> Parameters:
        return [one for one in part if self._place_of(one) is not Place.PROCESSOR]

    def _large(self, part: Parameters) -> Iterator[Named]:
        for parameter in part:
            for name, value in self.state.get(parameter, {}).items():
                is_slot = value is self._slots.get(parameter, name)[0]
                if is_large(value) and not is_slot and value.device == device_of(parameter):
                    yield parameter, name, value


def _nothing() -> None:
    pass


def is_large(value: Any) -> bool:
    """Whether a value of an optimizer's state is worth paging."""
    return type(value) in _PLAIN and value.layout == torch.strided and value.nbytes >= LEAST_BYTES
