"""Watching a program: its record is searched for a step that repeats, and that step's plan is made.

Contract: what goes wrong in a look is a reason to rest, never an error of the program.
"""

from typing import TYPE_CHECKING

from stalloc.core import constants
from stalloc.device.ordering import ordering
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.full_device import FullDevice
from stalloc.runtime.interruptions import is_passing
from stalloc.runtime.lasting import Lasting
from stalloc.runtime.looking import Found, Looking
from stalloc.runtime.next_plan import NextPlan
from stalloc.runtime.planning_job import PlanJob
from stalloc.runtime.probation import Probation
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Phase
from stalloc.runtime.status import Status
from stalloc.runtime.steps import Steps
from stalloc.runtime.strands import Strands
from stalloc.runtime.tidying import Tidying
from stalloc.trace.packing import KeptTrace

if TYPE_CHECKING:
    from stalloc.trace import Trace

_DOUBT_STEPS = 4, 6, 12, 24, 48  # marked steps of which none recurs, after which it is asked what keeps them from it
_THREADS_DOUBTED = 6  # of these, before which threads are not told apart
_STRAYS = 64  # a ring is of a part of a step if it does not know one request in so many
_MISSED = 8  # one request in so many: less is no reason to leave a ring for what may be steps of several kinds
_POLL_REQUESTS = 64  # from one look at a search that is not over to the next
_SETTLE_STEPS = 10  # marked steps without a plan after which large requests share one segment


class Watching:
    """The watch over one device's program."""

    def __init__(
        self,
        status: Status,
        arenas: Arenas,
        recording: Recording,
        steps: Steps,
        lasting: Lasting,
        tidying: Tidying,
        next_plan: NextPlan,
    ) -> None:
        self._status, self._arenas, self._state = status, arenas, arenas.state
        self._recording, self._steps, self._lasting, self._tidying = recording, steps, lasting, tidying
        self._next_plan = next_plan
        self._looking = Looking(self._state, recording)

    def begin(self, *, anew: bool = True) -> None:
        """Watch from here on: with a fresh record, or with the one that was begun beside a plan, if not `anew`."""
        self._status.phase = Phase.OBSERVING
        self._next_plan.forget()
        self._looking.begin()
        self._tidying.settled = False
        if anew:
            self._recording.begin(lasting=self._lasting.begin(watching=self._status.settings.plan))
        else:
            self._state.write(check_at=1)

    @property
    def expects_marks(self) -> bool:
        """Whether the program marks steps, or has an optimizer, whose steps will be marked."""
        return bool(self._state.record.expects_marks)

    @expects_marks.setter
    def expects_marks(self, expects: bool) -> None:
        self._state.record.expects_marks = expects

    @property
    def settled(self) -> bool:
        """So many steps were seen without one that repeats that what the heap holds is held for good."""
        return self._tidying.settled

    def was_misled(self, *, is_part: bool) -> None:
        """The ring in force is given up: only a longer one can be a step if it is a part of it, or missed much."""
        record, found = self._state.record, self._status.observed is not None  # in this run
        if found and (is_part or 4 * record.misses > record.hits) and not self._recording.marks:
            self._looking.was_misled(is_part=is_part)

    @property
    def _seems_a_part(self) -> bool:
        """Whether a ring found without marks seems to be of a layer, not of a step: it does not know what comes by."""
        record, is_served = self._state.record, self._status.phase is Phase.PLANNED
        lost = record.misses + (record.conflicts if self._steps.tapes is not None else 0)
        return is_served and not self._recording.step_times_ns and _STRAYS * lost > record.hits

    def is_part(self, probation: Probation) -> bool:
        """Whether a ring found without marks is a part of what repeats; it stays on probation while that is not known.

        The record beside it has to show a longer one, or to be long enough for kinds of steps, where much is missed.
        Where it ended before anything was missed it begins again.
        """
        seems = self._seems_a_part
        if not (seems or probation.went_on):
            probation.end()
            return False
        if not probation.is_on:
            if self._steps.tapes is not None or self._status.settings.keep_recording:
                return True
            probation.begin()
            return False
        with self._status.effort.counted():
            if self._looking.shows_longer_ring():
                return True
        if not self._looking.is_long:
            probation.go_on()
            return False
        if seems and _MISSED * self._state.record.misses > self._state.record.hits:
            return True
        probation.end()
        return False

    def note_step(self, strands: Strands, probation: Probation) -> str | None:
        """The program marks a step: why the plan in force goes; None: it stays."""
        memory = self._arenas.memory
        self._status.effort.note_step()
        memory.paging.allowance.note_step(memory.source.free_bytes)
        self.expects_marks = True
        self._lasting.end_step()
        probation.end()
        return self._why_plan_goes(strands)

    def _why_plan_goes(self, strands: Strands) -> str | None:
        """The same; a plan in the making that was found without marks is left."""
        status, record = self._status, self._state.record
        is_first = not self._recording.marks and status.settings.plan
        if is_first:
            self._steps.search = None  # steps that it found where there are no marks are none
            if status.phase is Phase.PLANNING:
                self._arenas.drop_tape()
                self._steps.forget()
                status.phase = Phase.OBSERVING
                self._next_plan.forget()
        if status.phase is not Phase.PLANNED:
            return None
        if is_first and 10 * record.misses > record.hits:
            return "the first plan did not follow the steps that are marked now"
        if strands.follow_something_else:
            return "its threads do something else now"
        return "most of its steps were new to it" if self._steps.novelty.ends_plan() else None

    def look(self) -> str | None:
        """Look for a repeating step in the record and start planning it; why the device is to rest, if it is.

        Called at marks and every so often.
        """
        if self._status.phase is not Phase.OBSERVING or not self._status.settings.plan:
            return None
        if self._recording.is_full:
            return "no repeating step was found before the record's table was full"
        if not self._looking.is_due(self._status.settings, expects_marks=self.expects_marks):
            return None
        if self._status.effort.is_spent:
            return None
        if self._arenas.arena is not None and self._state.record.arena_live:
            return None  # the last arena could not be dissolved: its tape stays until its last block is gone
        try:
            with self._status.effort.counted():
                self._start_planning()
        except Exception as error:  # whatever it is, the program must not see it: it only marked a step
            if is_passing(error):
                raise
            return f"looking for a repeating step failed: {type(error).__name__}: {error}"
        return None

    def _start_planning(self) -> None:
        if not self._recording.marks and not self._looking.may_find():
            return
        if self._recording.marks and not self._steps.recorded.recurring and not self._recur_in_part():
            return
        if self._recording.marks and not self._steps.may_be_planned:
            self._settle()
            return
        found = self._looking.find(self._status.settings)
        if found is None:
            return
        if found.tape is None:
            if not self._recording.marks:
                self._look_for_unmarked_kinds(found.trace)
            else:
                if self._steps.look_for_kinds(found.trace):
                    self._steps.await_search(self._status.settings.plan_wait_seconds)
                self._settle()
            return
        self._arenas.give_back()
        streams = self._status.settings.streams if ordering() is not None else "separate"
        self._follow(found, PlanJob(found.tape, streams), found.cursor)

    def _follow(self, found: Found, job: PlanJob, cursor: int) -> None:
        """Follow a ring that was found, whose plan a job is to make or has made."""
        self._status.phase = Phase.PLANNING
        self._status.observed_steps = job.tape.covered_requests // job.tape.period_requests
        self._recording.kept = KeptTrace(found.trace)
        self._next_plan.make(job, cursor, is_sure=found.is_sure)
        if self._recording.marks:
            self._steps.follow_marks(found.trace, job.tape, found.sizable, found.first)
            self._state.record.ask_at_boundary = constants.AT_ANY_REQUEST  # this is where a step begins

    def follow_cycle(self, full_device: FullDevice) -> None:
        """At a mark: if the steps in force were found to make a cycle, serve it from the next request on."""
        cycle, state = self._steps.cycles.take(), self._state
        tape = cycle.job.admitted if cycle is not None else None
        if cycle is None or tape is None or self._status.phase is not Phase.PLANNED or state.record.has_handovers:
            return
        if self._arenas.memory.source.paged and full_device.may_begin(tape.arena_bytes):
            self._arenas.drop_tape()
            cursor = (state.record.num_sizable - cycle.found.first) % cycle.job.tape.ring_length
            self._follow(cycle.found, cycle.job, cursor)
            self._steps.recorded.begin_anew()  # kinds that came before it are over

    def is_patient(self, full_device: FullDevice) -> bool:
        """Whether the plan stays although much is not served from it: one for what the program does is being made.

        Or the program marks steps, and did not leave the plan in many in a row: the next one may be another again.
        """
        record = self._state.record
        if record.ask_after_misses or full_device.may_fill():
            return False
        marked = bool(self._recording.step_times_ns) and not self._recording.marks_are_overdue
        if self._steps.search is None and not (marked and self._steps.misses.are_few):
            return False
        record.ask_after_misses = 2 * record.excess_misses
        return True

    def _look_for_unmarked_kinds(self, trace: "Trace") -> None:
        """See whether the record consists of steps of several kinds; their plan needs memory by pages."""
        if not self._arenas.memory.source.paged or not self._looking.shows_kinds:
            return
        if self._steps.look_for_unmarked_kinds(trace):
            self._steps.await_search(self._status.settings.plan_wait_seconds)
            self._state.record.check_at = self._state.record.num_sizable + 1

    def first_kinds_are_ready(self) -> bool:
        """Whether plans of kinds of steps are made, and none is in force."""
        if self._status.phase is not Phase.OBSERVING or self._steps.search is None:
            return False
        if self._steps.search.done.is_set():
            return True
        if not self._recording.marks:
            self._state.record.check_at = self._state.record.num_sizable + _POLL_REQUESTS
        return False

    def _recur_in_part(self) -> bool:
        """No marked step recurs: whether they do without requests of any size.

        If not, see whether a thread is to blame, or take what is held as held for good.
        """
        num_steps = len(self._recording.step_events)
        if num_steps not in _DOUBT_STEPS or self._status.settings.keep_recording:
            self._settle()
        elif self._steps.recorded.leave_out_strays():
            self._steps.novelty.forget()
            return True
        elif num_steps >= _THREADS_DOUBTED and self._recording.leave_out_threads():
            self._steps.forget()
            self._steps.novelty.forget()
        return False

    def _settle(self) -> None:
        if len(self._recording.step_events) >= _SETTLE_STEPS:
            self._tidying.settle()
