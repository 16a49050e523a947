"""How long planning may go on: a budget of seconds, a request to stop, and what is told on the way.

Contract: whoever searches asks `over()` between pieces of work that each take well under a second, and ends with the
best found so far once it is true. Without a budget nothing here depends on the clock.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """A packing of some of the requests that is better than those before."""

    num_requests: int
    peak_bytes: int
    bound_bytes: int  #: no packing of them is lower
    method: str


@dataclass
class Budget:
    """The limits of one call."""

    seconds: float | None = None  #: None: until the usual effort is spent
    stop: threading.Event = field(default_factory=threading.Event)  #: set it to end the search
    progress: Callable[[Progress], None] | None = None
    seed: int = 0
    method: str = "auto"  #: one of methods.METHODS
    aim_bytes: int = 0  #: a peak of at most this will do
    began: float = field(default_factory=time.monotonic)
    interrupted: str = ""  #: what cut the search short, if anything did

    @property
    def patient(self) -> bool:
        """Whether to go on beyond the usual effort."""
        return self.seconds is not None


_NO_LIMITS = Budget()
_CURRENT: ContextVar[Budget | None] = ContextVar("stalloc_planning_budget", default=None)


@contextmanager
def budgeted(budget: Budget) -> Iterator[Budget]:
    """Plan within `budget` until the block ends."""
    token = _CURRENT.set(budget)
    try:
        yield budget
    finally:
        _CURRENT.reset(token)


def current() -> Budget:
    """The budget in force; one without limits if nobody set any."""
    return _CURRENT.get() or _NO_LIMITS


def over() -> bool:
    """Whether to end with what there is. Says so in the budget, for the plan to be marked."""
    budget = current()
    if budget.stop.is_set():
        budget.interrupted = budget.interrupted or "Ctrl-C"
    elif budget.seconds is not None and time.monotonic() - budget.began >= budget.seconds:
        budget.interrupted = budget.interrupted or "time budget"
    return bool(budget.interrupted)


def tell(num_requests: int, peak_bytes: int, bound_bytes: int, method: str) -> None:
    """Tell whoever listens of a better packing."""
    budget = current()
    if budget.progress is not None:
        budget.progress(Progress(num_requests, peak_bytes, bound_bytes, method))
