"""The steps that a program marks: where on the tape each begins, and which kinds of steps there are.

Contract: at a mark the core is told where the tape goes on, if it has lost its way. Every recorded step is known by
what it asked for, and how often it was seen is kept, whatever becomes of records and plans. A kind that was seen twice
and is not planned yet is planned together with the others, in the background, as soon as the step after it is over too
and shows what it hands on; the new plans are put in force at a mark. Nothing here waits for anything.
"""

import hashlib
import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.constants import AT_ANY_REQUEST, MODE_REPLAY
from stalloc.core.host_memory import trim
from stalloc.runtime.interruptions import start_thread
from stalloc.runtime.settings import Phase
from stalloc.trace import MARK_STEP

if TYPE_CHECKING:
    from stalloc.core.arena_tape import ArenaTape
    from stalloc.lifespans.tape import Tape
    from stalloc.lifespans.units import StepKind
    from stalloc.planner import Layout
    from stalloc.runtime.controller import Controller
    from stalloc.runtime.tapes import Tapes
    from stalloc.trace import Trace
    from stalloc.trace.record import Column

_NEAR = 8  # requests: the cursor may be so far from a mark, since marks and requests may come from several threads
_UNKNOWN_SHARE = 20  # a step is another one if more than one request in so many was not served from the plan
_WATCH_STEPS = 64  # steps watched for a kind that recurs; the next watch comes after twice as many steps as the last
_MAX_KINDS = 32  # that are planned together; those seen most often
_MAX_EVENTS = 1 << 20  # of a record in which kinds are looked for
_WASTE = 1.1  # reserved over the peak of the step, beyond which segments go back after a step that is not known
_MIN_STEPS = 5  # marked steps without a cycle after which kinds are looked for
_MAX_WAITS = 2  # steps for which a plan waits for the arena before it to be empty
_MAX_REMEMBERED = 4096  # kinds of steps that were seen


@dataclass
class _Search:
    """A search for kinds of steps, and their plans; `done` is set at its end, `admitted` is None if nothing is new."""

    known: "list[StepKind]"
    wanted: set[bytes]  # names of the kinds that are to be planned, the known ones too
    made: "dict[bytes, Layout]"
    done: threading.Event = field(default_factory=threading.Event)
    tapes: "Tapes | None" = None
    admitted: "ArenaTape | None" = None  # the plans, as they are served


@dataclass
class _Recorded:
    """One kind of step in the record."""

    first: int  # whole steps before its first
    count: int = 0


class Steps:
    """The marked steps of one device."""

    def __init__(self, controller: "Controller") -> None:
        self._controller = controller
        self.tapes: Tapes | None = None
        self.search: _Search | None = None
        self._waits = 0  # steps that went by meanwhile
        self._waiting: _Search | None = None  # its plan is to be put in force at the first request of the step
        self._made: dict[bytes, Layout] = {}
        self._positions: list[int] = []  # where marks are on the ring of a plan that knows one kind or cycle
        self._places: Column = np.zeros(0, np.int64)  # where they are in one of its periods
        self._current = 0  # which of them was the last
        self._followers: dict[tuple[int, int], int] = {}  # two kinds in a row -> the one that came next
        self._before = (-1, -1)
        self._counts = (0, 0)
        self._plans = 0  # the controller's, when the counts were taken
        self._times_seen: dict[bytes, int] = {}  # by the name of the kind
        self._planned: set[bytes] = set()  # names of the kinds that the plan, or the one in the making, knows
        self._refused: set[bytes] = set()  # that no plan can be made for
        self._recorded: dict[bytes, _Recorded] = {}  # what the record shows of each kind, by its name
        self._num_recorded = 0  # whole steps in the record
        self._num_allocs = 0  # when the last step ended
        self._last_allocs = 0  # of the last step
        self._missed_allocs = 0  # of the step that was not on the plan, nor recorded, but began the record; 0: none
        self._watched = 0  # steps of this watch
        self._pause = 0  # steps until the next watch
        self._next_pause = _WATCH_STEPS

    def forget(self) -> None:
        """The plan is given up, and the record begins anew."""
        self.tapes, self.search, self._waiting, self._positions, self._watched = None, None, None, [], 0
        self._places = np.zeros(0, np.int64)
        self._planned.clear()
        self._forget_record()

    def _forget_record(self) -> None:
        self._recorded.clear()
        self._num_recorded = 0

    def follow_marks(self, trace: "Trace", tape: "Tape", sizable: "Column", first: int) -> None:
        """The ring of a tape, folded from a trace, is followed: know where the program's marks are on it.

        `sizable` (m,) are the rows of the trace's requests that count; the ring's first is the one at `first`.
        """
        marks = trace.mark_event[trace.mark_kind == MARK_STEP]
        at = np.searchsorted(trace.start[sizable], marks)
        at = at[(at >= first) & (at <= first + tape.covered_requests)]
        size, stream = trace.size[sizable], trace.stream[sizable]
        for begin, end in itertools.pairwise(at.tolist()):
            self._planned.add(_name(size[begin:end], stream[begin:end]))
        # the record may show fewer periods than the ring has
        self._places = np.unique((at - first) % tape.period_requests)
        self.unroll(tape)
        self.tapes = None

    def unroll(self, tape: "Tape") -> None:
        """The ring that is followed has got more periods."""
        turns = np.arange(0, tape.ring_length, tape.period_requests)
        self._positions = (turns[:, None] + self._places).ravel().tolist()

    # --- at a mark

    def at_mark(self) -> None:
        """A step ended."""
        controller, search = self._controller, self.search
        if search is not None and search.done.is_set():
            self.search = None
            if search.admitted is None:
                self._refused |= search.wanted
            elif controller.phase is Phase.PLANNED and controller.holds_twice(search.admitted):
                # before the first request of a step less may live in the arena, if nothing is lent from it any more
                self._waiting, self._waits = search, 0
                controller.stop_lending()
                controller.state.record.ask_at_boundary = 1
            else:
                self._put_in_force(search)
        self._note_step()
        if controller.phase is Phase.PLANNED:
            missed, share = self._missed()
            wasted = _WASTE * controller.state.record.step_allocated_peak < controller.state.record.reserved_bytes
            if share * _UNKNOWN_SHARE > 1 and wasted:
                controller.release_unused()  # no pass over the plan ends, after which unused segments go back
            self._watch(missed > 0)
            self._find_place()
            if self.tapes is not None or self._waiting is not None:
                self._ask_at_first_request()
        elif controller.phase is Phase.PLANNING:
            self._find_place()
        if controller.phase in (Phase.PLANNED, Phase.PLANNING) and not controller.settings.keep_recording:
            self._search_for_more()

    def _ask_at_first_request(self) -> None:
        """Whoever wants to hear of the begin of a ring hears of it, whichever kind of step comes."""
        if self._controller.state.record.ask_at_boundary:
            self._controller.state.record.ask_at_boundary = AT_ANY_REQUEST

    def at_first_request(self) -> bool:
        """The first request after a mark is asked for: whether a plan was waiting for it."""
        search = self._waiting
        if search is None or search.admitted is None:
            return False
        self._waits += 1
        if self._waits <= _MAX_WAITS and self._controller.holds_twice(search.admitted):
            self._controller.state.record.ask_at_boundary = 1  # should no mark come
            return True
        self._waiting = None
        self._put_in_force(search)
        self._find_place()
        return True

    def _note_step(self) -> None:
        """Count the step that just ended, if it is in the record from its begin."""
        controller = self._controller
        num_allocs, self._num_allocs = self._num_allocs, controller.state.record.total.num_allocs
        self._last_allocs = self._num_allocs - num_allocs
        if not controller.state.record.recording:
            return
        bounds = [*itertools.islice((event for event, kind, _ in controller.marks[::-1] if kind == MARK_STEP), 2)]
        if len(bounds) < 2:
            return
        size, stream = controller.state.recorded_requests(bounds[1], bounds[0])
        name = _name(size, stream)
        self._recorded.setdefault(name, _Recorded(self._num_recorded)).count += 1
        self._num_recorded += 1
        if len(self._times_seen) >= _MAX_REMEMBERED:
            self._times_seen.clear()
        if name not in self._times_seen:
            self._times_seen[name] = int(self._was_seen_before(size, stream))
        self._times_seen[name] += 1

    def _was_seen_before(self, size: "Column", stream: "Column") -> bool:
        """Whether a step that is recorded for the first time is known to have occurred before there were marks, or
        (as far as its number of requests tells) to have been the one after which the record was begun.
        """
        if self._last_allocs == self._missed_allocs:
            self._missed_allocs = 0
            return True
        controller = self._controller
        first = next(event for event, kind, _ in controller.marks if kind == MARK_STEP)
        early_size, early_stream = controller.state.recorded_requests(0, first)
        tail = slice(len(early_size) - len(size), None)
        if not len(size) or len(early_size) < len(size):
            return False
        return bool((early_size[tail] == size).all() and (early_stream[tail] == stream).all())

    def _missed(self) -> tuple[int, float]:
        """Requests of the step that just ended which the plan did not serve, and their share."""
        state = self._controller.state
        counts = state.record.hits, state.record.misses + state.record.conflicts
        fresh = self._plans == self._controller.num_plans
        hits, missed = (counts[0] - self._counts[0], counts[1] - self._counts[1]) if fresh else (0, 0)
        self._counts, self._plans = counts, self._controller.num_plans
        return missed, missed / max(hits + missed, 1)

    def _find_place(self) -> None:
        """Tell the core where the tape goes on."""
        state = self._controller.state
        if self.tapes is not None:
            begins = self.tapes.begins
            followed = int(np.searchsorted(begins, state.record.ring_start, side="right")) - 1
            self._followers[self._before] = followed
            self._before = self._before[1], followed
            expected = self._followers.get(self._before, followed)
            begin = begins[expected]
            state.begin_step(begin, begin + len(self.tapes.kinds[expected].size), begin)
        elif self._positions:
            cursor, length = state.record.cursor, state.record.ring_end - state.record.ring_start
            places = np.array(self._positions) + state.record.ring_start
            apart = np.abs((cursor - places + length // 2) % length - length // 2)
            nearest = int(apart.argmin())
            if apart[nearest] > _NEAR:
                nearest = (self._current + 1) % len(places)
                state.begin_step(state.record.ring_start, state.record.ring_end, int(places[nearest]))
            elif apart[nearest] == 0:
                state.begin_step(state.record.ring_start, state.record.ring_end, cursor)
            self._current = nearest

    # --- kinds

    def look_for_kinds(self, trace: "Trace") -> None:
        """No cycle of steps was found while observing: see whether kinds of steps recur in any order."""
        if self._num_recorded + 1 >= _MIN_STEPS and self._fresh():
            self._start_search(trace)

    def goes_on(self) -> bool:
        """A plan is put in force: whether the record holds steps that it does not know, and is to go on."""
        more = bool(self._recorded.keys() - self._planned - self._refused)
        self._watched = int(more)
        return more

    def _fresh(self) -> set[bytes]:
        """The kinds that recur and are not planned yet, if the record shows how long their requests live."""
        if self.search is not None or self._waiting is not None:
            return set()
        if (
            self.tapes is None
            and 2 * sum(self._recorded[name].count for name in self._recurring()) < self._num_recorded
        ):
            return set()  # a program whose steps are mostly all different
        fresh = self._recurring() - self._planned - self._refused
        return {name for name in fresh if self._recorded[name].first + 1 < self._num_recorded}

    def _recurring(self) -> set[bytes]:
        return {name for name in self._recorded if self._times_seen.get(name, 0) > 1}

    def _search_for_more(self) -> None:
        controller = self._controller
        # the plan of a ring says nothing of its single steps: they have to be in the record
        if self._fresh() and (self.tapes is not None or self._planned <= self._recorded.keys()):
            self._start_search(controller.trace())

    def _watch(self, missed: bool) -> None:
        """Record while there are steps that the plan does not know."""
        controller = self._controller
        state = controller.state
        if controller.settings.keep_recording or not controller.settings.plan:
            return  # the record is somebody else's
        if not self._watched:
            self._pause -= 1
            if missed and self._pause <= 0:
                self._watched = 1
                self._missed_allocs = self._last_allocs
                self._begin_record()
            return
        self._watched += 1
        if self._watched > _WATCH_STEPS:
            self._watched, self._pause = 0, self._next_pause
            self._next_pause *= 2
            state.forget_record()
            self._forget_record()
        elif state.record.num_events > _MAX_EVENTS or not state.record.recording:
            self._begin_record()

    def _begin_record(self) -> None:
        controller = self._controller
        controller.marks[:] = [(0, MARK_STEP, "")]
        controller.state.write(recording=1, num_events=0, num_sizable=0, check_at=0)
        self._forget_record()

    def _start_search(self, trace: "Trace") -> None:
        known = self.tapes.kinds if self.tapes is not None else []
        self.search = _Search(known, self._recurring() - self._refused, self._made)
        start_thread(_look, self.search, trace)

    def _put_in_force(self, search: _Search) -> None:
        controller, tapes, admitted = self._controller, search.tapes, search.admitted
        assert tapes is not None
        assert admitted is not None
        if controller.phase is Phase.RESTING:
            return
        self._planned = {_name(kind.size, kind.stream) for kind in tapes.kinds}
        controller.release_unused()
        if controller.ask_for_room(admitted.arena_bytes):
            self.search = search  # the next mark tries again
            return
        if controller.phase is not Phase.PLANNED:
            controller.note_observed()
        longest = max(len(kind.size) for kind in tapes.kinds)
        if not controller.put_in_force(admitted, tapes.largest_plan, ask_after_misses=64 * longest + 1024):
            self._watched, self._pause = 0, self._next_pause
            self._refused |= self._planned  # as long as the program runs: it would be tried at every mark
            if controller.state.record.mode != MODE_REPLAY:
                controller.rest("an arena for all kinds of steps does not fit beside what lives")
            return
        controller.steps_per_ring = 1
        self.tapes, self._positions = tapes, []
        self._followers.clear()
        self._before, self._watched, self._next_pause = (-1, -1), 1, _WATCH_STEPS
        if controller.state.record.num_events:
            controller.state.write(recording=1)  # other kinds may have been seen once already: watch on
        else:
            self._begin_record()  # planning took long: what was recorded is gone


def _name(size: "Column", stream: "Column") -> bytes:
    """A short name for the kind of step that asks for these sizes on these streams."""
    key = np.stack([size.astype(np.int64), stream.astype(np.int64)]).tobytes()
    return hashlib.blake2b(key, digest_size=16).digest()


def _look(search: _Search, trace: "Trace") -> None:
    """Plan the kinds of steps that recur together with those that are known."""
    try:
        from stalloc.lifespans.units import recurring_steps
        from stalloc.runtime.admission import admit
        from stalloc.runtime.tapes import plan_steps

        found = recurring_steps(trace)
        wanted = [_name(kind.size, kind.stream) in search.wanted for kind in found]
        usable = [kind for kind, chosen in zip(found, wanted, strict=True) if chosen and (kind.end > 0).any()]
        known = {kind.key for kind in search.known}
        fresh = [kind for kind in usable if kind.key not in known]
        if fresh:
            again = {kind.key: kind for kind in usable}
            kinds = [again.get(kind.key, kind) for kind in search.known] + fresh
            kinds.sort(key=lambda kind: -kind.times_seen)
            search.tapes = plan_steps(kinds[:_MAX_KINDS], search.made, trace.device)
            search.admitted = admit(search.tapes.plans, ring_only=True)
    except Exception:  # these kinds are not planned then; the program must not see it
        search.admitted = None
    finally:
        search.done.set()
        trim()
