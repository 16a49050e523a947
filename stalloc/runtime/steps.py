"""The steps that a program marks: which kinds of them there are, and which of these are planned.

Contract: every recorded step is known by what it asked for, and how often it was seen is kept, whatever becomes of
records and plans. A kind that was seen twice and is not planned yet is planned together with the others, in the
background, as soon as the step after it is over too and shows what it hands on; the new plans are handed out at a mark
(`take_ready`). Nothing here waits for a search unless it is asked to, or puts anything in force.
"""

import itertools
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.state import DeviceState
from stalloc.runtime import decisions
from stalloc.runtime.cpu_budget import CpuBudget
from stalloc.runtime.cycles import CycleWatch
from stalloc.runtime.kind_names import name_of, recurring_names
from stalloc.runtime.kind_search import KindSearch
from stalloc.runtime.recorded_steps import RecordedSteps
from stalloc.runtime.recording import Recording
from stalloc.runtime.step_misses import StepMisses
from stalloc.runtime.step_places import StepPlaces
from stalloc.runtime.step_watch import StepWatch
from stalloc.trace import MARK_STEP

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule
    from stalloc.planner import Layout
    from stalloc.planner.kind_plans import KindPlans
    from stalloc.trace import Trace
    from stalloc.trace.record import Column


class Steps:
    """The marked steps of one device."""

    def __init__(self, state: DeviceState, recording: Recording, cpu_budget: CpuBudget) -> None:
        self._state, self._recording, self._cpu_budget = state, recording, cpu_budget
        self.places = StepPlaces(state)  #: on the schedules in force
        self.schedules: KindPlans | None = None  #: in force
        self.search: KindSearch | None = None
        self._made: dict[bytes, Layout] = {}
        self.misses = StepMisses(state)
        self.recorded = RecordedSteps(state, recording)
        self.planned: set[bytes] = set()  #: names of the kinds that the plan, or the one in the making, knows
        self._refused: set[bytes] = set()  # that no plan can be made for
        self.cycles = CycleWatch(self.recorded)
        self.watch = StepWatch(state, self.recorded, cpu_budget)
        self.keep_plan = False  #: the plan in force is the one that a budget was tried with: no other is looked for

    def forget(self) -> None:
        """The plan is given up, and the record begins anew."""
        self.schedules, self.search, self.keep_plan = None, None, False
        self.watch.end()
        self.cycles.forget()
        self.places.forget()
        self.planned.clear()
        self.recorded.forget()

    def follow_marks(self, trace: "Trace", schedule: "Schedule", sizable: "Column", first: int) -> None:
        """The cycle of a schedule, folded from a trace, is followed: know where the program's marks are on it.

        `sizable` (m,) are the rows of the trace's requests that count; the cycle's first is the one at `first`.
        """
        marks = trace.mark_event[trace.mark_kind == MARK_STEP]
        at = np.searchsorted(trace.start[sizable], marks)
        at = at[(at >= first) & (at <= first + schedule.covered_requests)]
        size, stream = trace.size[sizable], trace.stream[sizable]
        self.planned.clear()
        period, places = (
            schedule.period_requests,
            {(last - first) % schedule.period_requests: b"" for last in at[-1:].tolist()},
        )
        for begin, end in itertools.pairwise(at.tolist()):
            name = name_of(size[begin:end], stream[begin:end])
            self.planned.add(name)
            places[(begin - first) % period] = name
        if self.search is not None and self.search.wanted <= self.planned:
            self.search = None  # a cycle of them knows more: what is carried over through several steps too
        self.places.follow_cycle(places)
        self.places.unroll(schedule.cycle_length, schedule.period_requests)
        self.schedules = None

    def follow_aligned(self, schedule: "Schedule") -> None:
        """The cycle of what steps have in common is followed, which begins with a step."""
        name = name_of(schedule.size, schedule.stream)
        self.planned = {name}
        self.places.follow_kinds([0], [schedule.cycle_length], [name], [False])  # each mark is where it begins
        self.schedules = None

    def take_ready(self) -> KindSearch | None:
        """The search that has ended since with plans that were admitted; None if there is none."""
        search = self.search
        if search is None or not search.done.is_set():
            return None
        self.search = None
        if self.cycles.ends(search):
            return None
        if search.admitted is None:
            self._refused |= search.looked_for - self.planned
            return None
        return search

    def at_planned_mark(self, num_plans: int, *, records: bool) -> tuple[int, bool]:
        """A step ended while a plan is in force, the `num_plans`th.

        How much of it was not served, and whether it needed much that no plan knows of.

        `records`: steps that are not known may be recorded.
        """
        missed, share = self.misses.of_step(num_plans)
        is_unknown = decisions.is_unknown(share)
        if records:
            # steps that differ now may be equal later
            self.watch.note_step(missed=missed > 0 or self._state.record.dynamic.num_dynamic > 0, is_unknown=is_unknown)
        return missed, is_unknown

    def note_step(self) -> None:
        """Count the step that just ended, if it is in the record from its begin."""
        self.recorded.note(self.places.name_of_followed())

    def await_search(self, seconds: float) -> None:
        """Wait for a search that was just started: the program would go on without its plans meanwhile."""
        if self.search is not None:
            self.search.done.wait(seconds)

    @property
    def may_be_planned(self) -> bool:
        """Whether the record may show a cycle of steps, or kinds of steps that recur in any order."""
        return self.recorded.make_a_cycle or self._recur_in_any_order

    @property
    def _recur_in_any_order(self) -> bool:
        return decisions.may_recur_in_any_order(self.recorded.count) and bool(self._fresh())

    def look_for_kinds(self, trace: "Trace") -> bool:
        """No cycle of steps was found while observing: plan the kinds of steps that recur in any order, if any do."""
        if starts := self._recur_in_any_order:
            self._start_search(trace)
        return starts

    def look_for_unmarked_kinds(self, trace: "Trace") -> bool:
        """Nothing marks steps, and none repeats: plan the kinds of steps that the record consists of, if it does."""
        from stalloc.lifespans.recurring_steps import with_steps_marked

        parted = with_steps_marked(trace)
        if self.search is not None or parted is None:
            return False
        wanted = recurring_names(parted) - self._refused
        if wanted:
            self.search = KindSearch(None, wanted, self._made, self._cpu_budget, looked_for=wanted)
            self.search.start(parted)
        return bool(wanted)

    def goes_on(self) -> bool:
        """A plan is put in force: whether the record holds steps that it does not know, and is to go on."""
        more = bool(self.recorded.names - self.planned - self._refused)
        if more:
            self.watch.begin(anew=False)
        else:
            self.watch.end()
        return more

    def _fresh(self) -> set[bytes]:
        """The kinds that recur and are not planned yet, if the record shows how long their requests live."""
        recorded = self.recorded
        if self.search is not None or not recorded.count:
            return set()
        if self.schedules is None and 2 * recorded.num_recurring < recorded.count:
            return set()  # a program whose steps are mostly all different
        fresh = {name for name in recorded.recurring - self.planned - self._refused if recorded.is_shown(name)}
        return set() if fresh and self._cpu_budget.is_spent else fresh

    @property
    def recur(self) -> bool:
        """Whether half of the recorded steps, or more, are of kinds that were seen twice."""
        return 2 * self.recorded.num_recurring >= max(1, self.recorded.count)

    def search_for_more(self, *, pages_move: bool) -> bool:
        """Plan the kinds of steps that recur, and that the plan in force does not know; whether there are any.

        Or a cycle of those that it knows, as where `pages_move` in every step.
        """
        fresh, recorded = self._fresh(), self.recorded
        pages_move = pages_move and self.schedules is not None and decisions.makes_a_cycle(recorded.count)
        again = self.cycles.is_due(pages_move=pages_move) and self.search is None
        if self.keep_plan or self.cycles.is_found or not (fresh or (again and not self._cpu_budget.is_spent)):
            return False
        # the plan of a cycle says nothing of its single steps: what it was found in has to tell, or the record, or they
        # have to be over
        is_over = self.planned.isdisjoint(recorded.names) and any(map(recorded.comes_twice, fresh))
        is_told = (
            self.schedules is not None or self._recording.kept is not None or all(map(recorded.is_shown, self.planned))
        )
        if not is_over and not is_told:
            return False
        first = 0 if again else self._first_needed(fresh)
        with self._cpu_budget.counted():
            trace = self._recording.regular_trace(first)
            self._start_search(trace, fresh if first else None, pages_move=pages_move and again)
        return True

    def _first_needed(self, fresh: set[bytes]) -> int:
        """The step of the record from which on it shows what plans of these kinds need, beside those in force."""
        is_counted = len(self._recording.step_events) == self.recorded.count + 1  # each of its steps, since it began
        told = self.schedules is not None and is_counted
        return decisions.first_needed(self.recorded.first_of(fresh)) if told else 0

    @property
    def _cycle_tells(self) -> bool:
        """Whether the steps of the cycle in force are planned with other kinds, by what it was found in.

        Where memory does not come by pages the arena would be as large as kinds need that may never come again.
        """
        return self.schedules is None and self._recording.kept is not None and self._state.record.plan.arena_pages != 0

    def _start_search(self, trace: "Trace", only: set[bytes] | None = None, *, pages_move: bool = False) -> None:
        """The trace is of the whole record, or of a part that is `only` searched for some kinds, and for no cycle."""
        wanted = self.recorded.recurring - self._refused
        search = KindSearch(self.schedules, wanted, self._made, self._cpu_budget, double_buffered=True)
        search.looked_for = wanted if only is None else only
        if self._cycle_tells:
            search.in_force, search.in_force_kinds = self._recording.kept, {*self.planned}
        if only is None:
            search.may_wait, search.pages_move = self.cycles.note_search(pages_move=pages_move), pages_move
            search.record = None if self._recording.leaves_out_noise else self.recorded.num_records
        self.search = search
        search.start(trace)

    def are_planned(self, search: KindSearch) -> None:
        """The plans of a search are about to be put in force: what they are of is known from here on."""
        assert search.schedules is not None
        self.planned = {name_of(kind.size, kind.stream) for kind in search.schedules.kinds}

    def were_refused(self) -> None:
        """There is no room for an arena of all kinds: these are not tried again as long as the program runs."""
        self.watch.pause()
        self._refused |= self.planned

    def follow_unmarked(self, search: KindSearch) -> None:
        """The plans of a search are in force, and no mark says when a step begins."""
        self.places.forget()
        self.schedules = search.schedules
        self.watch.end()

    def follow(self, search: KindSearch) -> None:
        """The plans of a search are in force."""
        assert search.schedules is not None
        kinds = search.schedules.kinds
        names = [name_of(kind.size, kind.stream) for kind in kinds]
        lengths = [len(kind.size) for kind in kinds]
        self.cycles.begin_plans()
        self.places.follow_kinds(search.schedules.begins, lengths, names, search.schedules.switches_buffers)
        self.schedules = search.schedules
        self.watch.begin(anew=True)
        if self._state.record.log.num_events:
            self._state.write(recording=1)  # other kinds may have been seen once already: watch on
        else:
            self.recorded.begin_anew()  # planning took long: what was recorded is gone
