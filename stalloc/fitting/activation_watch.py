"""Watching what a run saves for backward: moments, and in which requests it lies.

Contract: a note costs no memory of the device and changes nothing. The clock is the number of events in the record of
the runtime, or estimated seconds since a step began.
"""

from collections.abc import Callable
from typing import Any

from stalloc.cost.gpu_rates import GpuRates
from stalloc.fitting.foreseen_activations import ActivationsRecorded, Kind, as_rows
from stalloc.fitting.observer import Timing


class ActivationWatch:
    """A `Watcher` that records what becomes of activations, and when by its clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Forget what was seen."""
        self._events: list[tuple[float, int, int]] = []
        self._number: dict[int, int] = {}  # of each activation, in the order of the record
        self._sizes: list[int] = []
        self._saved_at: list[tuple[int, int]] = []  # address, moment
        self._back_at: list[tuple[int, int]] = []  # address and moment when it was first needed; 0: never

    def saved(self, number: int, storage: Any) -> None:
        """See `Watcher`."""
        self._number[number] = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._saved_at.append((storage.data_ptr(), int(self._clock())))
        self._back_at.append((0, 0))
        self._note(Kind.SAVED, number)

    def needed(self, number: int, storage: Any) -> None:
        """See `Watcher`."""
        if number in self._number:
            row = self._number[number]
            if not self._back_at[row][0]:
                self._back_at[row] = storage.data_ptr(), int(self._clock())
            self._note(Kind.NEEDED, number)

    def gone(self, number: int) -> None:
        """See `Watcher`."""
        if number in self._number:
            self._note(Kind.GONE, number)

    def _note(self, kind: Kind, number: int) -> None:
        self._events.append((self._clock(), int(kind), self._number[number]))

    def seen(self, request: Callable[[int, int], int] = lambda *_: -1) -> ActivationsRecorded:
        """What was seen; `request` gives the row of what lies at an address at a moment."""
        held = [request(*one) for one in self._saved_at]
        back = [request(*one) if one[0] else -1 for one in self._back_at]
        returns = [-1 if one == other else other for one, other in zip(held, back, strict=True)]
        return ActivationsRecorded(list(self._events), list(self._sizes), held, returns)


class TimedStep:
    """Estimates when activations are saved and needed in the second step, in seconds since it began."""

    def __init__(self, rates: GpuRates) -> None:
        self._rates, self._seconds, self._num_steps = rates, 0.0, 0
        self.watch = ActivationWatch(lambda: self._seconds)
        self._mode = Timing(rates, self._took)
        self._seen: dict[str, Any] = {}

    def step_ended(self) -> None:
        """Note that the optimizer has made a step."""
        self._num_steps += 1
        if self._num_steps == 1:
            self.watch.begin()
            self._seconds = 0.0
            self._mode.__enter__()
        elif self._num_steps == 2:
            self._mode.__exit__(None, None, None)
            self._seen = {"activations": as_rows(self.watch.seen()), "step_seconds": self._seconds}

    def seen(self) -> dict[str, Any]:
        """The activations of the step, and how long it takes."""
        return self._seen

    def _took(self, seconds: float, *_: Any) -> None:
        self._seconds += seconds
