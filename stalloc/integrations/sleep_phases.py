"""The phases of a program that sleeps on the virtual GPU: from each sleep or wake to the next, what it takes.

Contract: the program does not notice; only the virtual GPU's own peak begins anew with each phase. Phases that begin in
the same way, with the same tags asleep, are one, of which the most of each figure is kept.
"""

from dataclasses import asdict, dataclass
from typing import Any

from stalloc.device import virtual


@dataclass
class Phase:
    """From a sleep or a wake to the next; bytes of the device that holds most."""

    begins: str  #: "start", or as in "sleep kv"
    asleep: dict[str, int]  #: bytes that are not on the device, by tag
    num_times: int = 1
    allocated_peak_bytes: int | None = None  #: without what sleeps; None where the allocator keeps no peak of a phase
    held_peak_bytes: int = 0  #: of all that the device gave, to whomever


@dataclass(frozen=True)
class RanOut:
    """Where memory ran out last."""

    phase: str  #: how the phase began
    waking: str | None  #: the tags that were to wake; None: it was a request
    at: str  #: the line of the program
    wanted_bytes: int
    free_bytes: int  #: on the device
    could_sleep: dict[str, int]  #: what would go back to the device, by each tag that is awake
    cached_bytes: int = 0  #: what PyTorch's own allocator holds and does not use


class SleepPhases:
    """The phases of this process so far, in the order in which they were first."""

    def __init__(self) -> None:
        self._now = Phase("start", {})
        self._phases = [self._now]
        self._ran_out: RanOut | None = None

    def end(self, allocated_peak_bytes: int | None) -> None:
        """Something is about to sleep or to wake; with the peak of what was allocated and awake meanwhile."""
        now = self._now
        now.held_peak_bytes = max([now.held_peak_bytes, *map(virtual.peak_bytes, _devices())])
        if allocated_peak_bytes is not None:
            now.allocated_peak_bytes = max(now.allocated_peak_bytes or 0, allocated_peak_bytes)

    def begin(self, begins: str, asleep: dict[str, int]) -> None:
        """It does: `asleep` are the bytes that the device has back now, by tag."""
        alike = [one for one in self._phases if one.begins == begins and one.asleep.keys() == asleep.keys()]
        if alike:
            self._now = alike[0]
            self._now.num_times += 1
            self._now.asleep = {name: max(size, self._now.asleep[name]) for name, size in asleep.items()}
        else:
            self._now = Phase(begins, asleep)
            self._phases.append(self._now)
        _restart_peaks()

    def refused(self, **what: Any) -> None:
        """There was no memory for a request or to wake; `what`: the fields of `RanOut` without the phase."""
        self._ran_out = RanOut(phase=self._now.begins, **what)
        _restart_peaks()  # what a wake had mapped before it failed is not of the phase

    def told(self, *, failed: bool) -> dict[str, Any] | None:
        """As JSON has it, after a last `end`: the phases, and where a program that failed ran out; None without any."""
        ran_out = self._ran_out if failed else None
        if len(self._phases) == 1 and ran_out is None:
            return None
        return {
            "phases": [asdict(one) for one in self._phases],
            "ended_in": self._now.begins,
            "ran_out": asdict(ran_out) if ran_out is not None else None,
        }


def _devices() -> range:
    gpu = virtual.active_gpu()
    return range(gpu.num_devices if gpu is not None else 0)


def _restart_peaks() -> None:
    for device in _devices():
        virtual.restart_peak(device)
