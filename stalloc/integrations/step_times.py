"""When the program's optimizers stepped, for a history of PyTorch's allocator, which knows nothing of steps."""

import time
from collections import deque
from typing import Any

from stalloc.integrations.leading_optimizers import LeadingOptimizers

MOST_STEPS = 1 << 16  #: the last ones are kept


class StepTimes:
    """Steps of the leading optimizer from `begin` on, by wall time."""

    def __init__(self) -> None:
        self._times_us: deque[int] = deque(maxlen=MOST_STEPS)
        self._hook: Any = None

    def begin(self) -> None:
        """Note steps; PyTorch is imported."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.end()
        self._times_us.clear()
        leaders = LeadingOptimizers()

        def has_stepped(optimizer: Any, *_: Any) -> None:
            if leaders.devices_led(optimizer, [0]):
                self._times_us.append(time.time_ns() // 1000)

        self._hook = register_optimizer_step_post_hook(has_stepped)

    def end(self) -> None:
        """Note no more."""
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
