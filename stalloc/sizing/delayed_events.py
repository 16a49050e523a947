"""What the order in which work is done decides: how much blocks of several streams (torch's record_stream) take, and
whether a program fits.

Contract: on the virtual GPU all work is done at once. A program whose streams share blocks is run again with work done
only when the host waits for it, when a GPU may hold most, and, if that is more, on the timeline that stalloc.cost
estimates. If the most is more than is offered, the program is also run with what is offered.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from stalloc.device.known_gpus import Completion
from stalloc.sizing.side_by_side import Asked, RunSeen

_SHOWN = {"active_peak_bytes": "live_peak_bytes", "reserved_peak_bytes": "taken_bytes"}
_HOW = {"at-waits": "nothing done before the host waits", "timeline": "on the timeline", "at-once": "all done at once"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run with the memory that is offered."""

    fits: bool
    num_retries: int
    """How often PyTorch waited for all that it had cached, gave it up, and asked again."""


class Otherwise:
    """The outcomes of runs whose work is done in another order, and how many there were."""

    def __init__(self, run: Callable[[Sequence[Asked]], list[RunSeen]]) -> None:
        self._run, self.num_runs = run, 0

    def findings_of(self, asked: Asked, seen: RunSeen) -> dict[str, Any]:
        """What a run without a limit could not know."""
        found = dict(seen.findings)
        if found.pop("shares_blocks", False):
            most = _peaks(self._seen(asked, "at-waits"))
            takes_more = most != _peaks(seen)
            found["shared_blocks"] = {**most, "timeline": _peaks(self._seen(asked, "timeline"))} if takes_more else None
        return found

    def decides(self, name: str, asked: Asked, seen: RunSeen | None) -> dict[str, Any] | None:
        """What another order of work does to a run that fits if work is done at once; None: nothing.

        `seen`: what came of it with the memory that is offered, if it was made.
        """
        best, worst = _outcome(seen or self._seen(asked, "at-once")), _outcome(self._seen(asked, "at-waits"))
        if not best.fits or (worst.fits and worst.num_retries <= best.num_retries):
            return None
        told = {"at_once": best, "timeline": _outcome(self._seen(asked, "timeline")), "at_waits": worst}
        return {"allocator": name, **{key: dataclasses.asdict(one) for key, one in told.items()}}

    def _seen(self, asked: Asked, how: Completion) -> RunSeen:
        work = dataclasses.replace(asked.work, keep_history=False, completion=how)
        (seen,) = self._run([dataclasses.replace(asked, work=work, name=f"{asked.name}, {_HOW[how]}")])
        self.num_runs += 1
        return seen


def _peaks(seen: RunSeen) -> dict[str, int]:
    return {shown: max((one.get(key, 0) for one in seen.devices), default=0) for key, shown in _SHOWN.items()}


def _outcome(seen: RunSeen) -> Outcome:
    return Outcome(fits=seen.completes, num_retries=sum(one.get("num_alloc_retries", 0) for one in seen.devices))
