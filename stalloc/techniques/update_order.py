"""An optimizer's own step, a part of its parameters at a time, with what each part needs fetched and let go again.

Contract: every parameter is updated once, by the optimizer's own code, with the options of its group; hooks of the step
run once around all parts, a closure once before them. Parts that are needed come before those that only might be
fetched ahead; what is let go is let go at the same places of every step.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from stalloc.errors import BadInputError
from stalloc.techniques.gradient_access import has_gradient
from stalloc.techniques.optimizer_facts import own_step
from stalloc.techniques.transfers import phase

Parameters = list[torch.Tensor]
_dispatched: set[type] = set()
_divided: "weakref.WeakKeyDictionary[Any, DividedStep]" = weakref.WeakKeyDictionary()


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
        """Take the place of the optimizer's own step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = optimizer.param_groups
        members = [group["params"] for group in groups]
        parts = [part for part in (_with_gradients(one) for one in self._divide(optimizer)) if part]
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


def _with_gradients(part: Parameters) -> Parameters:
    return [one for one in part if has_gradient(one)]


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
