"""An optimizer's own step, a part of its parameters at a time, with what each part needs fetched and let go again.

Contract: every parameter is updated once, by the optimizer's own code, with the options of its group; hooks of the step
run once around all parts, a closure once before them. Only optimizers that were tried are taken as updating each
parameter by its own gradient and state alone. Parts that are needed come before those that only might be fetched ahead;
what is let go is let go at the same places of every step.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from stalloc.errors import BadInputError
from stalloc.techniques.gradient_access import has_gradient
from stalloc.techniques.transfers import phase

_KNOWN = {
    "torch.optim": ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam",
                    "RMSprop", "Rprop", "SGD"),
    "transformers.optimization": ("Adafactor",),
}  # fmt: skip
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Parameters = list[torch.Tensor]
_dispatched: set[type] = set()
_divided: "weakref.WeakKeyDictionary[Any, DividedStep]" = weakref.WeakKeyDictionary()


def parameters_of(optimizer: Any) -> Parameters:
    """The parameters of an optimizer, in the order of its groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def own_step(kind: type) -> Callable[..., Any]:
    """The step of a class of optimizers, without the wrapper that calls its hooks."""
    step: Any = getattr(kind.step, "stalloc_own", kind.step)  # type: ignore[attr-defined]
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


def why_not_one_by_one(optimizer: Any) -> str:
    """Why the parameters of an optimizer cannot be updated one by one; empty if they can."""
    kind = type(optimizer)
    found = [getattr(sys.modules.get(module), name, None) for module, names in _KNOWN.items() for name in names]
    if not any(own_step(kind) is own_step(one) for one in found if isinstance(one, type)):
        return f"{kind.__name__} is not known to update each parameter by its own gradient and state alone"
    for group in optimizer.param_groups:
        for option in ("differentiable", "capturable"):
            if group.get(option):
                return f"{kind.__name__} was made with {option}=True"
        if isinstance(group.get("lr"), torch.Tensor):
            return f"the learning rate of {kind.__name__} is a tensor"
        precision = group.get("eps")
        if isinstance(precision, tuple) and precision[0] is None and len({one.dtype for one in group["params"]}) > 1:
            return f"{kind.__name__} takes the precision of one of its parameters for a whole group, which has several"
        strange = [type(one).__name__ for one in group["params"] if type(one) not in _PLAIN]
        if strange:
            return f"{kind.__name__} updates a {strange[0]}, a kind of tensor that was not tried"
    return ""


class Tier(Protocol):
    """Brings what an update of some parameters needs to the device, and takes it away again."""

    def bytes_of(self, part: Parameters) -> int:
        """The bytes that `fetch` would put on the device."""

    def fetch(self, part: Parameters) -> Callable[[], None]:
        """Begin to bring it; returns a function that makes the program's stream wait for it."""

    def store(self, part: Parameters) -> tuple[int, Callable[[], None]]:
        """Begin to take it away after an update; its bytes, and a function that waits for that and frees the memory."""


class DividedStep:
    """The step of one optimizer, in parts; at most `window_bytes` of them on the device where that is possible."""

    def __init__(
        self,
        optimizer: Any,
        tiers: Sequence[Tier],
        divide: Callable[[Any], list[Parameters]],
        window_bytes: int,
        during: Callable[[Any], AbstractContextManager[None]],
        stand_ins: Callable[[Any, Parameters], AbstractContextManager[Parameters]],
    ) -> None:
        """`divide` gives the parts of an optimizer's parameters, `during` is entered for each of its steps.

        `stand_ins` gives what is updated in place of a part, in its order, while it is updated.

        Raises BadInputError if something else stands before the optimizer's step already.
        """
        if "step" in vars(optimizer) and type(optimizer) not in _dispatched:
            raise BadInputError(
                f"the step of this {type(optimizer).__name__} has been wrapped, by a scheduler perhaps: page it before."
            )
        self.tiers = list(tiers)
        self.window_bytes = window_bytes
        self._divide, self._during, self._stand_ins = divide, during, stand_ins
        _let_dispatch(type(optimizer))
        _divided[optimizer] = self

    def step(self, optimizer: Any, closure: Any = None) -> Any:
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

        def update(part: Parameters) -> None:
            optimizer.param_groups = groups
            with self._stand_ins(optimizer, part) as present:
                optimizer.param_groups = []
                for number, group in enumerate(groups):
                    group["params"] = [it for one, it in zip(part, present, strict=True) if group_of[id(one)] == number]
                    if group["params"]:
                        optimizer.param_groups.append(group)
                own(optimizer)

        with self._during(optimizer):
            flight = _Flight(self.tiers, self.window_bytes)
            try:
                for number, part in enumerate(parts):
                    with phase(f"update/{number}"):
                        flight.fetch(number, part)
                    if number + 1 < len(parts):
                        with phase(f"update/{number + 1}"):
                            flight.fetch_ahead(number + 1, parts[number + 1])
                    with phase(f"update/{number}"):
                        flight.wait(number)
                        update(part)
                        flight.store(number, part)
            finally:
                flight.land()
                optimizer.param_groups = groups
                for group, params in zip(groups, members, strict=True):
                    group["params"] = params
        return loss

    def undo(self, optimizer: Any) -> None:
        """Let the optimizer step as it did."""
        if _divided.get(optimizer) is self:
            del _divided[optimizer]


class _Flight:
    """What is on its way during a step. Invariant: `_bytes` is the sum of what was fetched and not freed."""

    def __init__(self, tiers: list[Tier], window_bytes: int) -> None:
        self._tiers, self._window_bytes, self._bytes = tiers, window_bytes, 0
        self._arriving: dict[int, tuple[int, list[Callable[[], None]]]] = {}
        self._leaving: deque[tuple[int, list[Callable[[], None]]]] = deque()

    def fetch(self, number: int, part: Parameters) -> None:
        """Begin to bring a part unless it is there already; parts on their way out make room first."""
        is_there = number in self._arriving
        size_bytes = 0 if is_there else sum(tier.bytes_of(part) for tier in self._tiers)
        while self._leaving and self._bytes + size_bytes > self._window_bytes:
            self._let_go()
        if not is_there:
            self._begin(number, part, size_bytes)

    def fetch_ahead(self, number: int, part: Parameters) -> None:
        """Begin to bring a part if there is room while the part that left last is still going, during an update."""
        size_bytes = sum(tier.bytes_of(part) for tier in self._tiers)
        while len(self._leaving) > 1 and self._bytes + size_bytes > self._window_bytes:
            self._let_go()
        if self._bytes + size_bytes <= self._window_bytes:
            self._begin(number, part, size_bytes)

    def wait(self, number: int) -> None:
        """Make the program's stream wait until a part is there."""
        for arrived in self._arriving[number][1]:
            arrived()

    def store(self, number: int, part: Parameters) -> None:
        """Begin to take away a part that was updated."""
        fetched_bytes, _ = self._arriving.pop(number)
        stored = [tier.store(part) for tier in self._tiers]
        size_bytes = sum(size for size, _ in stored)
        self._bytes += size_bytes - fetched_bytes  # more, where the update made it
        self._leaving.append((size_bytes, [let_go for _, let_go in stored]))

    def land(self) -> None:
        """Wait for everything that leaves and, after an error, for everything that arrives."""
        while self._leaving:
            self._let_go()
        for number in self._arriving:
            self.wait(number)

    def _begin(self, number: int, part: Parameters, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._arriving[number] = size_bytes, [tier.fetch(part) for tier in self._tiers]

    def _let_go(self) -> None:
        size_bytes, waits = self._leaving.popleft()
        for let_go in waits:
            let_go()
        self._bytes -= size_bytes


def is_divided(optimizer: Any) -> bool:
    """Whether the step of an optimizer is made in parts."""
    return optimizer in _divided


def _let_dispatch(kind: type) -> None:
    """Make the class of an optimizer check, for each of its optimizers, whether that one's step is divided."""
    if kind in _dispatched:
        return
    own = own_step(kind)

    def step(self: Any, closure: Any = None) -> Any:
        divided = _divided.get(self)
        if divided is None:
            return own(self) if closure is None else own(self, closure)
        return divided.step(self, closure)

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked, hooked.stalloc_own = True, own
    kind.step = hooked  # type: ignore[attr-defined]
    _dispatched.add(kind)
