"""What is known of a program at each value of a parameter, and the runs that make it known.

Contract: a value fits under an allocator if a run with no more memory than is offered completes; for settings of
PyTorch's that the replay knows exactly, if the replay of a run without a limit does; if both are known, the run counts.
"needed" stands for any allocator: what is live at a time is not more than is offered.

On the virtual GPU all work is done at once. A program whose streams share blocks (torch's record_stream) is run again
with work done only when the host waits for it, when a GPU may hold most, and, if that is more, on the timeline that
stalloc.cost estimates. If the most is more than is offered, the program is also run with what is offered.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from stalloc.device import VirtualGPU
from stalloc.device.completion import Completion
from stalloc.device.known_gpus import PLENTY
from stalloc.errors import BadInputError
from stalloc.lifespans import lower_bound
from stalloc.replay.simulation import Candidate, run_one
from stalloc.sizing.side_by_side import Asked, RunSeen, RunWork
from stalloc.trace import Trace

NEEDED = "needed"

Runner = Callable[[Sequence[Asked]], list[RunSeen]]

_SHOWN = {"active_peak_bytes": "live_peak_bytes", "reserved_peak_bytes": "taken_bytes"}
_HOW = {"at-waits": "nothing done before the host waits", "timeline": "on the timeline", "at-once": "all done at once"}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An allocator that the program is tried under."""

    name: str
    shown: str
    candidate: Candidate | None  #: the model and settings with which it is replayed; None if there is no such model
    is_exact: bool  #: whether its replay is as exact as a run
    work: RunWork  #: how a program runs under it with the memory that is offered


class Wanted(NamedTuple):
    """Something to find out about a value under an allocator."""

    what: Literal["observe", "find out", "confirm", "fail"]
    """Run without a limit; know it the cheapest way; run with what is offered; the same, to see where it runs out."""
    name: str
    at: int  #: index of the value


class Otherwise:
    """The outcomes of runs whose work is done in another order, and how many there were."""

    def __init__(self, run: Runner) -> None:
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
        """What another order of work does to a run that fits if work is done at once; None: nothing. `seen`: what came
        of it with the memory that is offered, if it was made."""
        best, worst = _outcome(seen or self._seen(asked, "at-once")), _outcome(self._seen(asked, "at-waits"))
        if not best["fits"] or (worst["fits"] and worst["num_retries"] <= best["num_retries"]):
            return None
        timeline = _outcome(self._seen(asked, "timeline"))
        return {"allocator": name, "at_once": best, "timeline": timeline, "at_waits": worst}

    def _seen(self, asked: Asked, how: Completion) -> RunSeen:
        work = dataclasses.replace(asked.work, keep_history=False, completion=how)
        (seen,) = self._run([dataclasses.replace(asked, work=work, name=f"{asked.name}, {_HOW[how]}")])
        self.num_runs += 1
        return seen


def _peaks(seen: RunSeen) -> dict[str, int]:
    return {shown: max((one.get(key, 0) for one in seen.devices), default=0) for key, shown in _SHOWN.items()}


def _outcome(seen: RunSeen) -> dict[str, Any]:
    """Whether it fits, and how often PyTorch waited for all that it had cached, gave it up, and asked again."""
    return {"fits": seen.completes, "num_retries": sum(one.get("num_alloc_retries", 0) for one in seen.devices)}


class _ScaledTraces:
    """What a program would ask for at a value that it was not run with, guessed from runs with two other values. Most
    requests grow in proportion to a batch or a length, and two runs that make the same requests in the same order tell
    by how much each grows. Other pairs of runs tell nothing."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[Sequence[Trace], bytes]] = {}

    def add(self, value: int, traces: Sequence[Trace]) -> None:
        self._runs[value] = traces, _structure(traces)

    def at(self, value: int) -> list[Trace] | None:
        """The traces of a value, from the two nearest runs around it that are alike, else any two; None without any."""
        known = sorted(self._runs, key=lambda other: abs(other - value))
        alike = [pair for pair in itertools.combinations(known, 2) if self._runs[pair[0]][1] == self._runs[pair[1]][1]]
        if not alike:
            return None
        around = (sorted(pair) for pair in alike)
        low, high = min(around, key=lambda pair: (not pair[0] < value < pair[1], pair[1] - pair[0]))
        share = (value - low) / (high - low)
        pairs = zip(self._runs[low][0], self._runs[high][0], strict=True)
        sizes = ((one, one.size + (other.size - one.size) * share) for one, other in pairs)
        return [one.replace(size=np.maximum(np.rint(size).astype(np.int64), 1)) for one, size in sizes]


def _structure(traces: Sequence[Trace]) -> bytes:
    """A key that is equal for two runs which make the same requests in the same order, whatever their sizes."""
    made = hashlib.sha256()
    for trace in traces:
        kept = trace.event_request >= 0
        for column in (trace.action[kept], trace.event_request[kept], trace.stream):
            made.update(np.ascontiguousarray(column).tobytes() + b"|")
    return made.digest()


class Tries:
    """The values by their index, what was seen of each, and what follows."""

    def __init__(
        self,
        values: Sequence[int],
        command: Callable[[int], list[str]],
        label: Callable[[int], str],
        contenders: Sequence[Contender],
        offered_bytes: int,
        run: Runner,
    ) -> None:
        self.values, self._command, self._label = values, command, label
        self.contenders = {one.name: one for one in contenders}
        self.offered_bytes, self._run = offered_bytes, run
        self.observed: dict[int, RunSeen] = {}  #: runs without a limit, under PyTorch's own allocator
        self.limited: dict[tuple[str, int], RunSeen] = {}  #: runs with the memory that is offered
        self.failed: dict[tuple[str, int], RunSeen] = {}  #: runs that ran out of memory, repeated with names of holders
        self._replayed: dict[tuple[str, int], bool] = {}
        self._guessed: dict[tuple[str, int, int], bool | None] = {}
        self._needed: dict[int, int] = {}
        self._scaled = _ScaledTraces()
        self.num_runs = 0

    def label(self, index: int) -> str:
        return self._label(self.values[index])

    def needed_bytes(self, index: int) -> int | None:
        """The most bytes live at a time, on the device with most; None if that is not known."""
        seen = self.observed.get(index)
        if seen is None or not seen.completes or any(device.get("cupy_bytes") for device in seen.devices):
            return None
        if index in self._needed:
            return self._needed[index]
        return max((device["allocated_peak_bytes"] for device in seen.devices), default=0)

    def fits(self, name: str, index: int) -> bool | None:
        seen = self.observed.get(index)
        if seen is not None and not seen.completes:
            return False  # there is no such GPU
        needed = self.needed_bytes(index)
        if name == NEEDED or (needed is not None and needed > self.offered_bytes):
            return None if needed is None else needed <= self.offered_bytes
        limited = self.limited.get((name, index))
        if limited is not None:
            return limited.completes
        if (name, index) in self.failed:
            return self.failed[name, index].completes
        if seen is None or not (seen.traces and self.contenders[name].is_exact):
            return None
        if (name, index) not in self._replayed:
            self._replayed[name, index] = self._fits_replayed(name, seen.traces)
        return self._replayed[name, index]

    def _fits_replayed(self, name: str, traces: Sequence[Trace]) -> bool:
        candidate = self.contenders[name].candidate
        assert candidate is not None
        return all(run_one(trace, candidate, self.offered_bytes).fits for trace in traces)

    def reserved_bytes(self, name: str, index: int) -> int | None:
        """The bytes that an allocator reserves with the memory offered, by replay; None if that is not known."""
        seen, candidate = self.observed.get(index), self.contenders[name].candidate
        if seen is None or candidate is None or not (seen.traces and self.contenders[name].is_exact):
            return None
        return max(run_one(trace, candidate, self.offered_bytes).peak_reserved_bytes for trace in seen.traces)

    def guess(self, name: str, index: int) -> bool | None:
        """Whether a value that was not run would fit, by scaling two that were; None if nothing can be said."""
        key = name, index, len(self.observed)
        if key not in self._guessed:
            self._guessed[key] = self._guess(name, index)
        return self._guessed[key]

    def _guess(self, name: str, index: int) -> bool | None:
        candidate = None if name == NEEDED else self.contenders[name].candidate
        is_known = name == NEEDED or (candidate is not None and self.contenders[name].is_exact)
        traces = self._scaled.at(self.values[index]) if is_known else None
        if traces is None:
            return None
        if any(lower_bound(trace) > self.offered_bytes for trace in traces):
            return False
        return name == NEEDED or self._fits_replayed(name, traces)

    def do(self, wanted: Iterable[Wanted]) -> None:
        observe: dict[int, Asked] = {}
        limited: dict[tuple[str, int], Asked] = {}
        failing: dict[tuple[str, int], Asked] = {}
        for what, name, index in wanted:
            key = name, index
            by_replay = name == NEEDED or self.contenders[name].is_exact
            if what == "observe" or (what == "find out" and by_replay and index not in self.observed):
                if index not in self.observed:
                    observe[index] = self._asked(self._observing(), index, "without a limit")
            elif what == "fail" and key not in self.failed:
                failing[key] = self._limited(name, index, name_holders=True)
            elif what != "fail" and key not in self.limited:
                limited[key] = self._limited(name, index)
        limited = dict(reversed(limited.items()))  # stalloc's take longest
        asked = [*observe.values(), *limited.values(), *failing.values()]
        self.num_runs += len(asked)
        seen = iter(self._run(asked))
        for index in observe:
            self.observed[index] = one = next(seen)
            if one.traces:
                self._scaled.add(self.values[index], one.traces)
                self._needed[index] = max(lower_bound(trace) for trace in one.traces)
        self.limited |= {key: next(seen) for key in limited}
        self.failed |= {key: next(seen) for key in failing}

    def _limited(self, name: str, index: int, *, name_holders: bool = False) -> Asked:
        one = self.contenders[name]
        return self._asked(dataclasses.replace(one.work, name_holders=name_holders), index, one.shown)

    def _observing(self) -> RunWork:
        first = next(iter(self.contenders.values()))
        gpu: VirtualGPU = dataclasses.replace(first.work.gpu, total_bytes=PLENTY)
        return dataclasses.replace(first.work, gpu=gpu, keep_history=True)

    def _asked(self, work: RunWork, index: int, how: str) -> Asked:
        value = self.values[index]
        return Asked(command=self._command(value), work=work, name=f"{self._label(value)}, {how}")

    def findings(self, answers: Mapping[str, int]) -> dict[str, Any]:
        """What the runs could not know: of that without a limit which needs most, and of each allocator's answer."""
        if not self.observed:
            return {}
        at = max(self.observed, key=lambda index: (self.needed_bytes(index) or 0, index))
        otherwise = Otherwise(self._run)
        found = otherwise.findings_of(self._asked(self._observing(), at, "without a limit"), self.observed[at])
        if shared := found.get("shared_blocks"):
            shared["of"] = self.label(at)
            if shared["taken_bytes"] > self.offered_bytes:
                fitting = [(name, at) for name, at in answers.items() if at >= 0 and self.fits(name, at)]
                told = (
                    (otherwise.decides(name, self._limited(name, at), self.limited.get((name, at))), at)
                    for name, at in fitting
                )
                found["order_decides"] = [one | {"of": self.label(at)} for one, at in told if one is not None]
        self.num_runs += otherwise.num_runs
        return found


def known_to_replay(candidate: Candidate) -> bool:
    from stalloc.replay.registry import make

    try:
        make(candidate.allocator, candidate.settings, 0)
    except BadInputError:
        return False
    return True
