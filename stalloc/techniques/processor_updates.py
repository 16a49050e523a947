"""Updates by the processor, of parameters whose gradients leave for the host as backward makes them.

Contract: a program finds the gradients that it would find without this, to the last bit: one that it reads is on the
device again first. What is accumulated is added in the host, in the same order. A gradient stays on the device where it
is differentiated or is no plain dense tensor, where the host has no room, as long as somebody may hold it who read it,
and in a step after one in which the program read any. Two are on their way at once, so that one is copied while the
next is computed. Each update, by the optimizer's own code, begins with the values that a parameter has on the device,
whoever changed them, and ends with the new ones there; state lies in host memory only. Arithmetic is that of torch's
fused Adam for processors, whose results differ from the device's by rounding. A virtual GPU has no values: the step is
made on tensors of device "meta". (Pudipeddi et al., L2L, 2020, section 3; Ren et al., ZeRO-Offload, 2021, section 4,
whose one-step delayed update is left out, since it changes what is computed.)
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stalloc.techniques.host_store import HostSlots, HostStore, dense_strides, has_values
from stalloc.techniques.parameters import (
    Parameters,
    has_gradient,
    own_gradient,
    own_step,
    parameters_of,
    set_own_gradient,
    unwatch_gradient,
    watch_gradient,
)
from stalloc.techniques.parts import aligned
from stalloc.techniques.streamed_layers import device_of, layer_of, put_gradient
from stalloc.techniques.transfers import DeviceTransfers, phase, threads_at

_Which = Callable[[torch.Tensor], bool]


class HostGradients:
    """A `GradientWatcher`, and a tier of a `PagedOptimizer`. Invariant: the gradient of a parameter in `_held` is what
    its slot will have when the work that is named there is done, plus the parameter's own, which backward has made
    since."""

    def __init__(self, store: HostStore, goes: _Which, stays: _Which) -> None:
        """`goes` tells whether a parameter's gradient leaves; `stays`, whether it is used in the host."""
        self._store, self._goes, self._stays = store, goes, stays
        self._slots: Any = WeakIdKeyDictionary()  # parameter -> its place in the host
        self._held: Any = WeakIdKeyDictionary()  # parameter -> list of work in the host that is to be waited for
        self._lent: Any = WeakIdKeyDictionary()  # parameter -> count of changes of its gradient, which a part brought
        self._seen: Any = WeakIdKeyDictionary()  # parameters whose gradient the program has read
        self._hooks: Any = WeakIdKeyDictionary()
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self._backward = -1  # the number of the last backward pass in which any left
        self._lock = threading.RLock()  # backward passes of the processor and of the device have a thread each
        self._was_read = self._is_read = self._is_unseen = self._is_over = False
        self._left: Any = None  # event after the last copy to the host
        self._brought: Any = None  # and after the last from there
        self._adding: deque[Future[None]] = deque()
        self._transfers = DeviceTransfers()
        self._rooms = HostSlots(store, lambda: None, pinned=True)  # for what is added to a gradient in the host
        self._thread: ThreadPoolExecutor | None = None

    def watch(self, optimizer: Any) -> None:
        """Let the gradients of its parameters leave, including parameters that were added, or made trainable, since."""
        for one in parameters_of(optimizer):
            if one.requires_grad and one.is_leaf and one not in self._hooks:
                self._hooks[one] = one.register_post_accumulate_grad_hook(self._came)
                watch_gradient(one, self)

    def undo(self) -> None:
        self.forget()
        self.bring(list(self._held))()
        for parameter, hook in list(self._hooks.items()):
            hook.remove()
            unwatch_gradient(parameter, self)

    def forget(self) -> None:
        """The optimizer is gone: gradients no longer leave, and those that have left come back when somebody asks."""
        self._is_over = True
        self._give_room_back()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """A context in which reads of gradients are stalloc's own, not the program's."""
        before, self._is_unseen = self._is_unseen, True
        try:
            yield
        finally:
            self._is_unseen = before

    def about_to_step(self, optimizer: Any) -> None:
        """Gradients that others hold come back, and what the program has read since the last step decides the next."""
        self.watch(optimizer)
        self._was_read, self._is_read = self._is_read, False
        if self._was_read:
            self._give_room_back()
        with self.unseen():
            for one in parameters_of(optimizer):
                if not self.holds(one) and own_gradient(one) is None and has_gradient(one):
                    _ = one.grad

    def holds(self, parameter: torch.Tensor) -> bool:
        return parameter in self._held

    def about_to_read(self, parameter: torch.Tensor) -> None:
        if self._is_unseen:
            return
        with self._lock:
            if parameter in self._held or own_gradient(parameter) is not None:
                self._is_read = self._seen[parameter] = True
            self.bring([parameter])()

    def about_to_set(self, parameter: torch.Tensor) -> None:
        self._seen.pop(parameter, None)
        self.drop(parameter)

    def about_to_zero(self, parameter: torch.Tensor, *, set_to_none: bool) -> None:
        if parameter not in self._held:
            return
        if set_to_none:
            self.drop(parameter)
        elif has_values(device_of(parameter)):
            slot = self.in_host(parameter)
            if self._brought is not None:
                self._brought.synchronize()
            slot.zero_()

    def in_host(self, parameter: torch.Tensor) -> torch.Tensor:
        """A gradient held in host memory; the processor waits until it is whole."""
        slot: torch.Tensor = self._slots[parameter]
        self._work_done(parameter)
        for copies in self._transfers.values():
            copies.settle()
        return slot

    def drop(self, parameter: torch.Tensor) -> None:
        if parameter in self._held:
            self._work_done(parameter)
            self._held.pop(parameter, None)

    def send(self, parameter: torch.Tensor) -> bool:
        """Begin to take the parameter's own gradient away, onto what is held; False where there is no room."""
        gradient = own_gradient(parameter)
        assert gradient is not None
        room = None
        if parameter not in self._held:
            target = self._slot_for(parameter, gradient)
        elif gradient.is_cuda:
            while len(self._adding) > 1:  # so two rooms are enough
                self._adding.popleft().result()
            room = target = self._rooms.take(gradient.nbytes)
            if room is not None:
                target = room[: gradient.nbytes].view(gradient.dtype).as_strided(gradient.shape, gradient.stride())
        else:
            self.in_host(parameter).add_(gradient)
            set_own_gradient(parameter, None)
            return True
        if target is None:
            return False
        self._leave(most=1)
        with phase("backward"):
            event = self._left = self._transfers[gradient.device].to_host([(target, gradient)])
        self._leaving.append((gradient, event))
        number = torch._C._current_graph_task_id()
        if number not in (-1, self._backward):
            self._backward = number
            torch.autograd.Variable._execution_engine.queue_callback(self._leave)
        set_own_gradient(parameter, None)
        if room is None:
            self._held[parameter] = []
        else:
            slot, rooms, computes = self._slots[parameter], self._rooms, has_values(device_of(parameter))

            def add() -> None:
                if computes:
                    slot.add_(target)
                rooms.give_back(room)

            self._adding.append(self._after_copies(gradient.device, add))
            self._held[parameter].append(self._adding[-1])
        return True

    def use(self, parameter: torch.Tensor, update: Callable[[torch.Tensor], None]) -> "Future[None] | None":
        """Take the parameter's own gradient away for good, for an update in another thread when it is in the host. None
        where it cannot go."""
        gradient = own_gradient(parameter)
        with self._lock:
            if gradient is None or not self._can_go(parameter, gradient) or not self.send(parameter):
                return None
            del self._held[parameter]
            slot = self._slots[parameter]
            return self._after_copies(gradient.device, lambda: update(slot))

    def bring(self, part: Parameters) -> Callable[[], None]:
        """Begin to bring held gradients to the device; the function returned makes them the parameters' own."""
        wanted = [one for one in part if one in self._held]
        if not wanted:
            return lambda: None
        self._leave()
        for one in wanted:
            self._work_done(one)
        here = [torch.empty_like(self._slots[one], device=device_of(one)) for one in wanted]
        transfers = self._transfers[here[0].device]
        transfers.wait(self._left)
        pairs = [(it, self._slots[one]) for it, one in zip(here, wanted, strict=True)]
        arrived = self._brought = transfers.to_device(pairs)

        def put() -> None:
            transfers.wait(arrived)
            while wanted:
                one, gradient = wanted.pop(), here.pop()
                if (new := own_gradient(one)) is not None:
                    with torch.no_grad() if not new.requires_grad else torch.enable_grad():
                        gradient = gradient + new if new.requires_grad else gradient.add_(new)
                self._held.pop(one, None)
                put_gradient(one, gradient)

        return put

    def bytes_of(self, part: Parameters) -> int:
        return sum(aligned(self._slots[one].nbytes) for one in part if one in self._held and not self._stays(one))

    def fetch(self, part: Parameters) -> Callable[[], None]:
        wanted = [one for one in part if one in self._held and not self._stays(one)]
        put = self.bring(wanted)

        def arrived() -> None:
            put()
            for one in wanted:
                gradient = own_gradient(one)
                self._lent[one] = -1 if gradient is None else gradient._version
            wanted.clear()

        return arrived

    def store(self, part: Parameters) -> tuple[int, Callable[[], None]]:
        """What the optimizer has not changed is in the host yet."""
        for one in part:
            version, gradient = self._lent.pop(one, None), own_gradient(one)
            if version is None or gradient is None:
                continue
            if version != gradient._version:
                self.send(one)
            else:
                set_own_gradient(one, None)
                self._held[one] = []
        return 0, self._leave

    def _came(self, parameter: torch.Tensor) -> None:
        with self._lock:
            gradient = own_gradient(parameter)
            if gradient is None:  # somebody who heard of it first has taken it
                return
            if not (self._goes(parameter) and self._can_go(parameter, gradient) and self.send(parameter)):
                self.bring([parameter])()

    def _can_go(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        return (
            not (self._is_over or self._was_read)
            and parameter not in self._seen
            and type(gradient) is torch.Tensor
            and gradient.layout == torch.strided
            and not gradient.requires_grad
            and gradient.dtype == parameter.dtype
            and gradient.stride() == dense_strides(parameter)  # as the processor's updates go through them
        )

    def _slot_for(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        slot: torch.Tensor | None = self._slots.pop(parameter, None)
        if slot is None or slot.shape != gradient.shape or slot.dtype != gradient.dtype:
            del slot  # its room goes first
            slot = next(iter(self._store.take_like([gradient], pinned=gradient.is_cuda) or ()), None)
        if slot is not None:
            self._slots[parameter] = slot
        return slot

    def _after_copies(self, device: torch.device, work: Callable[[], None]) -> "Future[None]":
        event = self._left

        def work_then() -> None:
            if event is not None:
                event.synchronize()
            work()

        self._thread = self._thread or threads_at(device, 1, "stalloc-gradients")
        return self._thread.submit(work_then)

    def _work_done(self, parameter: torch.Tensor) -> None:
        for one in self._held.get(parameter, ()):
            one.result()
        if parameter in self._held:
            self._held[parameter] = []

    def _leave(self, most: int = 0) -> None:
        """Free device memory that was copied, except for the last gradients, which may still be on their way."""
        while len(self._leaving) > most:
            gradient, event = self._leaving.popleft()
            self._transfers[gradient.device].wait(event)

    def _give_room_back(self) -> None:
        self._slots = WeakIdKeyDictionary({one: slot for one, slot in self._slots.items() if one in self._held})
        self._rooms = HostSlots(self._store, lambda: None, pinned=True)


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
    """A tier of a `PagedOptimizer`. Two blocks of host memory take turns: one part comes while another is updated."""

    def __init__(self, store: HostStore, is_on_processor: _Which, in_host: HostGradients) -> None:
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

    def update(self, optimizer: Any, part: Parameters) -> None:
        """Update a part that was fetched."""
        way = self._parts[id(part[0])]
        self.update_of(optimizer, part, way.values)(way.gradients)
        torch.autograd.graph.increment_version(part)

    def update_of(self, optimizer: Any, part: Parameters, values: Parameters) -> Callable[[Parameters], None]:
        """A function that updates parameters in the host with gradients in the host; any thread may call it."""
        computes = has_values(device_of(part[0]))
        copies = [torch.nn.Parameter(value if computes else value.to("meta")) for value in values]
        copy_of = {id(one): copy for one, copy in zip(part, copies, strict=True)}
        groups = [
            {**group, "params": params, "fused": computes, "foreach": False}
            for group in optimizer.param_groups
            if (params := [copy_of[id(one)] for one in group["params"] if id(one) in copy_of])
        ]
        scaling = {
            name: value.cpu() if computes and isinstance(value, torch.Tensor) else None
            for name, value in vars(optimizer).items()
            if name in _SCALING
        }
        state = {copy_of[id(one)]: _on_processor(optimizer.state[one], computes) for one in part}
        twin = object.__new__(type(optimizer))  # whose groups and state nobody else changes meanwhile
        vars(twin).update({**vars(optimizer), **scaling, "param_groups": groups, "state": state})

        def update(gradients: Parameters) -> None:
            for copy, gradient in zip(copies, gradients, strict=True):
                copy.grad = gradient if computes else gradient.to("meta")
            own_step(type(optimizer))(twin)

        return update

    def store(self, part: Parameters) -> tuple[int, Callable[[], None]]:
        if (way := self._parts.pop(id(part[0]), None)) is None:
            return 0, lambda: None
        if (layer := layer_of(part[0])) is not None:
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
    return {name: it.to("meta") if torch.is_tensor(it) and name != "step" else it for name, it in state.items()}
