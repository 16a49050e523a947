"""What is known of a program at each value of a parameter, and the runs that make it known.

Contract: a value fits under an allocator if a run with no more memory than is offered completes; for settings of
PyTorch's that the replay knows exactly, if the replay of a run without a limit does; if both are known, the run counts.
"needed" stands for any allocator: what is live at a time is not more than is offered.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stalloc.device import VirtualGPU
from stalloc.device.known_gpus import PLENTY
from stalloc.errors import BadInputError
from stalloc.lifespans import lower_bound
from stalloc.replay.simulation import Candidate, run_one
from stalloc.sizing.delayed_events import Otherwise
from stalloc.sizing.run_work import RunWork
from stalloc.sizing.scaled_traces import ScaledTraces
from stalloc.sizing.side_by_side import Asked, RunSeen
from stalloc.trace import Trace

NEEDED = "needed"

Runner = Callable[[Sequence[Asked]], list[RunSeen]]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An allocator that the program is tried under."""

    name: str
    shown: str
    candidate: Candidate | None
    """The model and settings with which it is replayed; None if there is no such model."""
    is_exact: bool
    """Whether its replay is as exact as a run."""
    work: RunWork
    """How a program runs under it with the memory that is offered."""


class Wanted(NamedTuple):
    """Something to find out about a value under an allocator."""

    what: Literal["observe", "find out", "confirm", "fail"]
    """Run without a limit; know it the cheapest way; run with what is offered; the same, to see where it runs out."""
    name: str
    at: int
    """Index of the value."""


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
        self._scaled = ScaledTraces()
        self.num_runs = 0

    def label(self, index: int) -> str:
        """A value as people read it."""
        return self._label(self.values[index])

    def needed_bytes(self, index: int) -> int | None:
        """The most bytes live at a time, on the device with most; None if that is not known."""
        seen = self.observed.get(index)
        if seen is None or not seen.completes or any(device.get("cupy_bytes") for device in seen.devices):
            return None
        if seen.traces:
            if index not in self._needed:
                self._needed[index] = max(lower_bound(trace) for trace in seen.traces)
            return self._needed[index]
        return max((device["allocated_peak_bytes"] for device in seen.devices), default=0)

    def fits(self, name: str, index: int) -> bool | None:
        """Whether a value fits; None if it is not known."""
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
        if seen is None or not self._is_replayable(name, seen):
            return None
        if (name, index) not in self._replayed:
            self._replayed[name, index] = self._fits_replayed(name, seen.traces)
        return self._replayed[name, index]

    def _is_replayable(self, name: str, seen: RunSeen) -> bool:
        return bool(seen.traces) and self.contenders[name].is_exact

    def _fits_replayed(self, name: str, traces: Sequence[Trace]) -> bool:
        candidate = self.contenders[name].candidate
        assert candidate is not None
        return all(run_one(trace, candidate, self.offered_bytes).fits for trace in traces)

    def reserved_bytes(self, name: str, index: int) -> int | None:
        """The bytes that an allocator reserves with the memory offered, by replay; None if that is not known."""
        seen, candidate = self.observed.get(index), self.contenders[name].candidate
        if seen is None or candidate is None or not self._is_replayable(name, seen):
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
        """Find out what is not known yet, in runs side by side."""
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
                found["order_decides"] = self._order_decides(answers, otherwise)
        self.num_runs += otherwise.num_runs
        return found

    def _order_decides(self, answers: Mapping[str, int], otherwise: Otherwise) -> list[dict[str, Any]]:
        found = []
        for name, index in answers.items():
            if index >= 0 and self.fits(name, index):
                told = otherwise.decides(name, self._limited(name, index), self.limited.get((name, index)))
                found += [{**told, "of": self.label(index)}] if told is not None else []
        return found


def known_to_replay(candidate: Candidate) -> bool:
    """Whether there is a model with these settings."""
    from stalloc.replay.registry import make

    try:
        make(candidate.allocator, candidate.settings, 0)
    except BadInputError:
        return False
    return True
