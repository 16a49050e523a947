"""One device under stalloc: watch the program, plan its steady step in the background, switch, recover.

The compiled core serves requests; this module is where it turns when it needs Python: for a segment, for a look at
what was recorded, at the boundary of a step, for memory that other streams still use. Contract: no method raises
into the core; a failure of any of them leaves the heap serving.
"""

import gc
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stalloc.core import constants
from stalloc.core.arena_tape import ArenaTape
from stalloc.core.host_memory import trim
from stalloc.core.regions import moved_into
from stalloc.device import Device
from stalloc.device.ordering import ordering
from stalloc.errors import PlanError
from stalloc.runtime.admission import admit
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.full_tables import FULL_TABLES, full_table_text
from stalloc.runtime.interruptions import is_interruption, start_thread
from stalloc.runtime.segments import round_up, segment_bytes, tight_segment_bytes
from stalloc.runtime.settings import Observed, Phase, Settings
from stalloc.runtime.steps import Steps
from stalloc.trace.packing import KeptTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stalloc.lifespans.tape import Tape
    from stalloc.planner import Plan
    from stalloc.planner.sharing import Streams
    from stalloc.runtime import poison
    from stalloc.trace import Trace

    Planner = Callable[..., Plan]  # (tape, streams=, handover_bytes=), as plan_tape; called in any thread


MARK_STEP = 0  # as in stalloc.trace
_DOUBT = 256  # requests by which misses may outnumber hits before a plan from a file is dropped
_COVERAGE = 0.6  # share of the record that a period has to fill where the program sets no marks
_EAGER_MARKS = 32  # steps at each of which the record is searched; afterwards whenever it has grown by a quarter
_SETTLE_STEPS = 10  # marked steps without a plan after which large requests share one segment
_IDLE_PASSES = 2  # a segment that served nothing for so many passes over a plan goes back
_SERVED_LONG = 50  # passes over a plan after which it counts as one that fitted
_CLOSE = 1.02  # of a plan to its lower bound, above which rings of more periods are tried
_MAX_UNROLLED = 2_000  # requests in such a ring
_DEARER, _DEARER_BYTES = 1.5, 64 << 20  # times, and bytes, by which a switch may hold more than what came before it
_STATE_SHARE = 2  # times what a model and its gradients hold that an optimizer may ask for
_SHRINK_PASSES = 64  # over a plan, at whose begins it gets it if nothing lives in the arena
_PATIENCE = 3  # further looks that a tape gets whose lifespans are not all known


@dataclass
class _Making:
    """A plan in the making; `done` is set when `plan` and `admitted`, or `error`, are there."""

    tape: "Tape"
    streams: "Streams" = "separate"
    handover_bytes: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    plan: "Plan | None" = None
    admitted: "ArenaTape | None" = None  # the plan, as it is served
    error: str | None = None


class Controller(Arenas):
    """The watcher of one device."""

    def __init__(
        self,
        device: Device,
        slow_function: int,
        settings: Settings,
        watch: "poison.Watch | None" = None,
        planner: "Planner | None" = None,
    ) -> None:
        super().__init__(device, slow_function, settings, watch)
        self._planner = planner
        self.note = ""  # why the device rests, or what went wrong, for the report
        self.plan: Plan | None = None
        self.observed: Observed | None = None
        self.planned_since_ns: int | None = None
        self.steps_per_ring = 1
        self._observed_trace: KeptTrace | None = None
        self.num_plans = 0
        self._plans_in_a_row = 0
        self.marks: list[tuple[int, int, str]] = []
        self.step_times_ns: list[int] = []
        self._making: _Making | None = None
        self._inherited: list[Any] = []  # what a parent of this process held when it forked
        self._steps = Steps(self)
        self.expects_marks = False  #: the program has an optimizer, whose steps will be marked
        self._wait_seconds = 0.0
        self.observed_steps = 0
        self.may_move = False  #: what lives may be moved at marks, so that room can be asked for
        self._arena_lacks_room = False
        self._min_period = 4  # requests; shorter repetitions are none, or have misled already
        self._began = time.monotonic()
        self._release_at_boundaries = 0
        self._segments_kept = 0  # of the heap, when the plan had settled
        self._observe()

    # --- what the core asks for

    def help(self, request: int, argument: int) -> bool:
        """Do what the core asks for; False means that there is no memory."""
        reason = request & ((1 << constants.REASON_BITS) - 1)
        with self._lock:
            if reason == constants.NEED_SEGMENT:
                return self._add_segment(request >> constants.REASON_BITS, argument)
            if reason == constants.REFUSED:
                return self._help_refused(request >> constants.REASON_BITS, argument)
            if reason == constants.AT_BOUNDARY:
                self._at_boundary()
            elif reason == constants.CHECK:
                self.look()
            elif reason == constants.STALE:
                self._drop_plan("the program left the plan for good")
            elif reason == constants.DEFER:
                self._deferred.add(argument, capturing=self.state.record.private_kind != 0)
            elif reason == constants.POLL:
                self._find_deferred()
                self._deferred.poll()
        return True

    def recover(self, request: int, argument: int, error: BaseException) -> None:
        """Whatever `help` was at when an error stopped it: no memory is lost, and the heap serves."""
        reason = request & ((1 << constants.REASON_BITS) - 1)
        with self._lock:
            if reason == constants.DEFER:
                self._deferred.add(argument, capturing=True)  # its events come later
            elif reason == constants.NEED_SEGMENT:
                self.state.set_out_of_memory_text(
                    f"stalloc: a request of {argument} bytes was not served, since the way to memory failed "
                    f"({type(error).__name__}: {error}): try it again.",
                    _driver_status(error),
                )
            elif reason not in (constants.REFUSED, constants.POLL):
                self._give_up(error)
            self._match_segments()

    def _give_up(self, error: BaseException) -> None:
        """Planning, a switch or a look was stopped somewhere: watch anew after an interruption, else leave it."""
        goes_on = (is_interruption(error) or isinstance(error, RecursionError)) and self.phase is not Phase.RESTING
        self.state.drop_tape()
        self._making = None
        self._steps.forget()
        self._match_segments()
        if goes_on and self.settings.plan:
            self._drop_tape()
            self._observe()
        else:
            self.rest(f"{type(error).__name__}: {error}")

    def mark(self, kind: int, name: str) -> None:
        """Note a mark of the program (trace.MARK_STEP, …) and, at a step, look for a plan."""
        with self._lock:
            if kind == MARK_STEP:
                self._end_lasting()
                self.step_times_ns.append(time.monotonic_ns())
                self._doubt_unmarked_plan()
            if self.state.record.recording or not self.marks:
                self.marks.append((self.state.record.num_events, kind, name))
            if kind == MARK_STEP:
                try:
                    self._steps.at_mark()
                except Exception as error:  # whatever it is, the program must not see it: it only marked a step
                    if is_interruption(error):
                        raise
                    self.rest(f"following the steps failed: {type(error).__name__}: {error}")
                self.look()
                if self.poison is not None:
                    self.poison.check()

    def expect_lasting(self) -> None:
        """What is allocated up to the next mark of a step is meant to last (an optimizer makes its state).

        It gets segments that hold nothing else: among what is transient it would keep that memory from going back to
        the device when the plan takes over.
        """
        with self._lock:
            self._building = False
            if self.phase is Phase.OBSERVING and self.settings.plan and not self.state.record.allocating_persistent:
                self.release_unused()
                if self.free_bytes() < _STATE_SHARE * self.state.record.total.allocated_bytes:
                    self._save_memory()
                self.state.write(allocating_persistent=1)

    def _is_built(self) -> bool:
        """Whether a program that has only made what lasts (a model) goes on with something else.

        It does so once it has an optimizer, marks steps, or frees what it allocates.
        """
        state = self.state
        served = state.record.total.num_allocs - state.record.small.num_allocs
        freed = served - (state.record.total.num_live - state.record.small.num_live)
        return self.expects_marks or bool(self.marks) or freed > max(4, served // 8)

    def _end_lasting(self) -> None:
        if self.state.record.allocating_persistent:
            self.state.write(allocating_persistent=0)
            self.release_unused()  # what did not last

    def _doubt_unmarked_plan(self) -> None:
        """At a mark: a plan that was made before there were any, and that does not follow the steps, goes."""
        if self.marks or not self.settings.plan:
            return
        if self.phase is Phase.PLANNING:
            self._drop_tape()
            self._steps.forget()
            self.phase, self._making = Phase.OBSERVING, None
        elif self.phase is Phase.PLANNED and 10 * self.state.record.misses > self.state.record.hits:
            self._drop_plan("the first plan did not follow the steps that are marked now")

    def begin_in_child(self) -> None:
        """This process is a fork: other threads are gone, wherever they were; serve from the heap from now on.

        What the parent took from the device is used on, but never given back: a thread that is gone may have held the
        locks of the pool that it came from.
        """
        self._lock = threading.RLock()
        self._making = None
        self._inherited = [self.pool, self._segments, self._arena, self._kept_mapped]
        self._ranges = weakref.WeakSet()
        self.pool = self.device.new_pool()
        self._segments = dict.fromkeys(self.state.segments()[0].tolist())  # threads that are gone may have left others
        self.state.drop_tape()
        self.state.write(recording=0, check_at=0, allocating_persistent=0)
        self.phase, self.note = Phase.RESTING, "this process is a fork, which is not watched"

    # --- memory from the device

    def _add_segment(self, pool: int, size_bytes: int) -> bool:
        state = self.state
        if self._building and self._is_built():
            self._building = False
            self._end_lasting()
            return True  # the core asks again for what it wants now
        kind = state.pool_kind(pool)
        wanted, least = segment_bytes(kind, size_bytes), round_up(size_bytes)
        if state.record.memory_is_short and kind == constants.GENERAL_KIND:
            wanted = tight_segment_bytes(size_bytes)
        if self.phase is Phase.PLANNED and kind == constants.GENERAL_KIND:
            wanted = least  # what the plan does not serve is the exception: it gets no more than it needs
        if self.phase is Phase.PLANNED:
            state.record.ask_at_boundary = 1  # to give it back when it is no longer used
        if self._take_segment(pool, wanted) or self._take_segment(pool, least):
            return True
        if self.state.largest_free_bytes() < size_bytes:  # else the core finds that block
            gc.collect()  # arrays in reference cycles, as CuPy's own pool does it
            if self._take_segment(pool, least):
                return True
        if self._use_retired() or self._lend_again():
            return True  # the core asks again if that was in vain
        full = state.full_table()
        if full:
            self.release_unused()  # segments without blocks take rows too
            if self._take_segment(pool, least):
                return True
            state.set_out_of_memory_text(full_table_text(state, full, size_bytes))
            return False
        self._lacking_bytes = max(self._lacking_bytes, size_bytes)
        self._explain_out_of_memory(size_bytes)
        return False

    def _help_refused(self, table: int, size_bytes: int) -> bool:
        """Make room in the table that is full, or say why the request of `size_bytes` is not served."""
        if table == constants.FULL_STREAMS and self._forget_streams():
            return True
        if table:
            self.state.set_out_of_memory_text(full_table_text(self.state, FULL_TABLES[table], size_bytes))
        else:
            self._explain_out_of_memory(size_bytes)
        return False

    def _forget_streams(self) -> bool:
        """Forget streams that hold no memory any more, and with them what was observed; whether there were any."""
        if self.state.record.private_kind:
            return False  # a capture must not wait for what the streams were at
        if self.phase in (Phase.PLANNED, Phase.PLANNING):
            self._drop_plan("the program uses ever new streams")
        elif self.phase is Phase.OBSERVING:
            self._steps.forget()
            self._observe()
        self.release_unused()
        return self.state.forget_streams() > 0

    def take_lacking(self) -> tuple[int, bool]:
        """How many bytes there was hardly room for, or none, since this was asked last, and whether for an arena.

        The boundary after it tries the arena again, if that was it.
        """
        with self._lock:
            lacking, for_arena = self._lacking_bytes, self._arena_lacks_room
            self._lacking_bytes = 0
            if for_arena and self.phase is Phase.PLANNING:
                self.state.record.ask_at_boundary = 1
        return lacking, for_arena

    def ask_for_room(self, arena_bytes: int) -> bool:
        """Whether an arena finds no room now, but may after a mark at which what lives is moved; asked for once."""
        if self._arena_lacks_room or not self.may_move or not (self.marks or self.step_times_ns):
            self._arena_lacks_room = False
            return False
        mapped = self._mapped_arena()
        if (
            self._has_room(arena_bytes - (mapped.size_bytes if mapped is not None else 0))
            or max(sum(region.size_bytes for region in self._old_regions()), self.state.record.arena_bytes)
            >= arena_bytes
        ):
            return False
        self._lacking_bytes, self._arena_lacks_room = max(self._lacking_bytes, arena_bytes), True
        return True

    def _explain_out_of_memory(self, size_bytes: int) -> None:
        from stalloc.runtime.statistics import out_of_memory_text

        self.state.set_out_of_memory_text(out_of_memory_text(self, size_bytes))

    # --- watching

    def _observe(self) -> None:
        self.phase, self._patience, self._look_at = Phase.OBSERVING, _PATIENCE, 0
        self.marks.clear()
        self._arena_lacks_room = False
        self._reserved_start = self.state.record.reserved_bytes
        self._settled = False
        self._building = self.settings.plan and self.state.record.total.num_allocs == 0
        self.state.write(
            recording=1, num_events=0, num_sizable=0, allocating_persistent=int(self._building), check_at=64
        )

    def rest(self, note: str) -> None:
        """Leave everything to the heap, and say why."""
        self.phase, self.note = Phase.RESTING, note
        self._drop_tape()
        self.settle()
        self.state.write(allocating_persistent=0, recording=int(self.settings.keep_recording), check_at=0)

    def trace(self) -> "Trace":
        """What was recorded so far, as a Trace."""
        from stalloc.trace.recorder import from_recorded

        events = self.state.recorded()
        tags = events["action"]
        action = tags & 0xFF
        raw = self.state.tables.streams["value"][: self.state.record.num_streams].tolist()
        return from_recorded(
            self.device.index,
            action,
            events["address"].view(np.uint64),
            events["requested_bytes"],
            tags >> 8,
            events["time_ns"],
            self.marks,
            raw,
            reserved_start_bytes=self._reserved_start,
            segments=self._segment_columns(),
            info={
                "device_name": self.device.name,
                "total_bytes": self.device.total_bytes,
                "notes": []
                if self.state.record.recording
                else ["the record's table filled up: later events are missing"],
            },
        )

    def _segment_columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        bases, sizes = self.state.segments()
        return bases.view(np.uint64), sizes, np.zeros(len(bases), np.int64)

    def look(self) -> None:
        """Look for a repeating step in the record and start planning it; called at marks and every so often."""
        if self.phase is not Phase.OBSERVING or not self.settings.plan:
            return
        state = self.state
        if not state.record.recording:
            self.rest("no repeating step was found before the record's table was full")
            return
        num_steps = sum(kind == MARK_STEP for _, kind, _ in self.marks)
        if num_steps > _EAGER_MARKS and state.record.num_sizable < self._look_at:
            return
        self._look_at = state.record.num_sizable * 5 // 4
        # marks come at the right moments; without them, look again when the record has grown by a quarter
        state.record.check_at = 0 if self.marks or self.expects_marks else state.record.num_sizable * 5 // 4 + 64
        if (self.marks and num_steps < self.settings.observe_steps) or (self.expects_marks and not self.marks):
            return
        if self._arena is not None and self.state.record.arena_live:
            return  # the last arena could not be dissolved: its tape cannot be replaced before its last block is gone
        try:
            self._start_planning(num_steps)
        except Exception as error:  # whatever it is, the program must not see it: it only marked a step
            if is_interruption(error) or isinstance(error, RecursionError):
                raise
            self.rest(f"looking for a repeating step failed: {type(error).__name__}: {error}")

    def _start_planning(self, num_steps: int) -> None:
        from stalloc.lifespans.periods import find_step_period
        from stalloc.lifespans.tape import fold

        trace = self.trace()
        sizable = np.flatnonzero(trace.size > constants.TINY)
        # layers and microbatches repeat too: without marks only what fills most of the record is a step
        if self.marks:
            period = find_step_period(trace)
        else:
            repeats = max(3, self.settings.observe_steps)
            period = find_step_period(trace, min_repeats=repeats, min_share=_COVERAGE, min_length=self._min_period)
        tape = fold(trace, with_prologue=False, period=period) if period is not None else None
        if tape is None:
            if self.marks:
                self._steps.look_for_kinds(trace)
                if num_steps >= _SETTLE_STEPS:
                    self.settle()
            return
        if not tape.planned.all() and self._patience > 0:
            self._patience -= 1  # another step may show how long the rest lives
            return
        self.release_arena()
        self.phase = Phase.PLANNING
        self._wait_seconds = self.settings.plan_wait_seconds
        self.observed_steps = tape.covered_requests // tape.period_requests
        self._observed_trace = KeptTrace(trace)
        streams = self.settings.streams if ordering() is not None else "separate"
        self._begin_making(_Making(tape, streams, self.settings.handover_bytes))
        # until the plan is there, follow the tape without serving it, so that its boundary is known
        first = int(np.searchsorted(sizable, tape.row[tape.num_prologue]))
        self._follow(tape, (len(sizable) - first) % tape.ring_length)
        if self.marks:
            self._steps.follow_marks(trace, tape, sizable, first)

    def _follow(self, tape: "Tape", cursor: int) -> None:
        """Follow the ring of a tape from an entry on without serving it, and ask when it begins again."""
        ring = slice(tape.num_prologue, None)
        nowhere = np.full(tape.ring_length, -1, np.int64)
        self.state.write(check_at=0)
        self.state.install_tape(
            ArenaTape(arena_bytes=0, size=tape.size[ring], stream=tape.stream[ring], offset=nowhere), cursor
        )
        self.state.write(ask_at_boundary=1, ask_after_misses=8 * len(nowhere) + 1024)

    @property
    def observed_trace(self) -> "Trace | None":
        """What was recorded when the plan was made; None if there was no plan."""
        return self._observed_trace.trace() if self._observed_trace is not None else None

    def _begin_making(self, making: _Making) -> None:
        self._making = making
        start_thread(_make_plan, making, self._planner, self._observed_trace)

    # --- at the boundary of a step

    def _at_boundary(self) -> None:
        if self.phase is Phase.PLANNED and self._steps.at_first_request():
            return
        if self.phase is Phase.PLANNED:
            if not self._shrink():
                self._drop_plan("somebody else took the memory of the arena")
                return
            # what the switch left behind in the old segments has died meanwhile
            self.state.record.ask_after_misses = 8 * len(self.plan.tape_size) + 1024 if self.plan is not None else 0
            self._release_at_boundaries -= 1
            # and then what a step needed that deviated: segments that no pass uses any more
            self.release_unused(0 if self._release_at_boundaries > 0 else _IDLE_PASSES)
            self.state.record.ask_at_boundary = int(
                self._release_at_boundaries > -_SHRINK_PASSES * (self._too_large is not None)
                or len(self._segments) > self._segments_kept
                or bool(self._retired)
            )
            if self._release_at_boundaries == 0:
                self._segments_kept = len(self._segments)
            return
        making = self._making
        if self.phase is not Phase.PLANNING or making is None:
            return
        wait, self._wait_seconds = self._wait_seconds, 0.0
        if not making.done.wait(wait):
            self.state.record.ask_at_boundary = 1
            return
        self._making = None
        self.steps_per_ring = making.tape.ring_length // making.tape.period_requests
        if making.admitted is None:
            self.rest(making.error or "planning failed")
            return
        self._steps.unroll(making.tape)
        self._switch(making)
        del making  # and with it the tape, which is large
        trim()

    def note_observed(self) -> None:
        """Keep what the steps before the plan were like, and end watching."""
        state = self.state
        self.observed = Observed(
            allocated_peak_bytes=state.allocated_peak_bytes,
            reserved_peak_bytes=state.reserved_peak_bytes,
            num_requests=state.record.total.num_allocs,
            seconds=time.monotonic() - self._began,
        )
        self.release_unused()
        recording = self.settings.keep_recording or (bool(self.marks) and self._steps.goes_on())
        state.write(allocating_persistent=0, recording=int(recording), check_at=0)

    def _switch(self, making: _Making) -> None:
        self.note_observed()
        if not self.state.record.recording:
            self.state.forget_record()
        plan, tape = making.plan, making.admitted
        assert plan is not None
        assert tape is not None
        if self.ask_for_room(tape.arena_bytes):
            self._making = making  # the tape is followed on, and the boundary after the next mark tries again
            return
        if self._has_room(tape.arena_bytes) and self._is_dearer(tape):
            return
        # a plan that was just made has to be far off before it goes
        if self.put_in_force(tape, plan, ask_after_misses=8 * len(tape.size) + 1024):
            return
        several = len(np.unique(plan.tape_stream[plan.tape_offset >= 0])) > 1
        if making.streams == "separate" and several and ordering() is not None:
            # a region for each stream is too much: try again with hand-overs
            self._begin_making(_Making(making.tape, "share"))
            self._wait_seconds = self.settings.plan_wait_seconds
            self._follow(making.tape, 0)
        else:
            self.rest(
                f"an arena of {plan.peak_bytes} bytes does not fit beside the {self.state.record.reserved_bytes} bytes "
                "that hold live blocks"
            )

    def _is_dearer(self, tape: ArenaTape) -> bool:
        """Whether the switch would hold far more than was needed so far; the heap then goes on serving.

        What the steps hand on lies beside the arena until the next one is over, and keeps its segments. A part of them
        is usual; where it is nearly all, the plan gains nothing.
        """
        assert self.observed is not None
        needed, held = self.state.record.reserved_bytes + tape.arena_bytes, self.observed.reserved_peak_bytes
        regions = self._old_regions()
        if moved_into(regions, tape.size, tape.stream, tape.offset) is not None:
            needed -= sum(region.size_bytes for region in regions)  # it is taken over
        if needed <= _DEARER * held + _DEARER_BYTES:
            return False
        self._settled = True  # what the heap holds has served so far
        self.rest(f"on the plan {needed} bytes would be reserved, without it no more than {held} were")
        return True

    def settle(self) -> None:
        """No step repeats so far: hold what steps need in one segment, where it splits and merges best.

        A plan that is found later takes it over.
        """
        state = self.state
        if self._settled or state.record.memory_is_short:
            return
        self._settled = True
        events = state.recorded()
        tags = events["action"]
        allocs = (tags & 0xFF) == constants.ACTION_ALLOC
        by_stream = np.bincount(tags[allocs] >> 8, weights=events["requested_bytes"][allocs], minlength=1)
        state.write(allocating_persistent=0)
        self.release_unused()
        pool = state.general_pool(int(by_stream.argmax()))
        size_bytes = round_up(max(0, state.allocated_peak_bytes - state.record.total.allocated_bytes))
        memory = self._malloc(size_bytes, for_arena=True) if size_bytes and pool >= 0 else None
        if memory is not None:
            self._segments[memory.ptr] = memory
            self._old_arena = [memory.ptr]
            if not state.give_segment(pool, memory.ptr, size_bytes):
                del self._segments[memory.ptr]

    def put_in_force(self, tape: ArenaTape, plan: "Plan | None" = None, *, ask_after_misses: int = 0) -> bool:
        """Serve what was admitted from now on, as `Arenas` does it; the device is planned then.

        `plan` is what reports speak of. Once misses outnumber hits by `ask_after_misses` the plan is dropped; 0: never.
        """
        if not super().put_in_force(tape):
            return False
        self._release_at_boundaries, self._segments_kept = 3, 0
        self.phase, self.num_plans, self._making = Phase.PLANNED, self.num_plans + 1, None
        self.planned_since_ns, self.note = time.monotonic_ns(), ""
        self.plan = plan
        self.state.record.ask_after_misses = ask_after_misses
        return True

    def use(self, plan: "Plan") -> None:
        """Serve a plan from the very first request. Raises PlanError if it is no plan for a program on this device."""
        tape = admit([plan], ring_only=False)
        if tape.cross_streams and ordering() is None:
            raise PlanError(
                "the plan hands memory from stream to stream, and no driver orders them here: plan it without."
            )
        if self.state.record.total.num_allocs:
            raise PlanError("a plan has to be in force before the first allocation: install stalloc earlier.")
        self.state.write(allocating_persistent=0, recording=int(self.settings.keep_recording), check_at=0)
        # it is given up sooner than one that was just made, before much of another program lives in its arena
        if not self.put_in_force(tape, plan, ask_after_misses=_DOUBT):
            free, total = self.device.memory_info()
            raise PlanError(
                f"the plan needs an arena of {plan.peak_bytes} bytes, device {self.device.index} has {free} of {total} "
                "bytes free: close what uses it, or plan a smaller step."
            )

    def _drop_plan(self, note: str) -> None:
        """Go back to the heap and, if there were not too many plans already, watch anew."""
        if self.phase not in (Phase.PLANNED, Phase.PLANNING):
            return
        self._making = None
        self._steps.forget()
        crowded = self.state.record.conflicts > self.state.record.misses
        self._drop_tape()
        if crowded:
            self._old_arena = []  # something lives on there for long: the next plan gets another arena
        misled = (
            4 * self.state.record.misses > self.state.record.hits
        )  # not a step that changed after it had served long
        # what counts is drift that goes on: a plan that served for long begins the count anew
        served_long = self.state.record.step_count >= _SERVED_LONG
        self._plans_in_a_row = 1 if served_long else self._plans_in_a_row + 1
        if misled and self.observed is not None and not self.marks:  # found in this run, without marks: look for longer
            self._min_period = max(4, self.state.record.ring_end - self.state.record.ring_start + 1)
        if self._plans_in_a_row >= self.settings.max_plans or not self.settings.plan:
            self.rest(f"{note} (after {self.num_plans} plans)")
            return
        self.note = note
        self._observe()

    def drop_plan(self) -> None:
        """Go back to the heap for good; what lives in the arena stays valid until it is freed."""
        with self._lock:
            if self.phase in (Phase.PLANNED, Phase.PLANNING):
                self.rest("the plan was dropped on request")
            self.phase = Phase.RESTING
            self.state.write(recording=int(self.settings.keep_recording), check_at=0, allocating_persistent=0)


def _driver_status(error: BaseException) -> int:
    """What the driver says, if the error is one of it."""
    import cupy

    return int(error.status) if isinstance(error, cupy.cuda.runtime.CUDARuntimeError) else 0


def _make_plan(making: _Making, planner: "Planner | None", observed: KeptTrace | None) -> None:
    """Plan a tape and have the plan admitted; runs in a thread of its own."""
    try:
        from stalloc.planner import plan_tape

        make = planner or plan_tape
        plan = make(making.tape, streams=making.streams, handover_bytes=making.handover_bytes)
        for longer in _longer_rings(making.tape):
            if plan.peak_bytes <= _CLOSE * plan.lower_bound_bytes:
                break
            other = make(longer, streams=making.streams, handover_bytes=making.handover_bytes)
            if other.peak_bytes < plan.peak_bytes:
                plan, making.tape = other, longer
        making.plan, making.admitted = plan, admit([plan], ring_only=True)
    except Exception as error:
        making.error = f"planning failed: {type(error).__name__}: {error}"
    finally:
        try:
            if observed is not None:
                observed.pack()
        finally:
            making.done.set()


def _longer_rings(tape: "Tape") -> "Iterator[Tape]":
    """Rings of more periods, for a tape whose requests outlive a period."""
    from stalloc.lifespans.tape import unrolled

    periods = tape.ring_length // tape.period_requests
    for more in range(1, 3) if periods > 1 else ():
        if (periods + more) * tape.period_requests <= _MAX_UNROLLED:
            yield unrolled(tape, periods + more)
