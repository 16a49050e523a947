"""A search for kinds of steps that recur, in a thread of its own, and the plans that come of it.

Contract: nothing that goes wrong in a search reaches the program; it ends with plans that were admitted, or with none.
"""

import hashlib
import itertools
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.arena_tape import ArenaTape
from stalloc.core.constants import TINY
from stalloc.core.host_memory import trim
from stalloc.runtime.effort import Effort
from stalloc.runtime.threads import start_thread

if TYPE_CHECKING:
    from stalloc.lifespans.units import StepKind
    from stalloc.planner import Layout, Plan
    from stalloc.runtime.tapes import Tapes
    from stalloc.trace import Trace
    from stalloc.trace.record import Column

_MAX_KINDS = 32  # that are planned together; those seen most often
_SECONDS_A_REQUEST = 20e-6  # of processor time, that planning takes


def name_of(size: "Column", stream: "Column") -> bytes:
    """A short name for the kind of step that asks for these sizes on these streams."""
    name = hashlib.blake2b(np.ascontiguousarray(size, np.int64).data, digest_size=16)
    name.update(np.ascontiguousarray(stream, np.int64).data)
    return name.digest()


def recurring_names(trace: "Trace") -> set[bytes]:
    """The names of the steps between a trace's marks that come twice."""
    rows = np.flatnonzero(trace.size > TINY)
    bounds = np.searchsorted(trace.start[rows], trace.mark_event).tolist()
    size, stream = trace.size[rows], trace.stream[rows]
    names = Counter(name_of(size[begin:end], stream[begin:end]) for begin, end in itertools.pairwise(bounds))
    return {name for name, count in names.items() if count > 1}


@dataclass
class KindSearch:
    """A search for kinds of steps, and their plans; `done` is set at its end, `admitted` is None if nothing is new."""

    known: "list[StepKind]"
    wanted: set[bytes]  # names of the kinds that are to be planned, the known ones too
    made: "dict[bytes, Layout]"
    effort: Effort  # what is left of it bounds how many kinds are planned that are not known; one at least
    done: threading.Event = field(default_factory=threading.Event)
    tapes: "Tapes | None" = None
    admitted: ArenaTape | None = None  # the plans, as they are served

    @property
    def served(self) -> ArenaTape:
        """The plans, as they are served; to be asked for when there are any."""
        assert self.admitted is not None
        return self.admitted

    @property
    def plan(self) -> "Plan":
        """What reports speak of."""
        assert self.tapes is not None
        return self.tapes.largest_plan

    @property
    def longest(self) -> int:
        """Requests of the longest kind of step."""
        assert self.tapes is not None
        return max(len(kind.size) for kind in self.tapes.kinds)

    def start(self, trace: "Trace") -> None:
        """Begin, in a thread."""
        start_thread(self._run, trace)

    def _run(self, trace: "Trace") -> None:
        try:
            with self.effort.counted():
                self.search(trace)
        except Exception:  # these kinds are not planned then; the program must not see it
            self.admitted = None
        finally:
            self.done.set()
            trim()

    def search(self, trace: "Trace") -> None:
        """Plan the kinds of steps that recur together with those that are known."""
        from stalloc.lifespans.units import recurring_steps
        from stalloc.runtime.admission import admit
        from stalloc.runtime.tapes import plan_steps

        found = recurring_steps(trace)
        wanted = [name_of(kind.size, kind.stream) in self.wanted for kind in found]
        usable = [kind for kind, chosen in zip(found, wanted, strict=True) if chosen and (kind.end > 0).any()]
        known = {kind.key for kind in self.known}
        fresh = [kind for kind in usable if kind.key not in known]
        if fresh:
            again = {kind.key: kind for kind in usable}
            kinds = [again.get(kind.key, kind) for kind in self.known] + self._most_frequent(fresh)
            kinds.sort(key=lambda kind: -kind.times_seen)
            self.tapes = plan_steps(kinds[:_MAX_KINDS], self.made, trace.device)
            self.admitted = admit(self.tapes.plans, ring_only=True)

    def _most_frequent(self, kinds: "list[StepKind]") -> "list[StepKind]":
        """As many as there is time for."""
        kinds = sorted(kinds, key=lambda kind: -kind.times_seen)
        seconds = np.cumsum([len(kind.size) for kind in kinds]) * _SECONDS_A_REQUEST
        return kinds[: max(1, int(np.searchsorted(seconds, self.effort.left_seconds)))]
