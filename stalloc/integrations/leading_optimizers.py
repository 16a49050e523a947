"""Which of a program's optimizers marks its steps.

Many programs step several: of a generator and of a discriminator, one for matrices and one for the rest, one for each
parameter. What lies between two steps of different optimizers is a part of the program's step; what one part leaves to
the next has a better place in a plan of the whole. Contract: on each device one optimizer of each thread leads, the
first that steps, and its steps are those of the program. Another one leads once it has made a second step while the
leader made none, or has gone; or, from its next step on, if it steps right after the leader, so that no step of the
program begins with what another one's batch has left to do.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from stalloc.core.constants import LITTLE


class LeadingOptimizers(threading.local):
    def __init__(self, requested_bytes: Callable[[int], int] = lambda device: 0) -> None:
        """`requested_bytes` says how many bytes a device's program has asked for so far: for `begin_step`."""
        self._leaders: dict[int, weakref.ref[Any]] = {}
        self._stepped: dict[int, weakref.WeakSet[Any]] = {}  # since the leader did
        self._requested_bytes = requested_bytes
        self._led_at: dict[int, int] = {}  # bytes that had been asked for when the leader's step was over
        self._follows: set[int] = set()  # devices on which the step that was begun last comes right after the leader's

    def begin_step(self, optimizer: Any) -> None:
        """An optimizer is about to make a step; where this is not said, none steps right after the leader."""
        if all(leader() is optimizer for leader in self._leaders.values()):
            return  # itself
        now = self._requested_bytes
        self._follows = {device for device, then in self._led_at.items() if now(device) < then + LITTLE}

    def devices_led(self, optimizer: Any, devices: Collection[int]) -> set[int]:
        """An optimizer has made a step on devices: those on which that is a step of the program."""
        return {device for device in devices if self._leads(optimizer, device)}

    def _leads(self, optimizer: Any, device: int) -> bool:
        leader, takes_over = self._leaders.get(device, lambda: None)(), False
        if leader is not optimizer:
            stepped = self._stepped.setdefault(device, weakref.WeakSet())
            takes_over = leader is not None and device in self._follows
            if leader is not None and not takes_over and optimizer not in stepped:
                stepped.add(optimizer)
                return False
            self._leaders[device] = weakref.ref(optimizer)
        self._stepped.pop(device, None)
        self._led_at[device] = self._requested_bytes(device)
        return not takes_over


MOST_STEPS = 1 << 16  #: the last ones are kept


class StepTimes:
    """Steps of the leading optimizer from `begin` on, by wall time: a history of PyTorch's allocator knows of none."""

    def __init__(self) -> None:
        self._times_us: deque[int] = deque(maxlen=MOST_STEPS)
        self._hook: Any = None

    def begin(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.end()
        self._times_us.clear()
        leaders = LeadingOptimizers()

        def has_stepped(optimizer: Any, *_: Any) -> None:
            if leaders.devices_led(optimizer, [0]):
                self._times_us.append(time.time_ns() // 1000)

        self._hook = register_optimizer_step_post_hook(has_stepped)

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def add_to(self, snapshot: dict[str, Any]) -> None:
        """Write the steps into a snapshot as torch.profiler's are, unless its schedule has marked steps itself."""
        noted = snapshot.setdefault("external_annotations", [])
        if not any(str(note.get("name", "")).startswith("ProfilerStep#") for note in noted):
            noted += [
                {"name": f"ProfilerStep#{number}", "stage": "START", "time_us": time_us}
                for number, time_us in enumerate(self._times_us)
            ]
