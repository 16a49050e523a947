"""The steps that a program marks: where on the tape each begins, and which kinds of steps there are.

Contract: at a mark the core is told where the tape goes on, if it has lost its way. A step that the plan does not know
is watched for; when its kind has recurred, it is planned together with the known ones, in the background, and the new
plans are put in force at a mark. Nothing here waits for anything.
"""

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stalloc.runtime import core
from stalloc.runtime.host_memory import trim
from stalloc.runtime.layout import MODE_REPLAY
from stalloc.runtime.segments import round_up
from stalloc.trace import MARK_STEP

if TYPE_CHECKING:
    from stalloc.lifespans.units import StepKind
    from stalloc.planner import Layout
    from stalloc.runtime.controller import Controller
    from stalloc.runtime.tapes import Tapes
    from stalloc.trace import Trace
    from stalloc.trace.record import Column

_NEAR = 8  # requests: the cursor may be so far from a mark, since marks and requests may come from several threads
_UNKNOWN_SHARE = 20  # a step is not known if more than one request in so many was not served from the plan
_WATCH_STEPS = 64  # steps watched for a kind that recurs; the next watch comes after twice as many steps as the last
_MOST_KINDS = 32  # that are planned together; those seen most often
_MOST_EVENTS = 1 << 20  # of a record in which kinds are looked for
_WASTE = 1.1  # reserved over the peak of the step, beyond which segments go back after a step that is not known
_LEAST_STEPS = 5  # marked steps without a cycle after which kinds are looked for


@dataclass
class _Search:
    """A search for kinds of steps, and their plan; `done` is set at its end, `tapes` stays None if nothing is new."""

    known: "list[StepKind]"
    made: "dict[bytes, Layout]"
    done: threading.Event = field(default_factory=threading.Event)
    tapes: "Tapes | None" = None


class Steps:
    """The marked steps of one device."""

    def __init__(self, controller: "Controller") -> None:
        self._controller = controller
        self.tapes: Tapes | None = None
        self.search: _Search | None = None
        self._made: dict[bytes, Layout] = {}
        self._positions: list[int] = []  # where marks are on the ring of a plan that knows one kind or cycle
        self._current = 0  # which of them was the last
        self._followers: dict[tuple[int, int], int] = {}  # two kinds in a row -> the one that came next
        self._before = (-1, -1)
        self._counts = (0, 0)
        self._plans = 0  # the controller's, when the counts were taken
        self._watched = 0  # steps of this watch
        self._pause = 0  # steps until the next watch
        self._next_pause = _WATCH_STEPS
        self._was_unknown = False

    def forget(self) -> None:
        """The plan is given up."""
        self.tapes, self.search, self._positions, self._watched = None, None, [], 0

    def follow_marks(self, trace: "Trace", sizable: "Column", first: int, ring_length: int) -> None:
        """A ring of `ring_length` requests, folded from a trace, is followed: know where the program's marks are on it.

        `sizable` (m,) are the rows of the trace's requests that count, the ring's first is the one at `first`.
        """
        marks = trace.mark_event[trace.mark_kind == MARK_STEP]
        at = np.searchsorted(trace.start[sizable], marks)
        at = at[(at >= first) & (at < len(sizable))]
        self._positions = np.unique((at - first) % ring_length).tolist()
        self.tapes = None

    # --- at a mark

    def at_mark(self) -> None:
        """A step ended."""
        from stalloc.runtime.controller import Phase

        controller, search = self._controller, self.search
        if search is not None and search.done.is_set():
            self.search = None
            if search.tapes is not None:
                self._put_in_force(search, search.tapes)
        if controller.phase is Phase.PLANNED:
            unknown = self._step_was_unknown()
            if unknown and _WASTE * controller.state["STEP_ALLOCATED_PEAK"] < controller.state["RESERVED"]:
                controller.release_unused()  # no pass over the plan ends, after which unused segments go back
            self._watch(unknown)
            self._find_place()
        elif controller.phase is Phase.PLANNING:
            self._find_place()

    def _step_was_unknown(self) -> bool:
        state = self._controller.state
        counts = state["HITS"], state["MISSES"] + state["CONFLICTS"]
        fresh = self._plans == self._controller.num_plans
        hits, missed = (counts[0] - self._counts[0], counts[1] - self._counts[1]) if fresh else (0, 0)
        self._counts, self._plans = counts, self._controller.num_plans
        return missed * _UNKNOWN_SHARE > hits + missed

    def _find_place(self) -> None:
        """Tell the core where the tape goes on."""
        state = self._controller.state
        if self.tapes is not None:
            begins = self.tapes.begins
            followed = int(np.searchsorted(begins, state["RING_START"], side="right")) - 1
            self._followers[self._before] = followed
            self._before = self._before[1], followed
            expected = self._followers.get(self._before, followed)
            begin = begins[expected]
            core.begin_step(state.address, begin, begin + len(self.tapes.kinds[expected].size), begin)
        elif self._positions:
            cursor, length = state["CURSOR"], state["TAPE_LENGTH"] - state["RING_START"]
            places = np.array(self._positions) + state["RING_START"]
            apart = np.abs((cursor - places + length // 2) % length - length // 2)
            nearest = int(apart.argmin())
            if apart[nearest] > _NEAR:
                nearest = (self._current + 1) % len(places)
                core.begin_step(state.address, state["RING_START"], state["TAPE_LENGTH"], int(places[nearest]))
            elif apart[nearest] == 0:
                core.begin_step(state.address, state["RING_START"], state["TAPE_LENGTH"], cursor)
            self._current = nearest

    # --- kinds

    def look_for_kinds(self, trace: "Trace") -> None:
        """No cycle of steps was found while observing: see whether kinds of steps recur in any order."""
        if self.search is None and int((trace.mark_kind == MARK_STEP).sum()) >= _LEAST_STEPS:
            self._start_search(trace, [])

    def _watch(self, unknown: bool) -> None:
        """Record while there are steps that the plan does not know, and look for kinds among them."""
        controller = self._controller
        state = controller.state
        if controller.settings.keep_recording or not controller.settings.plan:
            return  # the record is somebody else's
        if not self._watched:
            self._pause -= 1
            if unknown and self._pause <= 0:
                self._watched = 1
                self._begin_record()
            return
        self._watched += 1
        look, self._was_unknown = unknown or self._was_unknown, unknown
        if self._watched > _WATCH_STEPS:
            self._watched, self._pause = 0, self._next_pause
            self._next_pause *= 2
            state.forget_record()
        elif state["NUM_EVENTS"] > _MOST_EVENTS or not state["RECORDING"]:
            self._begin_record()
        elif look and self.search is None:
            self._start_search(controller.trace(), self.tapes.kinds if self.tapes is not None else [])

    def _begin_record(self) -> None:
        controller = self._controller
        controller.marks[:] = [(0, MARK_STEP, "")]
        controller.state.write(RECORDING=1, NUM_EVENTS=0, NUM_SIZABLE=0, CHECK_AT=0)

    def _start_search(self, trace: "Trace", known: "list[StepKind]") -> None:
        self.search = _Search(known, self._made)
        threading.Thread(target=_look, args=(self.search, trace), name="stalloc planner", daemon=True).start()

    def _put_in_force(self, search: _Search, tapes: "Tapes") -> None:
        from stalloc.runtime.controller import Phase

        controller = self._controller
        if controller.phase not in (Phase.OBSERVING, Phase.PLANNED):
            return
        if controller.phase is Phase.OBSERVING:
            controller.note_observed()
        if controller.ask_for_room(round_up(tapes.peak_bytes)):
            self.search = search  # the next mark tries again
            return
        columns = tapes.size, tapes.stream, tapes.offset, 0, 0
        if not controller.put_in_force(round_up(tapes.peak_bytes), columns, tapes.begins):
            self._watched, self._pause = 0, self._next_pause
            if controller.state["MODE"] != MODE_REPLAY:
                controller.rest("an arena for all kinds of steps does not fit beside what lives")
            return
        longest = max(len(kind.size) for kind in tapes.kinds)
        controller.state["ASK_AFTER_MISSES"] = 64 * longest + 1024
        controller.plan, controller.steps_per_ring = tapes.largest_plan(controller.device.index), 1
        self.tapes, self._positions = tapes, []
        self._followers.clear()
        self._before, self._watched, self._next_pause = (-1, -1), 1, _WATCH_STEPS
        # other kinds may have been seen twice meanwhile, or once already: look again, and watch on
        self._was_unknown = True
        controller.state.write(RECORDING=1)


def _look(search: _Search, trace: "Trace") -> None:
    """Find kinds of steps that are not known, and plan them together with those that are."""
    try:
        from stalloc.lifespans.units import recurring_steps
        from stalloc.runtime.tapes import plan_steps

        found, steps = recurring_steps(trace)
        known = {kind.key for kind in search.known}
        usable = [kind for kind in found if (kind.end > 0).any()]
        fresh = [kind for kind in usable if kind.key not in known]
        recur = sum(step >= 0 for step in steps)
        if fresh and (known or 2 * recur >= len(steps)):
            again = {kind.key: kind for kind in usable}
            kinds = [again.get(kind.key, kind) for kind in search.known] + fresh
            kinds.sort(key=lambda kind: -kind.times_seen)
            search.tapes = plan_steps(kinds[:_MOST_KINDS], search.made)
    finally:
        search.done.set()
        trim()
