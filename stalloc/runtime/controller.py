"""One device under stalloc: watch the program, plan its steady step in the background, switch, recover.

The compiled core serves requests; this module is where it turns when it needs Python: for a segment, a look at what was
recorded, the boundary of a step, memory that other streams still use. It holds the phase that a device is in, and asks
its parts. Contract: no method raises into the core; a failure of any of them leaves the heap serving.
"""

from typing import TYPE_CHECKING

from stalloc.core import constants
from stalloc.core.host_memory import trim
from stalloc.device import Device
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.captures import Captures
from stalloc.runtime.effort import Effort
from stalloc.runtime.interruptions import is_interruption, is_passing
from stalloc.runtime.lasting import Lasting
from stalloc.runtime.memory import DeviceMemory
from stalloc.runtime.next_plan import NextPlan
from stalloc.runtime.paged_arena import back
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.runtime.serving import Refusal, Serving
from stalloc.runtime.shortage import Shortage
from stalloc.runtime.sources import Source
from stalloc.runtime.standing_aside import StandingAside
from stalloc.runtime.status import Status
from stalloc.runtime.steady_marks import SteadyMarks
from stalloc.runtime.steps import Steps
from stalloc.runtime.strands import Strands
from stalloc.runtime.tidying import Tidying
from stalloc.runtime.watching import Watching
from stalloc.trace import MARK_STEP

if TYPE_CHECKING:
    from stalloc.runtime.planning_job import Planner
    from stalloc.runtime.poison_watch import Watch


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
        """`slow_function` is the address that the core enters Python by; `planner` stands in for `plan_tape`."""
        self.device = device
        self.memory = DeviceMemory(device, source, slow_function, watch)
        self.state, self.lock = self.memory.state, self.memory.lock
        self.arenas = Arenas(self.memory)
        self.captures = Captures(self.memory)
        self.recording = Recording(device, self.state)
        self.status = Status(settings, Effort(settings.max_effort))
        self.steps = Steps(self.state, self.recording, self.status.effort)
        self.lasting = Lasting(self.memory, self.recording)
        self.shortage = Shortage(self.arenas, self.recording, self.status)
        self._tidying = Tidying(self.arenas, self.status.effort)
        self.strands = Strands(self.status, self.memory, self.recording, self.steps)
        self.serving = Serving(self.status, self.arenas, self.recording, self.steps, self.shortage, self._tidying)
        self.next_plan = NextPlan(self.status, self.arenas, self.recording, planner)
        self.watching = Watching(
            self.status, self.arenas, self.recording, self.steps, self.lasting, self._tidying, self.next_plan
        )
        self._aside = StandingAside(self.status, self.arenas, self.recording)
        told = self.status.effort, self.memory.paging.allowance, self.serving.full_device, self.lasting, self._aside
        self.steady = SteadyMarks(self.memory, self.recording, self.steps, told)
        self.observe()

    def help(self, request: int, argument: int) -> bool:
        """Do what the core asks for; False means that there is no memory."""
        reason, detail = request & ((1 << constants.REASON_BITS) - 1), request >> constants.REASON_BITS
        with self.lock, self.memory.serving():
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
                if not self._aside.begins():
                    back(self.arenas, detail)
                self._rest_if_refused()
            elif reason == constants.AT_BOUNDARY:
                if self.memory.is_capturing:
                    self.state.record.ask_at_boundary = 1
                else:
                    self._at_boundary()
            elif reason == constants.CHECK:
                if self.memory.is_capturing:
                    self.state.record.check_at = 1
                else:
                    self._look()
            elif reason == constants.STALE:
                self._doubt_plan()
            elif reason == constants.NEED_EVENTS:
                self.memory.deferred.add_events()
            elif reason in (constants.POLL, constants.POLL_FOR_PLACE):
                self.memory.free_deferred()
        return True

    def _rest_if_refused(self) -> None:
        """Follow no plan once the driver gives no pages any more: an arena would have none."""
        refusal = self.memory.source.refusal
        if refusal and self.status.phase is not Phase.RESTING:
            self.rest(f"the driver refused memory by pages: {refusal}")

    def _add_segment(self, pool: int, size_bytes: int) -> bool:
        expects_marks = self.watching.expects_marks
        if self.memory.free_deferred() or self.lasting.ends_here(expects_marks=expects_marks) or self._aside.begins():
            return True  # the core asks again, if it needs to
        is_planned = self.status.phase is Phase.PLANNED
        if is_planned and not self.steps.keep_plan and self.serving.full_device.is_left(size_bytes):
            self._drop_plan("the program left the plan, and fills the device")
        planned, record = self.status.phase is Phase.PLANNED, self.state.record
        if planned:
            record.ask_at_boundary = max(record.ask_at_boundary, 1)  # to give it back when it is no longer used
        served = self.shortage.add_segment(pool, size_bytes, planned=planned)
        if not served and planned and self.shortage.is_enough_in_pieces(size_bytes):
            self._drop_plan("memory ran out beside the plan")  # then what is free in its arena is one with the rest
            served = self.shortage.add_segment(pool, size_bytes, planned=False)
        self._rest_if_refused()
        return served

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
        self.state.arena.drop_tape()
        self._forget_plans()
        self.arenas.match()
        if goes_on:
            self.arenas.drop_tape()
            self.observe()
        else:
            self.rest(f"{type(error).__name__}: {error}")

    def mark(self, kind: int, name: str) -> None:
        """Note a mark of the program (trace.MARK_STEP, …)."""
        if kind != MARK_STEP or not self.steady.ends_step(name):
            self.hear_mark(kind, name)

    def hear_mark(self, kind: int, name: str) -> None:
        """The same for one that is not of a steady step: if it is of a step, look for a plan."""
        with self.lock, self.memory.serving():
            self.steady.end()
            self.recording.num_planned += kind == MARK_STEP and self.status.phase is Phase.PLANNED
            if kind == MARK_STEP and (note := self.watching.note_step(self.strands, self.serving.probation)):
                self._drop_plan(note)
            self.recording.note_mark(kind, name)
            if kind == MARK_STEP:
                try:
                    if not self.strands.end_step(self.serving.serve_strands):
                        self._heed(self.serving.end_step())
                        self._aside.end()
                        self.watching.follow_cycle(self.serving.full_device)
                except Exception as error:  # whatever it is, the program must not see it: it only marked a step
                    if is_interruption(error):
                        raise
                    self.rest(f"following the steps failed: {type(error).__name__}: {error}")
                self._look()
                if self.memory.poison is not None:
                    self.memory.poison.check()
                elif self.status.phase is Phase.PLANNED and self.strands.is_one and self._aside.is_far:
                    self.steady.begin()

    def expect_lasting(self) -> None:
        """What is allocated up to the next mark of a step is meant to last (an optimizer makes its state)."""
        with self.lock:
            self.steady.end()
            watching = self.status.phase is Phase.OBSERVING and self.status.settings.plan
            self.lasting.expect(watching=watching, planned=self.status.phase is Phase.PLANNED)

    def begin_in_child(self) -> None:
        """This process is a fork: other threads are gone, wherever they were; serve from the heap from now on."""
        self.memory.forked()
        self.arenas.forked()
        self.lock = self.memory.lock
        self.steady.end()
        self.next_plan.forget()
        self.state.arena.drop_tape()
        self.state.write(recording=0, check_at=0, allocating_persistent=0)
        self.status.phase, self.status.note = Phase.RESTING, "a forked process is served without a plan"

    def observe(self) -> None:
        """Watch from here on."""
        self.steady.end()
        self.shortage.forget_arena()
        self.serving.probation.leave()
        self.watching.begin()

    def _look(self) -> None:
        one = not self.strands.are_apart
        if one and (note := self.watching.look()) is not None:
            self.rest(note)
        if one and self.watching.first_kinds_are_ready():
            self._heed(self.serving.serve_first_kinds())
        if self.next_plan.is_at_begin:
            self._at_boundary()

    def rest(self, note: str) -> None:
        """Leave everything to the heap, and say why."""
        self.status.phase, self.status.note = Phase.RESTING, note
        self.arenas.drop_tape()
        self.memory.paging.end_gathering()
        self._tidying.settle()
        self.recording.end(self.status.settings)

    def _heed(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.rest(refusal.note)

    def _at_boundary(self) -> None:
        if self.status.phase is Phase.PLANNED:
            waits = self.steps.waiting is not None
            if (not waits and self.serving.moves_in_pass()) or (self.serving.probation.is_over and self._judge_plan()):
                return
            if waits:
                self._heed(self.serving.serve_waiting_kinds())
            elif not self.serving.at_boundary():
                self._drop_plan("somebody else took the memory of the arena")
            if waits or not self.next_plan.leaves_to_share(self.serving.to_share):
                return
        if (job := self.next_plan.take_made()) is None:
            return
        refusal = self.serving.switch(job)
        if refusal is None or not self.next_plan.outlasts(refusal, job):
            self._heed(refusal)
        del job  # and with it the tape, which is large
        trim()

    def _doubt_plan(self) -> None:
        """Requests were not served from the plan, ever more of them or after so many passes that it is to be judged."""
        if self.state.record.ask_after_misses and not self.recording.step_times_ns:  # it was to be judged now
            self._judge_plan()
        elif not self.watching.is_patient(self.serving.full_device):
            self.watching.expects_marks &= not self.recording.marks_are_overdue
            self._drop_plan("the program left the plan and did not return to it")

    def _judge_plan(self) -> bool:
        """A plan that was found without marks was in force for some passes; whether it goes."""
        is_part = self.watching.is_part(self.serving.probation)
        if is_part:
            self._drop_plan("its ring was only a part of what the program repeats", is_part=True)
        return is_part

    def _drop_plan(self, note: str, *, is_part: bool = False) -> None:
        """Go back to the heap and, unless there were too many plans, watch anew; `is_part`: what repeats is longer."""
        if self.status.phase not in (Phase.PLANNED, Phase.PLANNING):
            return
        goes_on = self.status.note_dropped(note, self.state.record.step_count)
        follows_ring = self.steps.tapes is None
        self._forget_plans()
        self.arenas.drop_tape()
        if self.state.record.conflicts > self.state.record.misses:
            self.arenas.old_arena = []  # something lives on there for long: the next plan gets another arena
        if follows_ring:
            self.watching.was_misled(is_part=is_part)
        if not goes_on:
            self.rest(f"{note} (after {self.status.num_plans} plans)")
            return
        self.status.note = note
        self.shortage.forget_arena()
        self.watching.begin(anew=not self.serving.probation.leave() or not is_part)

    def _forget_plans(self) -> None:
        self.next_plan.forget()
        self.steps.forget()
        self.strands.forget()
        self.memory.paging.end_gathering()

    def drop_plan(self) -> None:
        """Go back to the heap for good; what lives in the arena stays valid until it is freed."""
        with self.lock:
            self.steady.end()
            if self.status.phase in (Phase.PLANNED, Phase.PLANNING):
                self.rest("the plan was dropped on request")
            self.status.phase = Phase.RESTING
            self.recording.end(self.status.settings)

    def watch_anew(self) -> None:
        """Watch from here on, whatever there was before."""
        with self.lock:
            self.steady.end()
            self.status.note = ""
            self.observe()
