"""The steps that a program marks: which kinds of them there are, which of these are planned, and which go by unseen.

Contract: every recorded step is known by what it asked for, and how often it was seen is kept, whatever becomes of
records and plans. A kind that was seen twice and is not planned yet is planned together with the others, in the
background, as soon as the step after it is over too and shows what it hands on; the new plans are handed out at a mark
(`take_ready`). Nothing here waits for a search unless it is asked to, or puts anything in force.

A step goes by, its mark noted by the core, only where nothing would come of it: no search is under way, all that is
recorded is known, nearly all of the step was served from the plan, and no page moved. Whatever enters Python for the
device has the parts told first, so that what they know is as of the last mark.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.device_parts import StepAhead
from stalloc.core.state import DeviceState
from stalloc.runtime import decisions
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.planning_job import Cycle, KindSearch
from stalloc.runtime.recorded_steps import RecordedSteps, name_of, recurring_names
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import CpuBudget, SteadySteps
from stalloc.runtime.step_places import StepPlaces
from stalloc.trace import MARK_STEP

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule
    from stalloc.planner import Layout
    from stalloc.planner.kind_plans import KindPlans
    from stalloc.trace import Trace
    from stalloc.trace.record import Column


class StepWatch:
    """Decides when the steps of one device are recorded while a plan is in force.

    They are while there are steps that the plan does not know, and for a time after plans of kinds came into force. A
    watch that brought no plan is followed by a pause, twice as long as the one before; a step that the plan knows
    nothing of shortens it.
    """

    def __init__(self, state: DeviceState, recorded: RecordedSteps, cpu_budget: CpuBudget) -> None:
        self._state, self._recorded, self._cpu_budget = state, recorded, cpu_budget
        self._counts, self._plans = (0, 0), 0  # hits and misses, and plans that had been put in force by then
        self._bad = 0  # steps in a row
        self._steps = self._pause = 0  # of this watch, and until the next one
        self._next_pause = decisions.watch_left(0)

    def begin(self, *, anew: bool) -> None:
        """Watch from here on, in the record that there is; `anew`: pauses begin to be short again."""
        self._steps = 1
        if anew:
            self._next_pause = decisions.watch_left(0)

    def end(self) -> None:
        self._steps = 0

    def pause(self) -> None:
        self._steps, self._pause = 0, self._next_pause

    @property
    def num_left(self) -> int:
        return decisions.watch_left(self._steps) if self._steps else 0

    @property
    def may_be_patient(self) -> bool:
        """Whether there was a step not long ago of which most was served."""
        return decisions.are_bad_steps_few(self._bad)

    def skip(self, steps: SteadySteps) -> None:
        self._counts, self._bad = (steps.hits, steps.lost), 0
        if self._steps:
            self._steps += steps.count
        else:
            self._pause -= steps.count

    def end_step(self, num_plans: int, *, records: bool) -> tuple[int, bool]:
        """A step ended under the `num_plans`th plan; `records`: steps that are not known may be recorded.

        How much of it was not served, and whether it needed much that no plan knows of. It is counted from mark to
        mark, and from the first mark after a plan came into force.
        """
        counts = self._state.record.follow.hits, self._state.num_unserved
        fresh = self._plans == num_plans
        hits, missed = (counts[0] - self._counts[0], counts[1] - self._counts[1]) if fresh else (0, 0)
        self._counts, self._plans = counts, num_plans
        self._bad = self._bad + 1 if decisions.is_bad(missed, hits + missed) else 0
        is_unknown = decisions.is_unknown(missed / max(hits + missed, 1))
        if records:
            # steps that differ now may be equal later
            self._watch(missed=missed > 0 or self._state.record.dynamic.num_dynamic > 0, is_unknown=is_unknown)
        return missed, is_unknown

    def _watch(self, *, missed: bool, is_unknown: bool) -> None:
        if not self._steps:
            self._pause -= decisions.counts_in_pause(is_unknown=is_unknown)
            if missed and self._pause <= 0 and not self._cpu_budget.is_spent:
                self._steps = 1
                self._recorded.expect_last()
                self._recorded.begin_anew()
            return
        self._steps += 1
        if decisions.watch_left(self._steps) < 0:
            self.pause()
            self._next_pause *= 2
            self._state.forget_record()
            self._recorded.forget()
        elif decisions.is_record_long(self._state.record.log.num_events) or not self._state.record.hot.recording:
            self._recorded.begin_anew()


class CycleWatch:
    """Watches the marked steps of one device for an order that repeats.

    A cycle is looked for where many requests have no place in the plans of kinds, in ever longer records, and once for
    such plans where pages move in every step of what they serve.
    """

    def __init__(self, recorded: RecordedSteps) -> None:
        self._recorded = recorded
        self.forget()

    def forget(self) -> None:
        self._found: Cycle | None = None  # to be put in force
        self._search_at = 0  # recorded steps, after which a cycle of them may show; 0: none is looked for
        self._waited = 0
        self.begin_plans()

    def begin_plans(self) -> None:
        self._looked_for_moves = False

    def ends(self, search: KindSearch) -> bool:
        """A search has ended: whether its plans do not matter, as there is a cycle, or is to be one step later."""
        if search.lacks_places:
            self._search_at = 2 * self._recorded.count
        if search.awaits_cycle:
            self._search_at, self._waited = self._recorded.count + 1, self._waited + 1
            return True
        if search.cycle is not None and search.cycle.record == self._recorded.num_records:
            self._found = search.cycle
            return True
        return False

    def take(self) -> Cycle | None:
        cycle, self._found = self._found, None
        return cycle

    @property
    def is_found(self) -> bool:
        return self._found is not None

    @property
    def num_left(self) -> int:
        """Recorded steps before the one after which a cycle is looked for; many if none is."""
        return self._search_at - self._recorded.count - 1 if self._search_at else sys.maxsize

    def is_due(self, *, pages_move: bool) -> bool:
        """Whether one is to be looked for in what was recorded so far; `pages_move` in every step of the plans."""
        return 0 < self._search_at <= self._recorded.count or (pages_move and not self._looked_for_moves)

    def note_search(self, *, pages_move: bool) -> bool:
        """A search of all of the record begins; whether its cycle may wait for another step."""
        self._search_at = 0
        self._looked_for_moves |= pages_move
        return decisions.may_wait_for_lifespans(self._waited)


class Steps:
    """The marked steps of one device."""

    def __init__(self, state: DeviceState, recording: Recording, cpu_budget: CpuBudget) -> None:
        self._state, self._recording, self._cpu_budget = state, recording, cpu_budget
        self.places = StepPlaces(state)  #: on the schedules in force
        self.schedules: KindPlans | None = None  #: in force
        self.search: KindSearch | None = None
        self._made: dict[bytes, Layout] = {}
        self.recorded = RecordedSteps(state, recording)
        self.planned: set[bytes] = set()  #: names of the kinds that the plan, or the one in the making, knows
        self._refused: set[bytes] = set()  # that no plan can be made for
        self.cycles = CycleWatch(self.recorded)
        self.watch = StepWatch(state, self.recorded, cpu_budget)
        self.keep_plan = False  #: the plan in force is the one that a budget was tried with: no other is looked for

    def forget(self) -> None:
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
        period = schedule.period_requests
        places = {(last - first) % period: b"" for last in at[-1:].tolist()}
        for begin, end in itertools.pairwise(at.tolist()):
            name = name_of(size[begin:end], stream[begin:end])
            self.planned.add(name)
            places[(begin - first) % period] = name
        if self.search is not None and self.search.wanted <= self.planned:
            self.search = None  # a cycle of them knows more: what is carried over through several steps too
        self.places.follow_cycle(places, schedule.cycle_length, period)
        self.schedules = None

    def follow_aligned(self, schedule: "Schedule") -> None:
        name = name_of(schedule.size, schedule.stream)
        self.planned = {name}
        self.places.follow_kinds([0], [schedule.cycle_length], [name], [False])  # each mark is where it begins
        self.schedules = None

    def take_ready(self) -> KindSearch | None:
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

    def await_search(self, seconds: float) -> None:
        if self.search is not None:
            self.search.done.wait(seconds)

    @property
    def recur_in_any_order(self) -> bool:
        return decisions.may_recur_in_any_order(self.recorded.count) and bool(self._fresh())

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
        if more := bool(self.recorded.names - self.planned - self._refused):
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

    def search_for_more(self, *, pages_move: bool) -> bool:
        """Plan kinds that recur and are not planned, or a cycle of those that are, as where `pages_move`; if any."""
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
            self.start_search(trace, fresh if first else None, pages_move=pages_move and again)
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

    def start_search(self, trace: "Trace", only: set[bytes] | None = None, *, pages_move: bool = False) -> None:
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

    def were_refused(self) -> None:
        """There is no room for an arena of all kinds: these are not tried again as long as the program runs."""
        self.watch.pause()
        self._refused |= self.planned

    def follow(self, search: KindSearch, *, marked: bool) -> None:
        """The plans of a search are in force; where steps are not `marked`, nobody knows where one begins."""
        self.schedules = schedules = search.planned
        if not marked:
            self.places.forget()
            self.watch.end()
            return
        lengths = [len(kind.size) for kind in schedules.kinds]
        self.cycles.begin_plans()
        self.places.follow_kinds(schedules.begins, lengths, search.names, schedules.switches_buffers)
        self.watch.begin(anew=True)
        if self._state.record.log.num_events:
            self._state.write(recording=1)  # other kinds may have been seen once already: watch on
        else:
            self.recorded.begin_anew()  # planning took long: what was recorded is gone


Skip = Callable[[SteadySteps], None]  # tells a part of a device which steps went by


class SteadyMarks:
    """The marks of one device's steps, as far as nobody has to be told at once."""

    def __init__(self, memory: DeviceMemory, recording: Recording, steps: Steps, told: Iterable[Skip]) -> None:
        """`told`: who else has to know of the steps that went by."""
        self._state, self._lock = memory.state, memory.lock
        self._recording, self._steps = recording, steps
        self._told: tuple[Skip, ...] = (recording.skip, steps.places.skip, steps.watch.skip, *told)
        self._thread = -1  # whose steps may go by
        self._names: list[str] = []  # of the marks of those that did
        self._kinds: list[bytes] = []  # of steps that are expected, if they are recorded
        self._num_expected, self._num_wanted = 0, 1
        self._heard, self._to_hear = 0, 0  # marks to be heard after a step that did not come, and those left of them

    def ends_step(self, name: str) -> bool:
        if self._thread != threading.get_ident() or not self._state.expected.end_known():
            return False
        self._names.append(name)
        self._recording.step_times_ns.append(time.monotonic_ns())
        self._recording.num_planned += 1
        return True

    def begin(self) -> None:
        """A mark of a step was looked at: let those after it go by, as far as it is known what they should be."""
        if self._to_hear > 0:
            self._to_hear -= 1
        elif ahead := self._ahead():
            self._names, self._num_expected = [], len(ahead)
            self._state.expected.expect(ahead, self._recording.overdue_requests)
            self._thread = threading.get_ident()

    def _ahead(self) -> list[StepAhead]:
        """The steps expected from here on; none while a search is under way, or what is recorded is not all planned."""
        steps, is_recorded = self._steps, self._state.record.hot.recording
        if steps.search is not None or steps.cycles.is_found:
            return []
        if not is_recorded:
            self._kinds = []
            return [step for step, _ in steps.places.ahead(self._num_wanted)]
        if not steps.recorded.names <= steps.planned:
            return []
        most = max(0, min(self._num_wanted, steps.watch.num_left, steps.cycles.num_left))
        known = [*itertools.takewhile(lambda ahead: ahead[1] in steps.planned, steps.places.ahead(most))]
        self._kinds = [kind for _, kind in known]
        return [step for step, _ in known]

    def end(self) -> None:
        """None goes by from here on, and the parts are told of those that did; in any thread."""
        if self._thread != -1:
            with self._lock:
                self._end()

    def _end(self) -> None:
        self._thread = -1
        num_events, last = self._state.expected.end_all(), self._state.record.known_steps
        self._learn(len(num_events))
        if not num_events:
            return
        steps = SteadySteps(
            (self._names + [""] * len(num_events))[: len(num_events)],  # one may have been interrupted
            num_events,
            place=last.place,
            hits=last.hits,
            lost=last.misses + last.conflicts,
            followed=last.followed,
            num_requests=last.num_allocs,
            requested_bytes=last.requested_ever,
            allocated_bytes=last.allocated_bytes,
        )
        for skip in self._told:
            skip(steps)
        self._steps.recorded.skip(steps, self._kinds[: steps.count])

    def _learn(self, num_steps: int) -> None:
        if num_steps:
            self._heard, self._num_wanted = 0, decisions.next_passed_steps(num_steps, self._num_expected)
        else:
            self._num_wanted, self._heard = 1, decisions.next_heard_marks(self._heard)
            self._to_hear = self._heard
