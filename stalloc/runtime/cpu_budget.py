"""What it costs a program that plans are looked for, made and put in force: held to a share of its processor time.

Contract: the time of all threads counts, compiling apart. It is a share of the program's, by default 1 %, and in
advance one second before the first plan, after it the share of 1,000 steps or 0.3 s. What is under way when that is
spent comes to its end.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stalloc.compiled import compile_time
from stalloc.runtime import decisions

if TYPE_CHECKING:
    from stalloc.runtime.steady_marks import SteadySteps


class CpuBudget:
    """The processor time that planning for one device's program took, and what it may still take."""

    def __init__(self, share: float) -> None:
        """`share`: what comes in, of the program's time; as much is there to begin with, for 1,000 steps."""
        self._share, self._spent_ns = share, 0
        self._began_ns = self._planned_ns = time.process_time_ns()
        self._has_plan = False
        self._num_steps = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        began, compiled = time.thread_time_ns(), compile_time().processor_ns
        try:
            yield
        finally:
            self._spent_ns += time.thread_time_ns() - began - (compile_time().processor_ns - compiled)

    def note_step(self) -> None:
        if self._num_steps == 0:
            self._began_ns = time.process_time_ns()
        self._num_steps += 1

    def skip(self, steps: "SteadySteps") -> None:
        self._num_steps += steps.count

    def note_plan(self) -> None:
        """A plan is in force; the first ends what is spent before it."""
        if not self._has_plan:
            self._has_plan, self._spent_ns, self._planned_ns = True, 0, time.process_time_ns()

    @property
    def left_seconds(self) -> float:
        """What may be spent now; below 0 if more was."""
        now = time.process_time_ns()
        step_seconds = (now - self._began_ns) / 1e9 / max(1, self._num_steps - 1)
        since_seconds = (now - self._planned_ns) / 1e9
        return decisions.seconds_left(
            self._share, step_seconds, since_seconds, self._spent_ns / 1e9, has_plan=self._has_plan
        )

    @property
    def is_spent(self) -> bool:
        return self.left_seconds < 0
