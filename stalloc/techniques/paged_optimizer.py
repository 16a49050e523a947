"""An optimizer whose state lies in host memory, or in a file, and is on the device only while it is used.

Contract: between steps each large tensor of state is a tensor of the host, with the values that the optimizer left;
whoever looks at it there sees them whole. state_dict() hands these on, and load_state_dict() puts what it reads there,
so neither needs memory of the device. What finds no room stays on the device. The optimizer's own code makes every
update: on the device, where values are its own to the last bit, or on the processor, where they differ by rounding. A
folder has either the commit before or the last one, each whole, with the values of the optimizer to the last bit.
"""

import functools
import itertools
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stalloc.errors import BadInputError, GradientError
from stalloc.techniques.disk_store import DiskStore
from stalloc.techniques.host_store import HostStore, dense_strides
from stalloc.techniques.parameters import Parameters, has_gradient, own_step, parameters_of, why_not_one_by_one
from stalloc.techniques.parts import Place, Shares, arranged_with_copies
from stalloc.techniques.processor_updates import HostGradients, ProcessorUpdates, why_not_on_processor
from stalloc.techniques.state_pager import StatePager, is_large
from stalloc.techniques.step_in_backward import StepInBackward
from stalloc.techniques.streamed_layers import WeightTier, device_of, layer_of, layers_of
from stalloc.techniques.transfers import Transfers, phase

_paged: "weakref.WeakKeyDictionary[Any, PagedOptimizer]" = weakref.WeakKeyDictionary()
paged_optimizer: "Callable[[Any], PagedOptimizer | None]" = _paged.get
"""The `PagedOptimizer` of an optimizer; None if it is not paged."""


class _Tier(Protocol):
    """Brings what an update of some parameters needs to the device, and takes it away again."""

    def bytes_of(self, part: Parameters) -> int:
        """The bytes that `fetch` would put on the device."""

    def fetch(self, part: Parameters) -> Callable[[], None]:
        """Begin to bring it; returns a function that makes the program's stream wait for it."""

    def store(self, part: Parameters) -> tuple[int, Callable[[], None]]:
        """Begin to take it away after an update; its bytes, and a function that waits for that and frees the memory."""


class _Flight:
    """What is on its way during a step. Invariant: `_bytes` is the sum of what was fetched and not freed."""

    def __init__(self, tiers: Sequence[_Tier], window_bytes: int) -> None:
        self._tiers, self._window_bytes, self._bytes = tiers, window_bytes, 0
        self._arriving: dict[int, tuple[int, list[Callable[[], None]]]] = {}
        self._leaving: deque[tuple[int, list[Callable[[], None]]]] = deque()

    def fetch(self, number: int, part: Parameters, *, ahead: bool = False) -> None:
        """Begin to bring a part unless it is there already; parts on their way out make room first. Ahead, during the
        update before, only if there is room while the part that left last is still going."""
        is_there = number in self._arriving
        size_bytes = 0 if is_there else sum(tier.bytes_of(part) for tier in self._tiers)
        while len(self._leaving) > ahead and self._bytes + size_bytes > self._window_bytes:
            self._let_go()
        if not is_there and (not ahead or self._bytes + size_bytes <= self._window_bytes):
            self._bytes += size_bytes
            self._arriving[number] = size_bytes, [tier.fetch(part) for tier in self._tiers]

    def wait(self, number: int) -> None:
        for arrived in self._arriving[number][1]:
            arrived()

    def store(self, number: int, part: Parameters) -> None:
        fetched_bytes, _ = self._arriving.pop(number)
        stored = [tier.store(part) for tier in self._tiers]
        size_bytes = sum(size for size, _ in stored)
        self._bytes += size_bytes - fetched_bytes  # more, where the update made it
        self._leaving.append((size_bytes, [let_go for _, let_go in stored]))

    def land(self) -> None:
        while self._leaving:
            self._let_go()
        for number in self._arriving:
            self.wait(number)

    def _let_go(self) -> None:
        size_bytes, waits = self._leaving.popleft()
        for let_go in waits:
            let_go()
        self._bytes -= size_bytes


class PagedOptimizer:
    """An optimizer whose state is paged. `window_bytes` of state are on the device at once, or what one part needs."""

    def __init__(
        self,
        optimizer: Any,
        store: HostStore,
        disk: DiskStore | None,
        window_bytes: int,
        shares: Shares,
        *,
        sends_gradients: bool,
        updates_beside_backward: bool,
    ) -> None:
        """`sends_gradients` from the device in backward, where the processor uses them, and of streamed layers. With
        `updates_beside_backward` the processor updates streamed layers as their gradients come, by the rules of
        `StepInBackward`. Raises BadInputError if it cannot be paged, or not be updated where `shares` says."""
        if reason := why_not_one_by_one(optimizer):
            raise BadInputError(f"{reason}: its state stays on the device.")
        if shares.processor and (reason := why_not_on_processor(optimizer)):
            raise BadInputError(f"{reason}: give no share to the processor.")
        if "step" in vars(optimizer) and not hasattr(type(optimizer).step, "stalloc_own"):
            raise BadInputError(
                f"the step of this {type(optimizer).__name__} has been wrapped, by a scheduler perhaps: page it before."
            )
        self.store, self.disk = store, disk
        self._window_bytes, self._shares = window_bytes, shares
        self._reads_for_processor = True  # until it shows that there is no room for what is read from disk
        self._places: Any = WeakIdKeyDictionary()  # parameter -> Place
        self.committed_regions: Any = WeakIdKeyDictionary()  # parameter -> where a commit puts what is not on disk
        self.pager = StatePager(optimizer, store, disk, self._place_of)
        self.gradients = HostGradients(store, self._sends_gradient, self._is_on_processor)
        self._processor = ProcessorUpdates(store, self._is_on_processor, self.gradients)
        self._tiers: list[_Tier] = [WeightTier(self._is_on_processor), self.pager, self.gradients, self._processor]
        self._hooks = [
            optimizer.register_state_dict_pre_hook(self._looked),
            optimizer.register_load_state_dict_pre_hook(self.pager.about_to_load),
            optimizer.register_load_state_dict_post_hook(self.pager.loaded, prepend=True),
        ]
        self._sends_gradients = sends_gradients
        self._beside: dict[Any, Future[None]] = {}  # updates of parameters that go on beside backward
        self._early = None
        if updates_beside_backward:
            self._early = StepInBackward(optimizer, self._update_beside, self._is_updated_beside)
        self._arrange(optimizer)
        if not hasattr(type(optimizer).step, "stalloc_own"):
            _let_dispatch(type(optimizer))
        _paged[optimizer] = self
        weakref.finalize(optimizer, self._forget).atexit = False
        self.pager.take_over(optimizer)
        self.gradients.watch(optimizer)

    def told(self) -> dict[str, int]:
        """Bytes of state that come and go in each step, those of them on disk, and of parameters that the processor
        updates, of all these those that are streamed."""
        found = dict.fromkeys(("paged_bytes", "disk_state_bytes", "processor_bytes", "processor_streamed_bytes"), 0)
        for parameter, place in list(self._places.items()):
            for _, _, slot, region in self.pager.elsewhere([parameter]):
                found["paged_bytes"] += slot.nbytes * (place is not Place.PROCESSOR)
                found["disk_state_bytes"] += slot.nbytes * (region is not None)
            if place is Place.PROCESSOR:
                found["processor_bytes"] += parameter.nbytes
                found["processor_streamed_bytes"] += parameter.nbytes * (layer_of(parameter) is not None)
        return found

    def undo(self, optimizer: Any) -> None:
        """Bring the state back to the device, and let the optimizer step as it did."""
        _paged.pop(optimizer, None)
        self._updated_beside()
        for hook in self._hooks:
            hook.remove()
        if self._early is not None:
            self._early.undo()
        self.pager.bring_home(optimizer)
        self.gradients.undo()

    def _forget(self) -> None:
        """The optimizer is gone: room goes back now, not when Python next looks for what refers to itself."""
        self.pager.forget()
        self._processor.forget()
        self.gradients.forget()
        self.disk = None
        self.committed_regions = WeakIdKeyDictionary()

    def step(self, optimizer: Any, closure: Any = None) -> Any:
        """The optimizer's own step, a part of its parameters at a time: each is updated once, with the options of its
        group; hooks of the step run once around all parts, a closure once before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = optimizer.param_groups
        members = [group["params"] for group in groups]
        present = ([one for one in part if has_gradient(one)] for part in self._divide(optimizer))
        parts = [part for part in present if part]
        own = own_step(type(optimizer))
        group_of = {id(one): number for number, params in enumerate(members) for one in params}

        def restore() -> None:
            optimizer.param_groups = groups
            for group, params in zip(groups, members, strict=True):
                group["params"] = params

        def update(part: Parameters) -> None:
            restore()
            if self._is_on_processor(part[0]):
                self._processor.update(optimizer, part)
                return
            for number, group in enumerate(groups):
                group["params"] = [one for one in part if group_of[id(one)] == number]
            optimizer.param_groups = [group for group in groups if group["params"]]
            own(optimizer)

        with self._stepping(optimizer):
            flight = _Flight(self._tiers, self._window_bytes)
            try:
                for number, part in enumerate(parts):
                    with phase(f"update/{number}"):
                        flight.fetch(number, part)
                    if number + 1 < len(parts):
                        with phase(f"update/{number + 1}"):
                            flight.fetch(number + 1, parts[number + 1], ahead=True)
                    with phase(f"update/{number}"):
                        flight.wait(number)
                        update(part)
                        flight.store(number, part)
            finally:
                flight.land()
                restore()
        return loss

    @contextmanager
    def _stepping(self, optimizer: Any) -> Iterator[None]:
        with self.pager.stepping(optimizer), self.gradients.unseen():
            yield
        for layer in layers_of(parameters_of(optimizer)):  # whole in the host, where the program may read them
            layer.home.settle()

    def _place_of(self, parameter: Any) -> Place:
        return self._places.get(parameter, Place.PAGED)

    def _is_on_processor(self, parameter: Any) -> bool:
        return self._place_of(parameter) is Place.PROCESSOR

    def _sends_gradient(self, parameter: Any) -> bool:
        """Whether a gradient leaves in backward: that of a streamed layer, or one that the processor uses."""
        leaves = self._is_on_processor(parameter) or layer_of(parameter) is not None
        return self._sends_gradients and leaves and not self._is_updated_beside(parameter)

    def _is_updated_beside(self, parameter: Any) -> bool:
        is_in_host = layer_of(parameter) is not None and not _is_on_disk(parameter)
        return self._early is not None and self._is_on_processor(parameter) and is_in_host

    def _update_beside(self, optimizer: Any, parameter: torch.Tensor) -> bool:
        """Begin to update a parameter of a layer in host memory; False where that is left to the step."""
        layer = layer_of(parameter)
        value = None if layer is None else layer.in_host(parameter)
        if value is None:
            return False
        with self.pager.stepping(optimizer):
            if not self.pager.begin([parameter], functools.partial(self._processor.begin_state, optimizer)):
                return False
            update = self._processor.update_of(optimizer, [parameter], [value])
            done = self.gradients.use(parameter, lambda gradient: update([gradient]))
        if done is not None:
            self._beside[parameter] = done
        return done is not None

    def _updated_beside(self) -> None:
        while self._beside:
            parameter, done = self._beside.popitem()
            done.result()
            layer = layer_of(parameter)
            if layer is not None and layer.in_host(parameter) is None:
                raise GradientError(
                    f"a parameter of {layer.name} is changed between the backward pass and the optimizer's step, and "
                    "the processor updates it beside backward: let updates stay in the step."
                )
            if layer is not None:
                layer.release()  # where backward failed it is here yet, as it was
            torch.autograd.graph.increment_version(parameter)

    def _looked(self, _: Any) -> None:
        if self._beside:
            raise GradientError(
                "the optimizer's state is read between the backward pass and its step, and the processor updates it "
                "beside backward: let updates stay in the step."
            )
        self.pager.looked()

    def _arrange(self, optimizer: Any) -> tuple[list[tuple[Place, Parameters]], int]:
        parameters = parameters_of(optimizer)
        numbers: dict[int, int] = {}
        layers = [
            -1 if (layer := layer_of(one)) is None else numbers.setdefault(id(layer), len(numbers))
            for one in parameters
        ]
        parts, copied_bytes = arranged_with_copies(
            [one.nbytes for one in parameters],
            layers,
            {layer for one, layer in zip(parameters, layers, strict=True) if _is_on_disk(one)},
            self._window_bytes,
            self._shares,
            reads_for_processor=self._reads_for_processor,
            gradients={number for number, one in enumerate(parameters) if self.gradients.holds(one)},
        )
        found = [(part.place, [parameters[number] for number in part.members]) for part in parts]
        self._places.update({one: place for place, members in found for one in members})
        return found, copied_bytes

    def _divide(self, optimizer: Any) -> list[Parameters]:
        """The parts of a step. What the processor has no room for is updated on the device, where its state stays,
        or is paged if its layer is on disk."""
        self._updated_beside()
        self.gradients.about_to_step(optimizer)
        if self._early is not None:
            self._early.watch(optimizer)
        with self.pager.stepping(optimizer):
            parts, needed_bytes = self._arrange(optimizer)
            device = device_of(parts[0][1][0]) if parts else torch.device("cpu")
            has_room = not needed_bytes or self._processor.make_room(needed_bytes, device)
            if not has_room and self._reads_for_processor:
                self._reads_for_processor = False
                parts, needed_bytes = self._arrange(optimizer)
                has_room = not needed_bytes or self._processor.make_room(needed_bytes, device)
            for place, part in parts:
                present = [one for one in part if place is Place.PROCESSOR and has_gradient(one)]
                begins = functools.partial(self._processor.begin_state, optimizer)
                if present and not (has_room and self.pager.begin(present, begins)):
                    for one in part:
                        self._places[one] = Place.PAGED if _is_on_disk(one) else Place.DEVICE
            return [part for _, part in parts]


def _is_on_disk(parameter: Any) -> bool:
    layer = layer_of(parameter)
    return layer is not None and layer.is_on_disk


def commit_state(optimizer: Any, label: int) -> None:
    """See `stalloc.commit`."""
    paged = paged_optimizer(optimizer)
    if paged is None or paged.disk is None:
        raise BadInputError('this optimizer keeps no state on a disk: page it with disk="FOLDER:SIZE".')
    pager, disk = paged.pager, paged.disk
    state: dict[int, dict[str, dict[str, Any]]] = {}
    with pager.stepping(optimizer):
        pager.settle()
        pager.put_down()
        for number, parameter in enumerate(parameters_of(optimizer)):
            if values := optimizer.state.get(parameter):
                state[number] = {name: _told(paged, disk, parameter, name, value) for name, value in values.items()}
        disk.settle()
    for one in (one for values in state.values() for one in values.values() if "region" in one):
        region = one.pop("region")  # which is written by now
        place = region.places[region.current]
        one |= {"offset": place, "size_bytes": region.size_bytes, "sums": region.sums}
    numbers = itertools.count()
    groups = [
        {name: [next(numbers) for _ in value] if name == "params" else value for name, value in group.items()}
        for group in optimizer.param_groups
    ]
    manifest = {"label": label, "chunk_bytes": disk.chunk_bytes, "param_groups": groups, "state": state}
    try:
        json.dumps(manifest)
    except TypeError as error:
        raise BadInputError(
            f"an option of {type(optimizer).__name__} cannot be committed ({error}): give it as a number or a string."
        ) from error
    disk.commit(manifest)


def _told(paged: PagedOptimizer, disk: DiskStore, parameter: Any, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    kind = str(value.dtype).removeprefix("torch.")
    if not is_large(value):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {"dtype": kind, "shape": list(value.shape), "data": bytes(data.tolist()).hex()}
    region = paged.pager.region_of(parameter, name, value)
    if region is None:  # it lies elsewhere
        regions = paged.committed_regions.setdefault(parameter, {})
        if name not in regions or regions[name].size_bytes != value.nbytes:
            if (found := disk.take([value.nbytes])) is None:
                raise BadInputError("a commit needs more room on the disk than is allowed: nothing was committed.")
            regions[name] = found[0]
        region = regions[name]
        disk.write([(value, region)], Transfers(value.device))()
    return {"dtype": kind, "shape": list(value.shape), "stride": list(dense_strides(value)), "region": region}


def _let_dispatch(kind: type) -> None:
    """Make the class of an optimizer check, for each of its optimizers, whether that one's step is paged."""
    own = own_step(kind)

    def step(self: Any, closure: Any = None) -> Any:
        if (paged := _paged.get(self)) is None:
            return own(self) if closure is None else own(self, closure)
        return paged.step(self, closure)

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked, hooked.stalloc_own = True, own
    kind.step = hooked  # type: ignore[attr-defined]
