"""Which of a program's optimizers marks its steps.

Many programs step several: of a generator and of a discriminator, one for matrices and one for the rest, one for each
parameter. What lies between two steps of different optimizers is a part of the program's step; what one part leaves to
the next has a better place in a plan of the whole. Contract: on each device one optimizer of each thread leads, the
first that steps, and its steps are those of the program. Another one leads once it has made a second step while the
leader made none, or has gone.
"""

import threading
import weakref
from collections.abc import Collection
from typing import Any


class LeadingOptimizers(threading.local):
    """The leaders of this thread's devices."""

    def __init__(self) -> None:
        self._leaders: dict[int, weakref.ref[Any]] = {}
        self._stepped: dict[int, weakref.WeakSet[Any]] = {}  # since the leader did

    def devices_led(self, optimizer: Any, devices: Collection[int]) -> set[int]:
        """An optimizer has made a step on devices: those on which that is a step of the program."""
        return {device for device in devices if self._leads(optimizer, device)}

    def _leads(self, optimizer: Any, device: int) -> bool:
        leader = self._leaders.get(device, lambda: None)()
        stepped = self._stepped.setdefault(device, weakref.WeakSet())
        if leader is not None and leader is not optimizer and optimizer not in stepped:
            stepped.add(optimizer)
            return False
        stepped.clear()
        if leader is not optimizer:
            self._leaders[device] = weakref.ref(optimizer)
        return True
