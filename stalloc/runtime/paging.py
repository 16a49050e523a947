"""Which pages the segments and the arena of one device have, and how much may be held before free ones move.

Contract: no more is held than is allowed as long as pages lie free: those move first. Memory is mapped before the core
serves from it, and unmapped after the core has ceased to and the device is done with it; never while a graph is
captured. `match` repairs what an interruption left half done. Allowed is the peak, and a little; more where pages would
never rest, as each move waits for the device.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stalloc.core.constants import GRANULE, MODE_PLANNED, PRIVATE_KINDS, SMALL_KIND
from stalloc.core.snapshot import segments
from stalloc.core.state import DeviceState
from stalloc.device.mapped_pages import page_runs
from stalloc.runtime import decisions
from stalloc.runtime.runtime_settings import SteadySteps
from stalloc.sizes import PAGE_BYTES, whole_pages

if TYPE_CHECKING:
    from stalloc.runtime.memory import DeviceMemory


class Allowance:
    """How many bytes one device's program may hold, so that its pages need not move.

    Where they move in step after step it grows until they do not, or to what fragmentation commonly costs with
    PyTorch's expandable segments; a new plan begins anew. Under a plan of steps that are alike in part it grows once:
    pages move there for what the data decides. It stays where a program marks no steps, as in CuPy, whose asynchronous
    pool holds what is asked for in steps of 32 MiB.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state, self._record = state, state.record
        self._parts = self._least_parts = decisions.least_parts(repeats=True)
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
        self._parts = self._least_parts = decisions.least_parts(repeats=False)

    def begin_plan(self) -> None:
        self._parts, self._restless, self._rest_bytes = self._least_parts, 0, 0

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

    def skip(self, steps: SteadySteps) -> None:
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


Ranges = list[tuple[int, int]]  # address and bytes of each
_ALL = 1 << 60


class Paging:
    """The pages of one device's segments and arena."""

    def __init__(self, memory: "DeviceMemory") -> None:
        self._memory, self._state, self._source = memory, memory.state, memory.source
        self.num_growths = 0  #: how often segments got pages
        self.num_moves = 0  #: how often pages were given up for others, so that no more is held
        self._gathers = False  # pages that were given up wait for the places of a plan
        self.allowance = Allowance(self._state)
        self._sure_bytes = 0  # which the device can be taken to have: half of what it said it had, less what was mapped

    def grow(self, pool: int, size_bytes: int) -> bool:
        """Map pages where a pool can serve a request (bytes, rounded); False if there is no memory, or no row."""
        if self._source.refusal:
            return False
        self.num_growths += 1
        done = self._grow(pool, size_bytes)
        self._collect()
        return done

    def _grow(self, pool: int, size_bytes: int) -> bool:
        for _ in range(3):  # somebody else may take what the device was taken to have, and what was lent comes back
            ranges, place = self._state.heap.find_growth(pool, size_bytes)
            if not ranges:
                if not self.add_range(pool, size_bytes):
                    break
                ranges, place = self._state.heap.find_growth(pool, size_bytes)
            if not self._make_room(_bytes_of(ranges), self.allowance.held_bytes(size_bytes), between=place):
                if not self._memory.is_capturing and self._end_stitched():
                    continue
                return self._stitch(pool, size_bytes)
            if all(self._add_pages(address, lacking) for address, lacking in ranges):
                return True
            self._sure_bytes = 0
        self._source.doubt_pages(size_bytes)
        return False

    def _stitch(self, pool: int, size_bytes: int) -> bool:
        """Serve a request from a segment stitched of what other pages have left over; False if that is not enough."""
        heap, memory, kind = self._state.heap, self._memory, self._state.heap.pool_kind(pool)
        if memory.is_capturing:
            return False
        self._leave(_ALL, spares_arena=True)
        if kind == SMALL_KIND or kind >= PRIVATE_KINDS or memory.poison is not None:
            return False
        tail, head = heap.find_stitch(pool, size_bytes)
        own_bytes = whole_pages(max(size_bytes - tail[1] - head[1], 0))
        if not (tail[1] or head[1]) or own_bytes > self._source.free_bytes():
            return False
        stitched = self._source.reserve(own_bytes + 2 * GRANULE)
        if stitched is None:
            return False
        begin = stitched.ptr + GRANULE
        address = begin - tail[1]
        memory.segments[address] = stitched
        with self._source.at_device(capturing=False):
            parts = ((begin - GRANULE, *tail), (begin + own_bytes, *head))  # a page each, with the memory of a remnant
            done = all(size == 0 or stitched.share(page, self.range_of(at), at) for page, at, size in parts)
            done = done and (own_bytes == 0 or stitched.map(begin, own_bytes))
        if done and heap.begin_stitch(pool, begin, own_bytes, tail, head):
            return True
        del memory.segments[address]
        self.sweep()
        return False

    def _end_stitched(self) -> bool:
        ended = self._state.heap.end_stitched()
        for address in ended:
            del self._memory.segments[address]
        if ended:
            with self._source.at_device(capturing=False):
                self._source.wait()
                self.sweep()
        return bool(ended)

    def _add_pages(self, address: int, size_bytes: int) -> bool:
        """Let a segment serve from pages that it has without memory so far; False if there is no memory, or no row."""
        memory = self.range_of(address)
        if not self._map(memory, address, size_bytes):
            return False
        if self._state.heap.use_pages(address, size_bytes):
            return True
        memory.unmap(address, size_bytes)
        return False

    def fill(self, address: int, size_bytes: int) -> bool:
        lacking = self.range_of(address).lacking(address, address + size_bytes)
        return self._has_room(_bytes_of(lacking)) and all(self._add_pages(*one) for one in lacking)

    def add_range(self, pool: int, size_bytes: int) -> bool:
        """Give a pool addresses without memory, for so many bytes at least; False if there are none, or no row."""
        span = whole_pages(decisions.range_bytes(size_bytes, self._memory.device.total_bytes))
        memory = self._source.reserve(span) or self._source.reserve(whole_pages(size_bytes))
        if memory is None:
            return False
        self._memory.segments[memory.ptr] = memory
        if self._state.heap.give_range(pool, memory.ptr, memory.size_bytes):
            return True
        del self._memory.segments[memory.ptr]
        return False

    def back(self, position: int) -> None:
        """Map what the place of an entry lacks, if there is memory, and what is needed soon after, if any is spare."""
        if not self._source.refusal:
            self._back(position)
            self._collect()

    def _back(self, position: int) -> None:
        memory, (begin, end) = self._memory.arenas.arena, self._state.arena.planned_place(position)
        lacking = memory.lacking(memory.ptr + begin, memory.ptr + end)
        if not lacking:
            return
        ahead = self._state.arena.lacking_ahead(position) if self.allowance.is_marked else []
        allowed_bytes, ahead_bytes = self.allowance.held_bytes(end - begin), len(ahead) * GRANULE
        if not self._make_room(_bytes_of(lacking), allowed_bytes, place=(begin, end), ahead_bytes=ahead_bytes):
            return
        spare_bytes = allowed_bytes - self._state.record.statistics.reserved_bytes - _bytes_of(lacking)
        soon = [memory.ptr + at for at in ahead[: max(0, spare_bytes) // GRANULE]]
        for address, size_bytes in lacking + page_runs(sorted(soon)):
            if not self._map(memory, address, size_bytes):
                self._source.doubt_pages(size_bytes)
                return
            self._state.arena.use_pages(address - memory.ptr, address - memory.ptr + size_bytes)

    def gather(self) -> None:
        """Unmap what is free and keep it, since much is about to be mapped elsewhere: a plan's places, or a next step.

        So the device is waited for once, not at each request, and no page is made that was just given back. It ends
        with `end_gathering`: at the next mark of a step, or when the plan has been followed once.
        """
        if self._memory.is_capturing:
            return
        self._gathers = True
        found: Ranges = []
        while ranges := self._cease(_ALL, spares_arena=True):
            found += ranges
        self._unmap(found)

    def end_gathering(self) -> None:
        if self._gathers and not self._memory.is_capturing:
            self._gathers = False
            self._source.collect()

    def _collect(self) -> None:
        if not self._gathers and not self._memory.is_capturing:
            self._source.collect()

    def release(self) -> None:
        """Give every page of segments that is free back to the device; none while a graph is captured."""
        if self._memory.is_capturing:
            return
        self._gathers = False
        self._end_stitched()
        while self._leave(_ALL, spares_arena=True):
            pass
        self._forget_empty()
        self._source.collect()

    def _forget_empty(self) -> None:
        for base in self._state.heap.remove_empty_ranges():
            del self._memory.segments[base]
        self.sweep()

    def reserve_arena(self, size_bytes: int) -> Any:
        """Addresses for an arena, None if there are none; first those go that others left, if these are many."""
        if decisions.are_ranges_many(len(self._source.ranges)) and not self._memory.is_capturing:
            self._forget_empty()  # what has no memory any more was waited for
        return self._source.reserve(size_bytes)

    def sweep(self) -> None:
        """Close the ranges of addresses that nobody uses any more; the device must be done with them."""
        used = {id(one) for one in (*self._memory.segments.values(), *self._memory.kept, self._memory.arenas.arena)}
        for memory in [one for one in self._source.ranges if id(one) not in used]:
            memory.close()
            self._source.ranges.remove(memory)

    def match(self) -> None:
        if self._memory.is_capturing:
            return
        served = [(one.address, one.address + one.size_bytes) for one in segments(self._state)]
        covered = {page for begin, end in served for page in range(begin // GRANULE, -(-end // GRANULE))}
        self._source.wait()
        self.sweep()
        for memory in self._source.ranges:
            for page in memory.mapped():
                if page // GRANULE not in covered:
                    memory.unmap(page, GRANULE)

    def range_of(self, address: int) -> Any:
        return next(one for one in self._source.ranges if one.ptr <= address < one.ptr + one.size_bytes)

    @property
    def device_bytes(self) -> int:
        return self._state.record.statistics.reserved_bytes + self._source.free_bytes()

    def forget_room(self) -> None:
        self._sure_bytes = 0

    def peak_is(self, large: Callable[[int, int], bool]) -> bool:
        """Whether memory comes by pages, and the program's peak is large for the device, which is asked only then.

        The device has no less than it can be taken to have, unless somebody else took half of what it had.
        """
        if not self._source.paged:
            return False
        peak, sure_bytes = self.allowance.peak_bytes, self._state.record.statistics.reserved_bytes + self._sure_bytes
        return large(peak, sure_bytes) and large(peak, self.device_bytes)

    def make_room(self, size_bytes: int) -> bool:
        return self._make_room(size_bytes, _ALL)

    def _make_room(
        self,
        size_bytes: int,
        allowed_bytes: int,
        *,
        between: tuple[int, int] = (0, 0),
        place: tuple[int, int] = (0, 0),
        ahead_bytes: int = 0,
    ) -> bool:
        """Have so many bytes to be mapped, while no more is held than is allowed, if that can be; whether there are.

        What is free `between` stays, and what the `place` has, bytes of the arena. `ahead_bytes` more are taken where
        nothing needs them soon.
        """
        if self._memory.is_capturing:
            return self._has_room(size_bytes)
        excess = self._state.record.statistics.reserved_bytes + size_bytes - allowed_bytes
        if excess > 0 and self.peak_is(decisions.is_at_brim):
            excess = 0  # pages that move leave holes, which a step that needs more may have no use for
        if excess > 0:
            self.num_moves += 1
            self.allowance.note_move(whole_pages(excess))
        if excess + ahead_bytes > 0:
            self._leave(excess, between=between, place=place, ahead_bytes=ahead_bytes)
        if self._has_room(size_bytes):
            return True
        self._sure_bytes = 0
        self._state.record.statistics.num_retries += 1
        self._state.write(memory_is_short=1)
        self._memory.wait_for_deferred()
        self._leave(_ALL, between=between, spares_arena=True)
        lacking = size_bytes - self._source.free_bytes()
        if lacking > 0:
            self._leave(lacking, between=between, place=place)
        self._memory.lacking_bytes = max(self._memory.lacking_bytes, size_bytes)
        return self._source.free_bytes() >= size_bytes

    def _leave(self, size_bytes: int, **what: Any) -> bool:
        """Unmap so many bytes of what is free, as `DeviceState.leave_pages` has it; whether there was any."""
        ranges = self._cease(size_bytes, **what)
        self._unmap(ranges)
        return bool(ranges)

    def _cease(self, size_bytes: int, *, spares_arena: bool = False, **what: Any) -> Ranges:
        spares_arena = spares_arena or self._memory.arenas.arena is None  # a parent's is left alone
        ranges, begins = self._state.leave_pages(size_bytes, spares_arena=spares_arena, **what)
        for before, now in begins.items():
            memory = self._memory.segments.pop(before)
            if now:
                self._memory.segments[now] = memory
        return ranges

    def _has_room(self, size_bytes: int) -> bool:
        """Whether the device has so many bytes; asking it takes long, so it is not asked each time."""
        if size_bytes > self._sure_bytes:
            free = self._source.free_bytes()
            self._sure_bytes = free // 2
            if size_bytes > free:
                return False
        self._sure_bytes -= size_bytes
        return True

    def _map(self, memory: Any, address: int, size_bytes: int) -> bool:
        with self._source.at_device(capturing=self._memory.is_capturing):
            done: bool = memory.map(address, size_bytes)
        if done and self._memory.poison is not None:
            self._memory.poison.taken(address, size_bytes)
        return done

    def _unmap(self, ranges: Ranges) -> None:
        if not ranges:
            return
        with self._source.at_device(capturing=False):
            self._source.wait()
            for address, size_bytes in ranges:
                if self._memory.poison is not None:
                    self._memory.poison.returned(address, size_bytes)
                self.range_of(address).unmap(address, size_bytes)


def _bytes_of(ranges: Ranges) -> int:
    return sum(size for _, size in ranges)
