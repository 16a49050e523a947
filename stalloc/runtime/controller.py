"""One device under stalloc: watch the program, plan the steps that repeat, switch to the plan, recover.

The compiled core serves requests; this module is where it turns when it needs Python: for a segment, a look at what was
recorded, the boundary of a step, memory that other streams still use. It holds the phase that a device is in; every
transition is here, and docs/runtime.md has them as a table.

Contract: no method raises into the core; a failure of any of them leaves the heap serving. A plan that finds no room,
or would hold far more than the program needs without it, leaves what served before in place.
"""

import time
from typing import TYPE_CHECKING

from stalloc.core import constants
from stalloc.core.arena_schedule import ArenaSchedule, Between
from stalloc.core.device_parts import trim
from stalloc.device import Device
from stalloc.device.ordering import ordering
from stalloc.errors import PlanError
from stalloc.runtime import decisions
from stalloc.runtime.admission import admit
from stalloc.runtime.arenas import Arenas, PersistentPhase, Tidying
from stalloc.runtime.bypass import Bypass, FullDevice
from stalloc.runtime.captures import Captures
from stalloc.runtime.interruptions import is_interruption, is_passing
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.planning_job import NextPlan, PlanJob
from stalloc.runtime.record_search import Found, PlanValidation, RecordSearch
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import CpuBudget, Observed, Phase, Settings, Status
from stalloc.runtime.shortage import Evict, Shortage
from stalloc.runtime.sources import Source
from stalloc.runtime.steps import SteadyMarks, Steps
from stalloc.trace import MARK_STEP
from stalloc.trace.packing import KeptTrace

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule
    from stalloc.planner import Plan
    from stalloc.planner.planning import Streams
    from stalloc.poison.poison import Watch
    from stalloc.runtime.planning_job import Planner
    from stalloc.trace import Trace


class Controller:
    """The watcher of one device."""

    def __init__(
        self,
        device: Device,
        source: Source,
        slow_function: int,
        settings: Settings,
        watch: "Watch | None" = None,
        planner: "Planner | None" = None,
    ) -> None:
        """`slow_function` is the address that the core enters Python by; `planner` stands in for `plan_schedule`."""
        self.device = device
        self.memory = DeviceMemory(device, source, slow_function, watch)
        self.state, self.lock = self.memory.state, self.memory.lock
        self.arenas = Arenas(self.memory)
        self.captures = Captures(self.memory)
        self.recording = Recording(device, self.state)
        self.status = Status(settings, CpuBudget(settings.planning_share))
        self.steps = Steps(self.state, self.recording, self.status.cpu_budget)
        self.persistent = PersistentPhase(self.memory, self.recording)
        self.shortage = Shortage(self.arenas, self.recording, self.status)
        self.full_device = FullDevice(self.memory)
        self.may_move = False  #: what lives may be moved at marks, so that room can be asked for
        self._tidying = Tidying(self.arenas, self.status.cpu_budget)
        self._search = RecordSearch(self.state, self.recording)
        self._validation = PlanValidation(self.status, self.state, self.recording)
        self._next_plan = NextPlan(self.status, self.state, self.recording, planner)
        self._bypass = Bypass(self.status, self.arenas, self.recording)
        # of the plan in force, if it keeps streams apart that could share memory
        self._separate: Schedule | None = None
        told = self.status.cpu_budget, self.memory.paging.allowance, self.full_device, self._bypass
        self.steady = SteadyMarks(self.memory, self.recording, self.steps, [part.skip for part in told])
        self.observe()

    # --- what the core asks for

    def help(self, request: int, argument: int) -> bool:
        """Do what the core asks for; False means that there is no memory."""
        reason, detail = request & ((1 << constants.REASON_BITS) - 1), request >> constants.REASON_BITS
        with self.lock, self.memory.serving() as captured_stream:
            self.captures.heed(captured_stream)
            if reason not in (constants.POLL, constants.POLL_FOR_PLACE, constants.NEED_EVENTS):
                self.steady.end()
            if reason == constants.NEED_SEGMENT:
                return self._add_segment(detail, argument)
            if reason == constants.REFUSED:
                if detail == constants.FULL_STREAMS and self._forget_streams():
                    return True
                self.shortage.explain_refusal(detail, argument)
                return False
            if reason == constants.NEED_PAGES:
                self.memory.free_deferred()
                if not self._bypass.begins():
                    self.arenas.back(detail)
                self._rest_if_refused()
            elif reason == constants.AT_BOUNDARY:
                if self.memory.is_capturing:
                    self.state.triggers.at_boundary()
                else:
                    self._at_boundary()
            elif reason == constants.CHECK:
                if self.memory.is_capturing:
                    self.state.triggers.at_recorded(1)
                else:
                    self._look()
            elif reason == constants.OVER_CAP:
                if not self.memory.is_capturing:
                    self.shortage.eviction.keep_cap(argument)
            elif reason == constants.STALE:
                self._doubt_plan()
            elif reason == constants.NEED_EVENTS:
                self.memory.deferred.add_events()
            elif reason in (constants.POLL, constants.POLL_FOR_PLACE):
                self.memory.free_deferred()
        return True

    def _add_segment(self, pool: int, size_bytes: int) -> bool:
        if (
            self.captures.place_plan(pool, size_bytes)
            or self.memory.free_deferred()
            or self.persistent.ends_here(expects_marks=self.expects_marks)
            or self._bypass.begins()
        ):
            return True  # the core asks again, if it needs to
        if self._is_planned and not self.steps.keep_plan and self.full_device.is_left(size_bytes):
            self._drop_plan("the program left the plan, and fills the device")
        planned = self._is_planned
        if planned:
            self.state.triggers.at_boundary()  # to give it back when it is no longer used
        served = self.shortage.add_segment(pool, size_bytes, planned=planned)
        if not served and planned and self.shortage.is_enough_in_pieces(size_bytes):
            self._drop_plan("memory ran out beside the plan")  # then what is free in its arena is one with the rest
            served = self.shortage.add_segment(pool, size_bytes, planned=False)
        self._rest_if_refused()
        return served

    def _rest_if_refused(self) -> None:
        refusal = self.memory.source.refusal
        if refusal and self.status.phase is not Phase.RESTING:
            self.rest(f"the driver refused memory by pages: {refusal}")

    def _forget_streams(self) -> bool:
        """Forget streams that hold no memory any more, and with them what was observed; whether there were any."""
        if self.memory.is_capturing:
            return False  # a capture must not wait for what the streams were at
        if self.status.phase in (Phase.PLANNED, Phase.PLANNING):
            self._drop_plan("the program uses ever new streams")
        elif self.status.phase is Phase.OBSERVING:
            self.steps.forget()
            self.observe()
        self.memory.release_unused()
        return self.state.forget_streams() > 0

    def recover(self, request: int, argument: int, error: BaseException) -> None:
        """Whatever `help` was at when an error stopped it: no memory is lost, and the heap serves."""
        reason = request & ((1 << constants.REASON_BITS) - 1)
        with self.lock:
            if reason == constants.NEED_SEGMENT:
                self.shortage.explain_failure(argument, error)
            elif reason in (constants.MARK, constants.AT_BOUNDARY, constants.CHECK, constants.STALE):
                self._give_up(error)
            self.arenas.match()

    def _give_up(self, error: BaseException) -> None:
        """Planning, a switch or a look was stopped somewhere: watch anew after an interruption, else leave it."""
        goes_on = self.status.phase is not Phase.RESTING and is_passing(error)
        self.state.arena.drop_schedule()
        self._forget_plans()
        self.arenas.match()
        if goes_on:
            self.arenas.drop_schedule()
            self.observe()
        else:
            self.rest(f"{type(error).__name__}: {error}")

    # --- what the program says

    @property
    def expects_marks(self) -> bool:
        """Whether the program marks steps, or has an optimizer, whose steps will be marked."""
        return bool(self.state.record.policy.expects_marks)

    @expects_marks.setter
    def expects_marks(self, expects: bool) -> None:
        self.state.record.policy.expects_marks = expects

    def mark(self, kind: int, name: str) -> None:
        if kind != MARK_STEP or not self.steady.ends_step(name):
            self.hear_mark(kind, name)

    def hear_mark(self, kind: int, name: str) -> None:
        with self.lock, self.memory.serving():
            self.steady.end()
            if kind != MARK_STEP:
                self.recording.note_mark(kind, name)
                return
            self.recording.num_planned += self._is_planned
            self._note_step()
            self.recording.note_mark(kind, name)
            try:
                self._end_step()
                self._bypass.end()
                self._follow_cycle()
            except Exception as error:  # whatever it is, the program must not see it: it only marked a step
                if is_interruption(error):
                    raise
                self.rest(f"following the steps failed: {type(error).__name__}: {error}")
            self._look()
            if self.memory.poison is not None:
                self.memory.poison.check()
            elif self._is_planned and self._bypass.is_far:
                self.steady.begin()

    def _note_step(self) -> None:
        """The program marks a step: tell the parts, and give up what does not follow the marks."""
        self.status.cpu_budget.note_step()
        self.memory.paging.allowance.note_step(self.memory.source.free_bytes)
        self.expects_marks = True
        self.persistent.end_step()
        self._validation.end()
        is_first = not self.recording.marks and self.status.settings.plan
        if is_first:
            self.steps.search = None  # steps that it found where there are no marks are none
            if self.status.phase is Phase.PLANNING:
                self.arenas.drop_schedule()
                self.steps.forget()
                self._next_plan.forget()
                self.status.phase = Phase.OBSERVING
        misses, hits = self.state.record.iterations.misses, self.state.record.follow.hits
        if self._is_planned and is_first and decisions.misses_much(misses, hits):
            self._drop_plan("the first plan did not follow the steps that are marked now")

    def expect_persistent(self) -> None:
        """What is allocated up to the next mark of a step is meant to last (an optimizer makes its state)."""
        with self.lock:
            self.steady.end()
            watching = self.status.phase is Phase.OBSERVING and self.status.settings.plan
            self.persistent.expect(watching=watching, planned=self._is_planned)

    def begin_in_child(self) -> None:
        """This process is a fork: other threads are gone, wherever they were; serve from the heap from now on."""
        self.memory.forked()
        self.arenas.forked()
        self.lock = self.memory.lock
        self.steady.end()
        self._next_plan.forget()
        self.state.arena.drop_schedule()
        self.state.write(recording=0, allocating_persistent=0)
        self.state.triggers.at_recorded(0)
        self.status.phase, self.status.note = Phase.RESTING, "a forked process is served without a plan"

    def drop_plan(self) -> None:
        """Go back to the heap for good; what lives in the arena stays valid until it is freed."""
        with self.lock:
            self.steady.end()
            if self.status.phase in (Phase.PLANNED, Phase.PLANNING):
                self.rest("the plan was dropped on request")
            self.status.phase = Phase.RESTING
            self.recording.end(self.status.settings)

    def watch_anew(self) -> None:
        with self.lock:
            self.steady.end()
            self.status.note = ""
            self.observe()

    # --- transitions

    @property
    def _is_planned(self) -> bool:
        return self.status.phase is Phase.PLANNED

    def observe(self) -> None:
        """Any phase -> OBSERVING, with a fresh record."""
        self.steady.end()
        self.shortage.forget_arena()
        self._validation.leave()
        self._observe(anew=True)

    def _observe(self, *, anew: bool) -> None:
        """Any phase -> OBSERVING, with a fresh record if `anew`, else with the one that was begun beside a plan."""
        self.status.phase = Phase.OBSERVING
        self._next_plan.forget()
        self._search.begin()
        self.status.is_settled = False
        if anew:
            self.recording.begin(persistent=self.persistent.begin(watching=self.status.settings.plan))
        else:
            self.state.triggers.at_recorded(1)

    def _follow(self, job: PlanJob, cursor: int, *, is_sure: bool = True) -> None:
        """OBSERVING or PLANNED -> PLANNING: follow a cycle until its plan is there, which a job makes or has made."""
        self.status.phase = Phase.PLANNING
        self._next_plan.make(job, cursor, is_sure=is_sure)

    def _follow_recorded(self, trace: "Trace", job: PlanJob, cursor: int, *, is_sure: bool = True) -> None:
        self.status.observed_steps = job.schedule.covered_requests // job.schedule.period_requests
        self.recording.kept = KeptTrace(trace)
        self._follow(job, cursor, is_sure=is_sure)

    def _follow_found(self, found: Found, job: PlanJob, cursor: int) -> None:
        self._follow_recorded(found.trace, job, cursor, is_sure=found.is_sure)
        if self.recording.marks:
            self.steps.follow_marks(found.trace, job.schedule, found.sizable, found.first)
            self.state.triggers.at_any_request()  # this is where a step begins

    def put_in_force(self, schedule: ArenaSchedule, plan: "Plan | None" = None, *, ask_after_misses: int = 0) -> bool:
        """Any phase -> PLANNED: serve what was admitted; False, and no change, if the device has no room for it.

        `plan` is what reports speak of. Once misses outnumber hits by `ask_after_misses` the plan is dropped; 0: never.
        """
        status, record = self.status, self.state.record
        hits, misses = record.follow.hits, self.state.num_unserved
        with status.cpu_budget.counted():
            if not self.arenas.put_in_force(schedule):
                return False
        status.earlier_hits, status.earlier_misses = status.earlier_hits + hits, status.earlier_misses + misses
        self._separate, status.steps_per_cycle = None, 1
        self.memory.paging.allowance.begin_plan()
        self._tidying.begin_plan()
        status.cpu_budget.note_plan()
        status.phase, status.num_plans = Phase.PLANNED, status.num_plans + 1
        status.planned_since_ns, status.note, status.plan = time.monotonic_ns(), "", plan
        self.full_device.begin_plan(ask_after_misses)
        return True

    def _drop_plan(self, note: str, *, is_part: bool = False) -> None:
        """PLANNED or PLANNING -> OBSERVING, or RESTING after too many plans; `is_part`: what repeats is longer."""
        if self.status.phase not in (Phase.PLANNED, Phase.PLANNING):
            return
        goes_on = self.status.note_dropped(note, self.state.record.iterations.iteration_count)
        follows_cycle = self.steps.schedules is None
        self._forget_plans()
        self.arenas.drop_schedule()
        record = self.state.record
        was_found = self.status.observed is not None and not self.recording.marks  # in this run
        was_no_step = is_part or decisions.was_no_step(record.iterations.misses, record.follow.hits)
        if follows_cycle and was_found and was_no_step:
            self._search.was_misled(is_part=is_part)
        if not goes_on:
            self.rest(f"{note} (after {self.status.num_plans} plans)")
            return
        self.status.note = note
        self.shortage.forget_arena()
        self._observe(anew=not self._validation.leave() or not is_part)

    def rest(self, note: str) -> None:
        self.status.phase, self.status.note = Phase.RESTING, note
        self.arenas.drop_schedule()
        self.memory.paging.end_gathering()
        self._settle()
        self.recording.end(self.status.settings)
        if not self.status.settings.keep_recording:
            self.state.forget_record()  # up to 160 MiB, which nobody looks at any more

    def _forget_plans(self) -> None:
        self._next_plan.forget()
        self.steps.forget()
        self.memory.paging.end_gathering()

    # --- looking for what repeats

    def _look(self) -> None:
        if (note := self._why_search_ends()) is not None:
            self.rest(note)
        if self._first_kinds_are_ready():
            self._serve_ready_kinds()
            if self.status.phase is not Phase.RESTING:
                self.steps.places.find()
        if self.status.phase is Phase.PLANNING and self._next_plan.is_at_begin:
            self._at_boundary()

    def _why_search_ends(self) -> str | None:
        """Look for a repeating step in the record and start planning it; why the device is to rest, if it is."""
        status = self.status
        if status.phase is not Phase.OBSERVING or not status.settings.plan:
            return None
        if self.recording.is_full:
            return "no repeating step was found before the record's table was full"
        if not self._search.is_due(status.settings, expects_marks=self.expects_marks) or status.cpu_budget.is_spent:
            return None
        if self.arenas.arena is not None and self.state.record.plan.arena_live:
            return None  # the last arena could not be dissolved: its schedule stays until its last block is gone
        try:
            with status.cpu_budget.counted():
                self._start_planning()
        except Exception as error:  # whatever it is, the program must not see it: it only marked a step
            if is_passing(error):
                raise
            return f"looking for a repeating step failed: {type(error).__name__}: {error}"
        return None

    def _start_planning(self) -> None:
        marks = self.recording.marks
        if not marks and not self._search.may_find():
            return
        if marks and not self.steps.recorded.recurring and not self._recur_in_part():
            return
        if marks and not (self.steps.recorded.make_a_cycle or self.steps.recur_in_any_order):
            self._settle_in_time()
            return
        found = self._search.find(self.status.settings)
        if found is None:
            return
        if found.schedule is not None:
            self.arenas.give_back()
            self._follow_found(found, PlanJob(found.schedule, self._streams), found.cursor)
        elif not marks:
            # steps of several kinds: their plan needs memory by pages
            may_be = self.memory.source.paged and self._search.shows_kinds
            if may_be and self.steps.look_for_unmarked_kinds(found.trace):
                self.steps.await_search(self.status.settings.plan_wait_seconds)
                self.state.triggers.at_recorded(self.state.record.log.num_sizable + 1)
        else:
            if self.steps.recur_in_any_order:
                self.steps.start_search(found.trace)
                self.steps.await_search(self.status.settings.plan_wait_seconds)
            self._settle_in_time()

    def _follow_aligned(self) -> bool:
        """No marked step recurs: whether the last ones are the same in a good part, which is planned then."""
        from stalloc.lifespans.aligned_steps import AlignedSteps

        num_steps = len(self.recording.step_events) - 1
        trace = self.recording.regular_trace(decisions.first_aligned(num_steps))
        aligned = AlignedSteps(trace)
        if not decisions.is_static_enough(aligned.static_share):
            if not decisions.may_align_some(num_steps):
                return False
            aligned = AlignedSteps(trace, some=True)  # others may be of another length, or evaluate before they train
            if aligned.num_steps < 2 or not decisions.is_static_enough(aligned.static_share):
                return False
        schedule = aligned.schedule()
        if self._is_planned:
            self.arenas.drop_schedule()
        else:
            self.arenas.give_back()
        job = PlanJob(schedule, self._streams, Between(*aligned.between()), aligned.with_dynamic(schedule))
        self._follow_recorded(trace, job, 0)
        self.steps.follow_aligned(schedule)
        self.state.triggers.at_any_request()
        return True

    def _are_aligned_again(self, missed: int, *, is_unknown: bool) -> bool:
        """Whether more steps, or later ones, show better what they have in common, of which so much was missed."""
        again = decisions.may_be_aligned_again(self.steps.recorded.count, missed, is_unknown=is_unknown)
        if not again or self.status.cpu_budget.is_spent:
            return False
        with self.status.cpu_budget.counted():
            return self._follow_aligned()

    @property
    def _streams(self) -> "Streams":
        return self.status.settings.streams if ordering() is not None else "separate"

    def _first_kinds_are_ready(self) -> bool:
        if self.status.phase is not Phase.OBSERVING or self.steps.search is None:
            return False
        if self.steps.search.done.is_set():
            return True
        if not self.recording.marks:
            self.state.triggers.at_recorded(self.state.record.log.num_sizable + decisions.first_scan_at())
        return False

    def _recur_in_part(self) -> bool:
        """No marked step recurs: plan what they have in common, or see whether they do without noise, or settle."""
        num_marks = len(self.recording.step_events)
        if self.status.settings.keep_recording:
            self._settle_in_time()
        elif decisions.may_be_aligned(num_marks - 1):
            self._follow_aligned()
        elif decisions.is_doubted(num_marks):
            return self.steps.recorded.leave_out_noise()
        else:
            self._settle_in_time()
        return False

    def _settle_in_time(self) -> None:
        if decisions.is_settled(len(self.recording.step_events)):
            self._settle()

    def _settle(self) -> None:
        if not (self.status.is_settled or self.state.record.policy.memory_is_short):
            self.status.is_settled = True
            if self.memory.source.paged:
                self.memory.paging.allowance.loosen()
            else:
                self.state.write(allocating_persistent=0)

    # --- at a boundary: the cycle that is followed begins anew

    def _at_boundary(self) -> None:
        if self._is_planned:
            if self._validation.is_over and self._judge_plan():
                return
            self._tidy()
            # pages that go from stream to stream in each iteration wait for the device: handovers wait for one event
            to_share = self._separate if self._tidying.moves_pages else None
            job = self._next_plan.take_shared(to_share) if to_share is not None else None
            if job is None:
                return
            self.arenas.drop_schedule()
            self._follow(job, 0)
        if self.status.phase is not Phase.PLANNING or (job := self._next_plan.take_made()) is None:
            return
        if (refusal := self._switch(job)) is not None:
            self.rest(refusal)
        del job  # and with it the schedule, which is large
        trim()

    def _tidy(self) -> None:
        plan, was_observed = self.status.plan, self.status.observed is not None
        # what the switch left behind has died meanwhile; a plan from a file may be one that a budget needs
        patience = decisions.most_misses(len(plan.schedule_size)) if plan is not None else 0
        self.state.triggers.after_misses(self.full_device.most_misses(patience) if was_observed else patience)
        self.state.triggers.after_iterations(self._tidying.at_boundary())
        if self._validation.is_on:
            self.state.triggers.at_boundary()

    def _switch(self, job: PlanJob) -> str | None:
        """Put a plan that was made in force, or try it, or another of its cycle, at a later boundary; else why not."""
        schedule, plan, record = job.admitted, job.plan, self.state.record
        if schedule is None or plan is None:
            return job.error or "planning failed"
        if not self.full_device.may_begin(schedule.arena_bytes):
            self.state.triggers.at_boundary()
            self._next_plan.job = job  # the schedule is followed on, and the boundary after the next mark tries again
            return None
        self.note_observed()
        if not record.hot.recording:
            self.state.forget_record()
        if self._ask_for_arena(schedule.arena_bytes):
            self._next_plan.job = job
            return None
        has_room = not self.memory.source.paged and self.memory.has_room(schedule.arena_bytes)
        if has_room and (dearer := self._dearer(schedule)):  # where pages move the switch holds no more than there was
            return dearer
        begun = record.follow.cursor - record.follow.cycle_start  # with marks, in any of its periods
        # a plan that was just made has to be far off before it goes
        if self.put_in_force(schedule, plan, ask_after_misses=decisions.most_misses(len(schedule.size))):
            self._separate, self.status.steps_per_cycle = job.schedule if job.may_share else None, job.periods
            begin, end = record.follow.cycle_start, record.follow.cycle_end
            self.state.arena.begin_step(begin, end, begin + begun % (end - begin))
            if not self.recording.step_times_ns:
                self._validation.begin()
            return None
        if job.may_share:
            self._follow(PlanJob(job.schedule, "share"), 0)  # a region for each stream is too much: with handovers
            return None
        return (
            f"an arena of {plan.peak_bytes} bytes does not fit beside the {record.statistics.reserved_bytes} bytes "
            "that hold live blocks"
        )

    def note_observed(self) -> None:
        state = self.state
        self.status.observed = Observed(state.allocated_peak_bytes, state.reserved_peak_bytes)
        self._release_unused()
        goes_on = bool(self.recording.marks) and self.steps.goes_on()
        self.recording.end(self.status.settings, goes_on=goes_on)

    def _release_unused(self) -> None:
        """Give back what is free beside the arena, which pages are not: they move to where they are needed."""
        if not self.memory.source.paged:
            self.memory.release_unused()

    def _ask_for_arena(self, arena_bytes: int) -> bool:
        if self.memory.source.paged:
            return False
        marked = bool(self.recording.marks or self.recording.step_times_ns)
        return self.shortage.ask_for_arena(arena_bytes, may_move=self.may_move and marked)

    def _dearer(self, schedule: ArenaSchedule) -> str | None:
        """Why the heap goes on serving, if the switch would hold far more than was needed so far; else None.

        What the steps carry over lies beside the arena until the next one is over, and keeps its segments. A part of
        them is usual; where it is nearly all, the plan gains nothing.
        """
        assert self.status.observed is not None
        needed = self.state.record.statistics.reserved_bytes + schedule.arena_bytes
        held = self.status.observed.reserved_peak_bytes
        if not decisions.is_dearer(needed, held):
            return None
        self.status.is_settled = True  # what the heap holds has served so far
        return f"the plan would reserve {needed} bytes, but no more than {held} were reserved without it"

    # --- at a mark: a step of the program ended

    def _end_step(self) -> None:
        self.full_device.note_step()
        self._serve_ready_kinds()
        steps, state, settings = self.steps, self.state, self.status.settings
        is_kept_only = settings.keep_recording and self.status.phase in (Phase.PLANNED, Phase.RESTING)
        steps.recorded.note(steps.places.name_of_followed(), counts=not is_kept_only)
        if self._is_planned:
            records = settings.plan and not settings.keep_recording
            missed, is_unknown = steps.watch.end_step(self.status.num_plans, records=records)
            figures = state.record.hot.iteration_allocated_peak, state.record.statistics.reserved_bytes
            if is_unknown and decisions.is_wasteful(*figures):
                self._release_unused()  # no iteration over the plan ends, after which unused segments go back
            if state.record.tables.gaps and records and self._are_aligned_again(missed, is_unknown=is_unknown):
                return
            steps.places.find()
            if steps.schedules is not None and state.triggers.boundary_is_asked:
                state.triggers.at_any_request()  # whichever kind of step comes
        elif self.status.phase is Phase.PLANNING:
            steps.places.find()
            if state.triggers.boundary_is_asked:
                state.triggers.at_any_request()  # in whichever period of its cycle
        if self.status.phase not in (Phase.PLANNED, Phase.PLANNING) or settings.keep_recording:
            return
        if steps.search_for_more(pages_move=self.memory.paging.allowance.never_rests):
            steps.await_search(settings.plan_wait_seconds)
            before = self.status.num_plans
            self._serve_ready_kinds()
            if self.status.num_plans != before:
                steps.places.find()

    def _serve_ready_kinds(self) -> None:
        search = self.steps.take_ready()
        if search is None or self.status.phase is Phase.RESTING:
            return
        self.steps.planned = {*search.names}
        self._release_unused()
        admitted, longest = search.admitted, max(len(kind.size) for kind in search.planned.kinds)
        assert admitted is not None
        arena_bytes = admitted.arena_bytes
        if not self.full_device.may_begin(arena_bytes) or self._ask_for_arena(arena_bytes):
            self.steps.search = search  # the next mark tries again
            return
        if not self._is_planned:
            self.note_observed()
        most_misses = decisions.most_misses(longest)
        if not self.put_in_force(admitted, search.planned.largest_plan, ask_after_misses=most_misses):
            self.steps.were_refused()
            if self.state.record.hot.mode != constants.MODE_PLANNED:
                self.rest("an arena for all kinds of steps does not fit beside live memory")
            return
        self.steps.follow(search, marked=bool(self.recording.marks))
        if not self.recording.marks:
            self.state.triggers.after_requests(decisions.judged_after(longest, has_kinds=True))

    def _follow_cycle(self) -> None:
        cycle, state = self.steps.cycles.take(), self.state
        schedule = cycle.job.admitted if cycle is not None else None
        if cycle is None or schedule is None or not self._is_planned or state.record.hot.has_handovers:
            return
        if self.memory.source.paged and self.full_device.may_begin(schedule.arena_bytes):
            self.arenas.drop_schedule()
            cursor = (state.record.log.num_sizable - cycle.found.first) % cycle.job.schedule.cycle_length
            self._follow_found(cycle.found, cycle.job, cursor)
            self.steps.recorded.begin_anew()  # kinds that came before it are over

    # --- doubting a plan

    def _doubt_plan(self) -> None:
        """Requests were not served from the plan, so many or for so many iterations that it is to be judged."""
        if self.state.record.triggers.ask_after_misses and not self.recording.step_times_ns:  # it was to be judged now
            self._judge_plan()
        elif not self._is_patient():
            self.expects_marks &= not self.recording.marks_are_overdue
            self._drop_plan("the program left the plan and did not return to it")

    def _is_patient(self) -> bool:
        """Whether the plan stays although much is not served from it: one for what the program does is being made.

        Or the program marks steps, and did not leave the plan in many in a row: the next one may be another again.
        """
        record = self.state.record
        if record.triggers.ask_after_misses or self.full_device.may_fill():
            return False
        marked = bool(self.recording.step_times_ns) and not self.recording.marks_are_overdue
        if self.steps.search is None and not (marked and self.steps.watch.may_be_patient):
            return False
        self.state.triggers.after_misses(2 * record.follow.misses_over_matches)
        return True

    def _judge_plan(self) -> bool:
        """A plan that was found without marks was in force for some iterations; whether it goes."""
        is_part = self._is_part()
        if is_part:
            self._drop_plan("its cycle was only a part of what the program repeats", is_part=True)
        return is_part

    def _is_part(self) -> bool:
        """Whether a cycle found without marks is a part of what repeats; while nobody knows, validation goes on.

        The record beside it has to show a longer one, or to be long enough for kinds of steps, where much is missed.
        Where it ended before anything was missed it begins again.
        """
        validation, record = self._validation, self.state.record
        lost = record.iterations.misses + (record.iterations.conflicts if self.steps.schedules is not None else 0)
        may_be = self._is_planned and not self.recording.step_times_ns
        seems = may_be and decisions.seems_a_part(lost, record.follow.hits)  # a layer's: it does not know what comes by
        if not (seems or validation.went_on):
            validation.end()
            return False
        if not validation.is_on:
            if self.steps.schedules is not None or self.status.settings.keep_recording:
                return True
            validation.begin()
            return False
        with self.status.cpu_budget.counted():
            if self._search.shows_longer_cycle():
                return True
        if not self._search.is_long:
            validation.go_on()
            return False
        if seems and decisions.misses_much(record.iterations.misses, record.follow.hits):
            return True
        validation.end()
        return False

    # --- a plan of an earlier run

    def use(self, plan: "Plan") -> None:
        """Serve a plan from the very first request. Raises PlanError if it is no plan for a program on this device."""
        schedule = admit([plan], cycle_only=False)
        if schedule.cross_streams and ordering() is None:
            raise PlanError(
                "the plan hands memory from stream to stream, but no driver orders streams here: plan it without that."
            )
        if self.state.record.total.num_allocs:
            raise PlanError("a plan has to be in force before the first allocation: install stalloc earlier.")
        self.recording.end(self.status.settings)
        # it is given up sooner than one that was just made, before much of another program lives in its arena
        if not self.put_in_force(schedule, plan, ask_after_misses=decisions.most_misses(0)):
            free, total = self.memory.device.memory_info()
            raise PlanError(
                f"the plan needs an arena of {plan.peak_bytes} bytes, device {plan.device} has {free} of {total} "
                "bytes free: close what uses it, or plan a smaller step."
            )

    def hold_to_budget(self, budget_bytes: int) -> None:
        """Before the first allocation: take no more from the device, and keep a plan that the budget was tried with.

        What the program does beside it is served by the heap, and the next step that is planned has its addresses
        again, as when it was tried; it ends where a request could not be served otherwise, or the program has left it.
        """
        self.memory.keep_within(budget_bytes)
        self.steps.keep_plan = self._is_planned

    def cap(self, cap_bytes: int, evict: Evict) -> None:
        """Take no more than a cap from the device, `evict` what does not fit; 0: as much as the device has."""
        if cap_bytes:
            self.memory.keep_within(cap_bytes)
        self.shortage.eviction.begin(cap_bytes, evict)

    def end_cap(self) -> None:
        self.shortage.eviction.end()
        self.memory.keep_within(0)

    def serve_recording(self, schedule: ArenaSchedule) -> bool:
        """Serve the plan of a whole recording from the first request on, in one block; False if it does not fit."""
        self.state.write(allocating_persistent=0, recording=0)
        self.state.triggers.at_recorded(0)
        memory = self.memory.malloc(schedule.arena_bytes) if schedule.arena_bytes else None
        self.status.phase = Phase.PLANNED if memory is not None else Phase.RESTING
        if memory is not None:
            self.state.arena.install(schedule)
            self.arenas.serve_from(memory, schedule.arena_bytes)
        return memory is not None
