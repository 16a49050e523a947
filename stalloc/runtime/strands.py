"""Several threads that each make steps on one device: known by their marks, and planned as strands.

Contract: threads are told apart only where the steps between all marks do not recur, as where they allocate side by
side. While their plans are in force a mark says where the strand of its thread goes on, and nothing about the others.
"""

import operator
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from stalloc.core.constants import MAX_STRANDS
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Phase
from stalloc.runtime.status import Status
from stalloc.runtime.step_places import StepPlaces
from stalloc.runtime.steps import Steps
from stalloc.runtime.strand_search import StrandSearch

if TYPE_CHECKING:
    from stalloc.planner import Layout

_MARKS = 3  # that a thread has set before its steps are looked for: two steps and what the first hands on
_PATIENCE = 4  # marks that a thread has set without a plan, after which they are told apart whatever recurs
_LOOKED_AT = 4  # marks, over which is judged how much a plan serves
_REMEMBERED = 16  # marks, among which those of several threads are
_LEAST_SERVED = 0.9  # of the requests, by a plan that takes all threads for one
_LEAST_APART = 0.5  # the same, by plans of theirs
_MAX_SEARCHES = 8  # without plans in a row, after which threads are not told apart any more


class Strands:
    """The threads of one device's program that make steps of their own."""

    def __init__(self, status: Status, memory: DeviceMemory, recording: Recording, steps: Steps) -> None:
        self._status, self._state, self._recording, self._steps = status, memory.state, recording, steps
        settings = status.settings
        self._wanted, self._source = settings.plan and not settings.keep_recording, memory.source
        self._places: list[StepPlaces] = []  # of each strand, on the tapes in force
        self._made: dict[bytes, Layout] = {}
        self._last_threads: list[int] = []  # of the last marks
        self._counts: list[tuple[int, int]] = []  # hits and misses at the last marks
        self._plans = 0  # that had been put in force by then
        self._failed = 0  # searches
        self._search_at = 0  # marks in the record at the next search
        self.search: StrandSearch | None = None
        self.are_apart = False  #: threads are told apart from here on

    @property
    def _may_be(self) -> bool:
        return self._wanted and self._source.paged

    @property
    def are_served(self) -> bool:
        """Whether their plans are in force."""
        return bool(self._places) and self._status.phase is Phase.PLANNED

    @property
    def _gives_up(self) -> bool:
        return self._failed >= _MAX_SEARCHES

    def forget(self) -> None:
        """No plan is in force any more, and the record begins anew."""
        self._places, self.search, self._search_at = [], None, 0
        self._counts.clear()

    def _misses(self, least_served: float) -> bool:
        """Whether the plan in force serves less of the last steps."""
        if len(self._counts) < _LOOKED_AT:
            return False
        hits, misses = (last - first for first, last in zip(self._counts[0], self._counts[-1], strict=True))
        return hits < least_served * (hits + misses)

    @property
    def follow_something_else(self) -> bool:
        """Whether their plans serve so little that they are to go."""
        return self.are_served and self._misses(_LEAST_APART)

    def end_step(self, serve: Callable[[StrandSearch], bool]) -> bool:
        """This thread marks a step; `serve` puts plans in force, if it can. Whether threads are told apart."""
        if not self._may_be:
            return False
        self._note_mark()
        planned, several = self._status.phase is Phase.PLANNED, self._take_turns
        if planned and several and not self.are_apart and not self._gives_up and self._misses(_LEAST_SERVED):
            self.are_apart = True  # the plan in force takes them for one
            if not self._state.record.recording:
                self._recording.begin_at_step()
        elif self.are_apart and not self.are_served and (self._gives_up or not several):
            self.are_apart = False
            if planned:
                self._state.forget_record()
        if self._status.phase is Phase.OBSERVING or (planned and self.are_apart and not self.are_served):
            self._look()
            ready = self._take_ready()
            if ready is not None and serve(ready):
                self._follow(ready)
        if self.are_served:
            self._begin_step()
        return self.are_apart

    @property
    def _take_turns(self) -> bool:
        """Whether several threads set the last marks in turn; not where one has left it to the next."""
        num_threads = len(set(self._last_threads))
        return num_threads > 1 and num_threads <= sum(map(operator.ne, self._last_threads, self._last_threads[1:]))

    @property
    def is_one(self) -> bool:
        """Whether one thread set all of the last marks, and none are told apart."""
        return not self.are_apart and len(set(self._last_threads)) < 2

    def _note_mark(self) -> None:
        record = self._state.record
        if self._plans != self._status.num_plans:
            self._counts, self._plans = [], self._status.num_plans
        self._last_threads = [*self._last_threads, threading.get_ident()][-_REMEMBERED:]
        self._counts = [*self._counts, (record.hits, record.misses + record.conflicts)][-_LOOKED_AT:]

    def _look(self) -> None:
        """See whether several threads make steps in the record, and plan them.

        The search is waited for: the program would go on without a plan meanwhile.
        """
        if self.is_one:
            return
        marks = Counter(self._recording.mark_threads)
        threads = [thread for thread, count in marks.items() if count >= _MARKS]
        if not 1 < len(threads) <= MAX_STRANDS:
            return
        most, search = max(marks.values()), self._steps.search
        one_step = self._steps.recur and most < _PATIENCE  # else there would be a plan by now
        makes_plan = search is not None and (search.admitted is not None or not search.done.is_set())
        one_step |= makes_plan and most < 2 * _PATIENCE
        if (
            (one_step and not self.are_apart)
            or self.search is not None
            or self._gives_up
            or self._status.effort.is_spent
        ):
            return
        if len(self._recording.mark_threads) < self._search_at:
            return
        if not self._recording.interleave(threads):  # they take turns
            self._failed += self.are_apart
            return
        self.are_apart = True
        self._search_at = len(self._recording.mark_threads) + 1
        with self._status.effort.counted():
            self.search = StrandSearch(threads, self._made, self._status.effort)
            self.search.start(self._recording.traces_of(threads))
        self.search.done.wait(self._status.settings.plan_wait_seconds)

    def _take_ready(self) -> StrandSearch | None:
        """The search that has ended since with plans; None if there is none."""
        search = self.search
        if search is None or not search.done.is_set():
            return None
        self.search = None
        self._failed = 0 if search.admitted is not None else self._failed + 1
        return search if search.admitted is not None else None

    def _follow(self, search: StrandSearch) -> None:
        """The plans of a search are in force."""
        self._places, begin = [], 0
        for found in search.found:
            assert found.tapes is not None
            lengths = [len(kind.size) for kind in found.tapes.kinds]
            places = StepPlaces(self._state)
            begins, no_names = [begin + first for first in found.tapes.begins], [b""] * len(lengths)
            places.follow_kinds(begins, lengths, no_names, found.tapes.switches_buffers)
            self._places.append(places)
            begin += sum(lengths)
        self._counts.clear()

    def _begin_step(self) -> None:
        """This thread begins a step: tell the core where its strand goes on."""
        strand = self._state.arena.strand_of(threading.get_ident())
        if 0 <= strand < len(self._places):
            begin, _, _ = self._state.arena.strand_cursors()[strand]
            begin, end = self._places[strand].expected_after(begin)
            self._state.arena.begin_strand_step(strand, begin, end, begin)
