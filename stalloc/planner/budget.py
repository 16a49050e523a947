"""How long planning may go on: a budget of seconds, a request to stop, and what is told on the way.

Contract: whoever searches asks `over()` between pieces of work that each take well under a second, and ends with the
best found so far once it is true. Without a budget nothing here depends on the clock.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stalloc.errors import BadInputError

#: the ways of planning that can be asked for by name: five, single orders, and the groups of groups.py
METHODS = (
    *("auto", "greedy", "search", "colouring", "annealing"),
    *("size", "area", "lifetime", "birth", "death", "homophase", "homosize"),
)


def check_method(method: str) -> None:
    """Raise BadInputError if there is no such method."""
    if method not in METHODS:
        raise BadInputError(f"method is {method!r}: give one of {', '.join(METHODS)}.")


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
    method: str = "auto"  #: one of METHODS
    aim_bytes: int = 0  #: a peak of at most this will do
    graph: bool = False  #: there is time to begin with the lifespan graph (networkx) where the quickest tries fail
    num_restarts: int = 60  #: orders with noise that are tried at most, where something is fixed or forbidden
    began: float = field(default_factory=time.monotonic)
    interrupted: str = ""  #: what cut the search short, if anything did

    @property
    def patient(self) -> bool:
        """Whether to go on beyond the usual effort."""
        return self.seconds is not None

    def over(self) -> bool:
        """Whether to end with what there is; what cut the search short is then in `interrupted`."""
        if self.stop.is_set():
            self.interrupted = self.interrupted or "Ctrl-C"
        elif self.seconds is not None and time.monotonic() - self.began >= self.seconds:
            self.interrupted = self.interrupted or "time budget"
        return bool(self.interrupted)

    def tell(self, num_requests: int, peak_bytes: int, bound_bytes: int, method: str) -> None:
        """Tell whoever listens of a better packing."""
        if self.progress is not None:
            self.progress(Progress(num_requests, peak_bytes, bound_bytes, method))
