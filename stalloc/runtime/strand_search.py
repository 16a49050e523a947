"""Plans for several threads that each make steps of their own on one device, side by side in one arena.

Contract: each thread has tapes and a part of the arena of its own, so that nothing depends on the order in which they
ask. What goes wrong reaches no program: the search ends without plans then.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.arena_tape import ArenaTape
from stalloc.core.host_memory import trim
from stalloc.runtime.effort import Effort
from stalloc.runtime.kind_names import recurring_names
from stalloc.runtime.kind_search import KindSearch
from stalloc.runtime.threads import start_thread

if TYPE_CHECKING:
    from stalloc.planner import Layout, Plan
    from stalloc.trace import Trace


@dataclass
class StrandSearch:
    """A search for the steps of several threads; `done` is set at its end, `admitted` is None if in vain."""

    threads: list[int]
    made: "dict[bytes, Layout]"
    effort: Effort
    done: threading.Event = field(default_factory=threading.Event)
    found: list[KindSearch] = field(default_factory=list)  # what was found, by thread
    admitted: ArenaTape | None = None

    @property
    def plan(self) -> "Plan":
        """What reports speak of: the largest plan of any thread, as large as all together."""
        assert self.admitted is not None
        plans = [search.plan for search in self.found]
        largest = max(plans, key=lambda plan: len(plan.tape_size))
        return replace(largest, peak_bytes=self.admitted.arena_bytes)

    @property
    def longest(self) -> int:
        """Requests of the longest step."""
        return max(search.longest for search in self.found)

    def start(self, traces: "list[Trace]") -> None:
        """Begin, in a thread; one trace for each thread of the program, with its marks."""
        start_thread(self._run, traces)

    def _run(self, traces: "list[Trace]") -> None:
        try:
            with self.effort.counted():
                self.found = [KindSearch(None, recurring_names(trace), self.made, self.effort) for trace in traces]
                for search, trace in zip(self.found, traces, strict=True):
                    search.search(trace)
                if all(search.admitted is not None for search in self.found):
                    self.admitted = side_by_side([search.served for search in self.found], self.threads)
        except Exception:  # these threads are not planned then; the program must not see it
            self.admitted = None
        finally:
            self.done.set()
            trim()


def side_by_side(tapes: Sequence[ArenaTape], threads: Sequence[int]) -> ArenaTape:
    """One tape of those of several threads, each in a part of the arena of its own."""
    bases = np.cumsum([0, *(tape.arena_bytes for tape in tapes)]).tolist()
    counts = np.cumsum([0, *(len(tape.size) for tape in tapes)]).tolist()
    begins = [tape.rings[:, 0] + count for tape, count in zip(tapes, counts, strict=False)]
    return ArenaTape(
        arena_bytes=bases[-1],
        size=np.concatenate([tape.size for tape in tapes]),
        stream=np.concatenate([tape.stream for tape in tapes]),
        offset=np.concatenate(
            [np.where(tape.offset >= 0, tape.offset + base, -1) for tape, base in zip(tapes, bases, strict=False)]
        ),
        begins=tuple(itertools.chain.from_iterable(begin.tolist() for begin in begins)),
        strands=tuple((thread, len(begin)) for thread, begin in zip(threads, begins, strict=True)),
    )
