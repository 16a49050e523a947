"""What the order in which work is done decides: how much blocks of several streams (torch's record_stream) take, and
whether a program fits.

Contract: on the virtual GPU all work is done at once. A program whose streams share blocks is run again with work done
only when the host waits for it, when a GPU may hold most, and, if that is more, on the timeline that stalloc.cost
estimates. If the most is more than is offered, the program is also run with what is offered.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from stalloc.device.completion import Completion
from stalloc.sizing.side_by_side import Asked, RunSeen

_SHOWN = {"active_peak_bytes": "live_peak_bytes", "reserved_peak_bytes": "taken_bytes"}
_HOW = {"at-waits": "nothing done before the host waits", "timeline": "on the timeline", "at-once": "all done at once"}

Devices = list[dict[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run with the memory that is offered."""

    fits: bool
    num_retries: int
    """How often PyTorch waited for all that it had cached, gave it up, and asked again."""


def shared_blocks(seen: Devices, measure: Callable[[Completion], Devices]) -> dict[str, Any] | None:
    """What delayed events cost, from the devices of a run and of runs with another order; None if nothing."""
    most = _peaks(measure("at-waits"))
    return None if most == _peaks(seen) else {**most, "timeline": _peaks(measure("timeline"))}


def _peaks(devices: Devices) -> dict[str, int]:
    return {shown: max((one.get(key, 0) for one in devices), default=0) for key, shown in _SHOWN.items()}


def what_order_decides(name: str, outcome: Callable[[Completion], Outcome]) -> dict[str, Any] | None:
    """What another order does to an allocator under which the program fits if work is done at once; None: nothing."""
    best, worst = outcome("at-once"), outcome("at-waits")
    if not best.fits or (worst.fits and worst.num_retries <= best.num_retries):
        return None
    told = {"at_once": best, "timeline": outcome("timeline"), "at_waits": worst}
    return {"allocator": name, **{key: dataclasses.asdict(one) for key, one in told.items()}}


def outcome_of(fits: bool, devices: Devices) -> Outcome:
    """The outcome of a run: whether it fits, and its allocation retries on all its devices."""
    return Outcome(fits=fits, num_retries=sum(one.get("num_alloc_retries", 0) for one in devices))


class Otherwise:
    """The outcomes of runs whose work is done in another order, and how many there were."""

    def __init__(self, run: Callable[[Sequence[Asked]], list[RunSeen]]) -> None:
        self._run, self.num_runs = run, 0

    def findings_of(self, asked: Asked, seen: RunSeen) -> dict[str, Any]:
        """What a run without a limit could not know."""
        found = dict(seen.findings)
        if found.pop("shares_blocks", False):
            found["shared_blocks"] = shared_blocks(seen.devices, lambda how: self._seen(asked, how).devices)
        return found

    def decides(self, name: str, asked: Asked, seen: RunSeen | None) -> dict[str, Any] | None:
        """What the order of work decides about a run with the memory offered; `seen`: its outcome, if it was made."""

        def outcome(how: Completion) -> Outcome:
            one = seen if seen is not None and how == "at-once" else self._seen(asked, how)
            return outcome_of(one.completes, one.devices)

        return what_order_decides(name, outcome)

    def _seen(self, asked: Asked, how: Completion) -> RunSeen:
        work = dataclasses.replace(asked.work, keep_history=False, completion=how)
        (seen,) = self._run([dataclasses.replace(asked, work=work, name=f"{asked.name}, {_HOW[how]}")])
        self.num_runs += 1
        return seen
