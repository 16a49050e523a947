"""A plan is put in force, or a reason is found why it is not; and what is done at the boundaries while it serves.

Contract: a plan that finds no room, or would hold far more than the program needs without it, leaves what served
before in place, and whoever asked is told why.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalloc.core import constants
from stalloc.core.arena_tape import ArenaTape
from stalloc.core.constants import MANY_DISPLACED
from stalloc.device.ordering import ordering
from stalloc.errors import PlanError
from stalloc.runtime.admission import admit
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.full_device import FullDevice
from stalloc.runtime.kind_search import KindSearch
from stalloc.runtime.planning_job import PlanJob
from stalloc.runtime.probation import Probation
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Observed, Phase
from stalloc.runtime.shortage import Shortage
from stalloc.runtime.status import Status
from stalloc.runtime.steps import Steps
from stalloc.runtime.tidying import Tidying

if TYPE_CHECKING:
    from stalloc.lifespans.tape import Tape
    from stalloc.planner import Plan
    from stalloc.runtime.strand_search import StrandSearch

_DOUBT_PASSES = 8  # over several kinds of steps found without marks, after which they are judged
_DOUBT_REQUESTS = 1024  # that much is served first: where the program stands has to show
_DOUBT = 256  # requests by which misses may outnumber hits before a plan from a file is dropped
_WASTE = 1.1  # reserved over the peak of the step, beyond which segments go back after a step that is not known
_DEARER, _DEARER_BYTES = 1.5, 16 << 20  # times, and bytes, by which a switch may hold more than what came before it


@dataclass(frozen=True)
class Refusal:
    """Why a plan was not put in force."""

    note: str
    lacks_room: bool = False  #: the arena does not fit
    for_now: bool = False  #: there may be room at a later boundary


class Serving:
    """The plans of one device on their way into force."""

    def __init__(
        self,
        status: Status,
        arenas: Arenas,
        recording: Recording,
        steps: Steps,
        shortage: Shortage,
        tidying: Tidying,
    ) -> None:
        self._status, self._arenas, self._memory, self._state = status, arenas, arenas.memory, arenas.state
        self._recording, self._steps, self._shortage, self._tidying = recording, steps, shortage, tidying
        self.probation = Probation(status, arenas.state, recording)
        self._separate: Tape | None = None  # of the plan in force, if it keeps streams apart that could share memory
        self.full_device = FullDevice(self._memory)
        self.may_move = False  #: what lives may be moved at marks, so that room can be asked for
        self._began = time.monotonic()

    def note_observed(self) -> None:
        """Keep what the steps before the plan were like, and end watching."""
        state = self._state
        self._status.observed = Observed(
            allocated_peak_bytes=state.allocated_peak_bytes,
            reserved_peak_bytes=state.reserved_peak_bytes,
            num_requests=state.record.total.num_allocs,
            seconds=time.monotonic() - self._began,
        )
        self._release_unused()
        goes_on = bool(self._recording.marks) and self._steps.goes_on()
        self._recording.end(self._status.settings, goes_on=goes_on)

    def _release_unused(self) -> None:
        """Give back what is free beside the arena, which pages are not: they move to where they are needed."""
        if not self._memory.source.paged:
            self._memory.release_unused()

    def _ask_for_arena(self, arena_bytes: int) -> bool:
        """Whether an arena waits for a mark at which there may be room."""
        if self._memory.source.paged:
            return False
        marked = bool(self._recording.marks or self._recording.step_times_ns)
        return self._shortage.ask_for_arena(arena_bytes, may_move=self.may_move and marked)

    def switch(self, job: PlanJob) -> Refusal | None:
        """Put the plan of a ring in force, which a job has made."""
        tape, plan = job.admitted, job.plan
        if tape is None or plan is None:
            return Refusal(job.error or "planning failed")
        if not self.full_device.may_begin(tape.arena_bytes):
            self._state.record.ask_at_boundary = 1
            return Refusal("", for_now=True)
        self._steps.unroll(job.tape)
        self.note_observed()
        if not self._state.record.recording:
            self._state.forget_record()
        if self._ask_for_arena(tape.arena_bytes):
            return Refusal("", for_now=True)
        has_room = not self._memory.source.paged and self._memory.has_room(tape.arena_bytes)
        if has_room and (dearer := self._dearer(tape)):  # where pages move the switch holds no more than there was
            return dearer
        begun = self._state.record.cursor - self._state.record.ring_start  # with marks, in any of its periods
        # a plan that was just made has to be far off before it goes
        if self.put_in_force(tape, plan, ask_after_misses=8 * len(tape.size) + 1024):
            self._separate, self._status.steps_per_ring = job.tape if job.may_share else None, job.periods
            begin, end = self._state.record.ring_start, self._state.record.ring_end
            self._state.arena.begin_step(begin, end, begin + begun % (end - begin))
            if not self._recording.step_times_ns:
                self.probation.begin()
            return None
        return Refusal(
            f"an arena of {plan.peak_bytes} bytes does not fit beside the {self._state.record.reserved_bytes} bytes "
            "that hold live blocks",
            lacks_room=True,
        )

    def _dearer(self, tape: ArenaTape) -> Refusal | None:
        """Why the heap goes on serving, if the switch would hold far more than was needed so far; else None.

        What the steps hand on lies beside the arena until the next one is over, and keeps its segments. A part of them
        is usual; where it is nearly all, the plan gains nothing.
        """
        assert self._status.observed is not None
        needed = self._state.record.reserved_bytes + tape.arena_bytes
        held = self._status.observed.reserved_peak_bytes
        if needed <= _DEARER * held + _DEARER_BYTES:
            return None
        self._tidying.settled = True  # what the heap holds has served so far
        return Refusal(f"the plan would reserve {needed} bytes, but no more than {held} were reserved without it")

    def serve_ready_kinds(self) -> Refusal | None:
        """At a mark: put plans of kinds of steps in force that were made meanwhile."""
        ready = self._steps.take_ready()
        if ready is None:
            return None
        return self._serve_kinds(ready)

    def end_step(self) -> Refusal | None:
        """A step ended: what it was, where the tape goes on, and whether there are kinds of steps to be planned."""
        self.full_device.note_step()
        refusal = self.serve_ready_kinds()
        steps, state, settings = self._steps, self._state, self._status.settings
        steps.note_step()
        if self._status.phase is Phase.PLANNED:
            records = settings.plan and not settings.keep_recording
            is_unknown = steps.at_planned_mark(self._status.num_plans, records=records)
            if is_unknown and _WASTE * state.record.step_allocated_peak < state.record.reserved_bytes:
                self._release_unused()  # no pass over the plan ends, after which unused segments go back
            steps.places.find()
            if steps.tapes is not None and state.record.ask_at_boundary:
                state.record.ask_at_boundary = constants.AT_ANY_REQUEST  # whichever kind of step comes
        elif self._status.phase is Phase.PLANNING:
            steps.places.find()
            if state.record.ask_at_boundary:
                state.record.ask_at_boundary = constants.AT_ANY_REQUEST  # in whichever period of its ring
        if self._status.phase not in (Phase.PLANNED, Phase.PLANNING) or settings.keep_recording:
            return refusal
        if steps.search_for_more(pages_move=self._memory.paging.allowance.never_rests):
            steps.await_search(settings.plan_wait_seconds)
            before = self._status.num_plans
            refusal = self.serve_ready_kinds()
            if self._status.num_plans != before:
                steps.places.find()
        return refusal

    def serve_first_kinds(self) -> Refusal | None:
        """Put plans of kinds of steps in force, at a mark or, without any, wherever in one of them the program is."""
        ready = self._steps.take_ready()
        refusal = self._serve_kinds(ready) if ready is not None else None
        self._steps.places.find()
        return refusal

    def _serve_kinds(self, search: KindSearch) -> Refusal | None:
        """Put the plans of several kinds of steps in force; None too if the plan before them goes on serving."""
        if self._status.phase is Phase.RESTING:
            return None
        self._steps.are_planned(search)
        self._release_unused()
        arena_bytes = search.served.arena_bytes
        if not self.full_device.may_begin(arena_bytes) or self._ask_for_arena(arena_bytes):
            self._steps.search = search  # the next mark tries again
            return None
        if self._status.phase is not Phase.PLANNED:
            self.note_observed()
        if not self.put_in_force(search.served, search.plan, ask_after_misses=64 * search.longest + 1024):
            self._steps.were_refused()
            serves = self._state.record.mode == constants.MODE_REPLAY
            return None if serves else Refusal("an arena for all kinds of steps does not fit beside live memory")
        if self._recording.marks:
            self._steps.follow(search)
        else:
            self._steps.follow_unmarked(search)
            judged_after = max(_DOUBT_PASSES * search.longest, _DOUBT_REQUESTS)
            self._state.record.doubt_at = self._state.record.total.num_allocs + judged_after
        return None

    def serve_strands(self, search: "StrandSearch") -> bool:
        """Put the plans of several threads in force; False if there is no room, and what served before goes on."""
        assert search.admitted is not None
        arena_bytes = search.admitted.arena_bytes
        if not self.full_device.may_begin(arena_bytes):
            return False
        if self._status.phase is not Phase.PLANNED:
            self.note_observed()
        self._state.forget_record()
        if not self.put_in_force(search.admitted, search.plan, ask_after_misses=64 * search.longest + 1024):
            return False
        self._steps.forget()
        self._steps.novelty.forget()
        return True

    def put_in_force(self, tape: ArenaTape, plan: "Plan | None" = None, *, ask_after_misses: int = 0) -> bool:
        """Serve what was admitted from now on; False if the device has no room for it: see `Arenas.put_in_force`.

        `plan` is what reports speak of. Once misses outnumber hits by `ask_after_misses` the plan is dropped; 0: never.
        """
        status, record = self._status, self._state.record
        hits, misses = record.hits, record.misses + record.conflicts
        with status.effort.counted():
            if not self._arenas.put_in_force(tape):
                return False
        status.earlier_hits, status.earlier_misses = status.earlier_hits + hits, status.earlier_misses + misses
        self._separate, status.steps_per_ring = None, 1
        self._tidying.begin_plan()
        status.effort.note_plan()
        status.phase, status.num_plans = Phase.PLANNED, status.num_plans + 1
        status.planned_since_ns, status.note, status.plan = time.monotonic_ns(), "", plan
        self.full_device.begin_plan(ask_after_misses)
        return True

    def use(self, plan: "Plan") -> None:
        """Serve a plan from the very first request. Raises PlanError if it is no plan for a program on this device."""
        tape = admit([plan], ring_only=False)
        if tape.cross_streams and ordering() is None:
            raise PlanError(
                "the plan hands memory from stream to stream, but no driver orders streams here: plan it without that."
            )
        if self._state.record.total.num_allocs:
            raise PlanError("a plan has to be in force before the first allocation: install stalloc earlier.")
        self._recording.end(self._status.settings)
        # it is given up sooner than one that was just made, before much of another program lives in its arena
        if not self.put_in_force(tape, plan, ask_after_misses=_DOUBT):
            free, total = self._memory.device.memory_info()
            raise PlanError(
                f"the plan needs an arena of {plan.peak_bytes} bytes, device {plan.device} has {free} of {total} "
                "bytes free: close what uses it, or plan a smaller step."
            )

    def moves_in_pass(self) -> bool:
        """At an entry in a pass: whether many of its requests were displaced, so that the arena moves, if it may."""
        tapes, record, are_many = self._steps.tapes, self._state.record, self._state.num_displaced >= MANY_DISPLACED
        if are_many and tapes is not None and (longer := tapes.longer_lived(record.ring_start, record.cursor)):
            self._state.arena.begin_step(*longer)  # more lives than the kind of step has that was followed so far
        return self._tidying.moves_in_pass()

    @property
    def to_share(self) -> "Tape | None":
        """The ring in force, if pages go from stream to stream in each pass: handovers wait for one event."""
        return self._separate if self._tidying.moves_pages else None

    def at_boundary(self) -> None:
        """The ring of the plan in force begins anew."""
        plan, was_observed = self._status.plan, self._status.observed is not None
        # what the switch left behind has died meanwhile; a plan from a file may be one that a budget needs
        patience = 8 * len(plan.tape_size) + 1024 if plan is not None else 0
        self._state.record.ask_after_misses = self.full_device.most_misses(patience) if was_observed else patience
        passes, at = self._tidying.at_boundary(), self._state.record.steps_ever
        asks = passes == 1 or self.probation.is_on
        self._state.write(ask_at_boundary=int(asks), ask_at_step=at + passes if passes > 1 else 0)
