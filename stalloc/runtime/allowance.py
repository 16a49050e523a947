"""What may be held beyond the peak before pages that are free move: little, and more where they would never rest.

Contract: each move waits for the device. Where pages move in step after step, as where no plan serves or the plans of
several kinds of steps get in one another's way, what is allowed grows until they do not, or until it is what
fragmentation commonly costs with PyTorch's expandable segments; a new plan begins anew. Under a plan of steps that are
alike in part it grows once: pages move there for what the data decides, however much is held. It stays as it is where a
program marks no steps: such are those in CuPy, whose asynchronous pool holds what is asked for in steps of 32 MiB. A
plan whose pages move in step after step nevertheless gets pages for all of its places, where that costs no more than
said, or twice that where it keeps streams apart as PyTorch does, and the device has twice as much left.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stalloc.core.constants import MODE_PLANNED
from stalloc.core.state import DeviceState
from stalloc.runtime import decisions
from stalloc.sizes import PAGE_BYTES

if TYPE_CHECKING:
    from stalloc.runtime.steady_marks import SteadySteps


class Allowance:
    """How many bytes one device's program may hold, so that its pages need not move."""

    def __init__(self, state: DeviceState) -> None:
        self._state, self._record = state, state.record
        self._parts = self._least = decisions.least_parts(repeats=True)
        self._moved_bytes = self._peak_bytes = 0
        self._asked = 0, 0, 0  # bytes allocated with the last request that asked, if it was served; counts before it
        self._step_began = self._restless = 0  # requests until then; steps
        self._rest_bytes = 0  # with which all of its places have pages, once they are to rest so; 0: they are not

    @property
    def peak_bytes(self) -> int:
        return self._peak_with(0)

    def _peak_with(self, size_bytes: int) -> int:
        total, (asked_bytes, num_allocs, num_ooms) = self._record.total, self._asked
        was_served = total.num_allocs > num_allocs and self._record.statistics.num_ooms == num_ooms
        peaks = asked_bytes if was_served else 0, self._state.told_peak_bytes, self._state.allocated_peak_bytes
        self._peak_bytes = max(self._peak_bytes, *peaks)
        now = total.allocated_bytes + self._record.shared.deferred_bytes + size_bytes
        self._asked = now, total.num_allocs, self._record.statistics.num_ooms
        return max(self._peak_bytes, now)

    def held_bytes(self, size_bytes: int) -> int:
        peak = self._peak_with(size_bytes)
        return max(decisions.allowed_bytes(peak, self._parts), self._rest_bytes if self._is_planned else 0)

    @property
    def _is_planned(self) -> bool:
        return bool(self._record.hot.mode == MODE_PLANNED)

    @property
    def is_marked(self) -> bool:
        return self._step_began > 0

    @property
    def never_rests(self) -> bool:
        """Whether pages move in step after step that a plan serves, although as much is held as may be."""
        return self._is_planned and decisions.is_plan_to_blame(self._restless)

    def loosen(self) -> None:
        """The program has no steps that repeat: moving pages for the last few percent would cost it at every step."""
        self._parts = self._least = decisions.least_parts(repeats=False)

    def begin_plan(self) -> None:
        self._parts, self._restless, self._rest_bytes = self._least, 0, 0

    def note_move(self, size_bytes: int) -> None:
        self._moved_bytes += size_bytes

    def note_step(self, free_bytes: Callable[[], int]) -> None:
        """The program marks a step; `free_bytes`: what the device has, asked for only where it matters."""
        num_requests, planned = self._record.total.num_allocs - self._step_began, self._is_planned
        rests = decisions.rests(num_requests, self._moved_bytes // PAGE_BYTES, planned=planned)
        self._step_began, self._moved_bytes = self._record.total.num_allocs, 0
        self._restless = max(0, self._restless - 1) if rests else self._restless + 1
        if decisions.is_restless(self._restless) and not rests:
            most_parts = decisions.most_parts(alike_in_part=planned and self._record.tables.gaps != 0)
            self._parts = min(self._parts + 1, most_parts)
            if planned:
                self._let_rest(free_bytes, most_parts)

    def skip(self, steps: "SteadySteps") -> None:
        self._step_began, self._restless = steps.num_requests, max(0, self._restless - steps.count)

    def _let_rest(self, free_bytes: Callable[[], int], most_parts: int) -> None:
        """Allow what gives all places of the plan pages, if that is no more than so many parts of the peak.

        Or twice as many, as streams that are kept apart cost: PyTorch's allocator passes no memory from one to another.
        """
        record = self._record
        lacking_bytes = int(record.plan.arena_bytes - record.plan.arena_mapped_bytes)
        needed_bytes = int(record.statistics.reserved_bytes) + lacking_bytes
        if self._rest_bytes < needed_bytes:
            has_streams = record.plan.interval_streams & (record.plan.interval_streams - 1) != 0
            figures = needed_bytes, lacking_bytes, self.peak_bytes, free_bytes()
            rest_bytes = decisions.rest_bytes(*figures, most_parts=most_parts, has_streams=has_streams)
            self._rest_bytes = max(self._rest_bytes, rest_bytes)
