"""Made-up programs that leave their plans in every way and come back: nothing overlaps, and the plan serves again.

Contract: whether blocks overlap is judged by a sorted table of live intervals that shares no code with the allocator.
A program follows its cycle, or one of several kinds of steps; is disturbed for a few passes; its arena may be given up
in the middle and come again; then the known sequence returns. From the pass after that on every request has to be
served from the plan. A program is a function of its seed alone.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from running.soak_cycles import MIB, Cycle, from_requests, make_cycle, not_zero
from stalloc.compiled import njit
from stalloc.core import constants
from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.core.entry import cupy_entries, slow_entry
from stalloc.core.intrinsics import call3
from stalloc.core.state import DeviceState
from stalloc.runtime.shortage import segment_bytes
from stalloc.sizes import whole_pages

INSERT, DROP, RESIZE, REORDER, STREAM, REPEAT, CUT, HALVE = range(8)
NAMES = ("insert", "drop", "resize", "reorder", "change stream", "repeat", "cut short", "halve all")
_FIRST_ADDRESS = 0x7000_0000_0000
_MAX_LIVE = 1 << 14
_MAX_PROBLEMS = 20
OVERLAP, NOT_THE_DEVICES, REFUSED = 1, 2, 3
WRONG = ("", "two live blocks overlap", "an address is not the device's", "no memory")
_Request = tuple[int, int, int, int]  # time, bytes, stream, time of death
_CHECKED = 2  # passes in which everything has to be served from the plan


@njit(nogil=True)
def _first_at_or_after(starts, count, address):
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if starts[middle] < address:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True)
def _add_interval(starts, ends, count, start, end):
    """Add [start, end) to `count` disjoint intervals; False if it meets one of them."""
    place = _first_at_or_after(starts, count, start)
    if (place < count and starts[place] < end) or (place > 0 and ends[place - 1] > start):
        return False
    for i in range(count, place, -1):
        starts[i], ends[i] = starts[i - 1], ends[i - 1]
    starts[place], ends[place] = start, end
    return True


@njit(nogil=True)
def _remove_interval(starts, ends, count, start):
    for i in range(_first_at_or_after(starts, count, start), count - 1):
        starts[i], ends[i] = starts[i + 1], ends[i + 1]


@njit(nogil=True)
def _free_due(free, until, address, due, following, live, starts, ends):
    while live[1] < until:
        live[1] += 1
        one = due[live[1]]
        while one >= 0:
            _remove_interval(starts, ends, live[0], address[one])
            live[0] -= 1
            call3(free, 0, address[one], 0)
            one = following[one]
        due[live[1]] = -1


@njit(nogil=True)
def _run(allocate, free, state, size, stream, at, death, first, end, address, due, following, live, starts, ends, held):
    """Make the requests [first, end); 0, or what is wrong.

    Request i is made at time at[i] and freed before the first one at time death[i] or later. `due` and `following` hold
    the live requests by the time of their death; live[0] counts them, up to time live[1] all that is due was freed.
    `held` (k, 2) are the device's pieces.
    """
    for i in range(first, end):
        _free_due(free, at[i], address, due, following, live, starts, ends)
        place = call3(allocate, stream[i], size[i], 0)
        if place == 0:
            return REFUSED
        whole = (size[i] + 511) // 512 * 512
        if not _add_interval(starts, ends, live[0], place, place + whole):
            return OVERLAP
        inside = False
        for k in range(len(held)):
            inside |= held[k, 0] <= place and place + whole <= held[k, 0] + held[k, 1]
        if not inside:
            return NOT_THE_DEVICES
        live[0] += 1
        address[i] = place
        until = max(death[i], at[i] + 1)
        following[i], due[until] = due[until], i
    return 0


@njit(nogil=True)
def _call(function, a, b):
    return call3(function, a, b, 0)


class Device:
    def __init__(self) -> None:
        self.state = DeviceState(0, slow_entry(self._help))
        self._states = np.array([self.state.address], np.int64)
        self.allocate, self.free = cupy_entries(self._states.ctypes.data)
        self.pieces: dict[int, int] = {}
        self.parts: dict[int, int] = {}  # base of a segment -> base of the piece that it is a part of
        self.held = np.zeros((256, 2), np.int64)
        self._next = _FIRST_ADDRESS
        for stream in range(3):  # their indices are those of the programs' streams
            _call(self.free, 0, _call(self.allocate, stream, 1))
        self.clear()

    def _help(self, device: int, request: int, argument: int) -> int:
        if request & ((1 << constants.REASON_BITS) - 1) != constants.NEED_SEGMENT:
            return 1
        pool = request >> constants.REASON_BITS
        size = segment_bytes(self.state.heap.pool_kind(pool), argument)
        base = self.take(size)
        self.parts[base] = base
        return int(self.state.heap.give_segment(pool, base, size))

    def take(self, size: int) -> int:
        base, self._next = self._next, self._next + size + 2 * MIB
        self.held[len(self.pieces)] = base, size
        self.pieces[base] = size
        return base

    def give_back(self) -> None:
        for base in self.state.heap.remove_free_segments():
            piece = self.parts.pop(base)
            if piece not in self.parts.values():
                del self.pieces[piece]
        self.held[:] = 0
        for i, (base, size) in enumerate(self.pieces.items()):
            self.held[i] = base, size

    def clear(self) -> None:
        self.give_back()
        self._next = _FIRST_ADDRESS

    def serve(self, schedule: tuple[Any, ...], begins: list[int], peak_bytes: int) -> None:
        arena_bytes = whole_pages(peak_bytes)
        size, stream, offset = schedule
        columns = {"size": size, "stream": stream, "offset": offset, "begins": tuple(begins)}
        self.state.arena.install(ArenaSchedule(arena_bytes=arena_bytes, **columns))
        base = self.take(arena_bytes)
        self.state.arena.count(arena_bytes)
        self.state.arena.serve(base, arena_bytes)

    def dissolve(self) -> bool:
        """Give the plan up and make segments of its arena; False if it has to stay."""
        arena = self.state.record.plan.arena
        self.state.arena.drop_schedule()
        parts = self.state.arena.dissolve()
        for part in parts:
            self.parts[part] = arena
        return bool(parts)


@dataclass
class Outcome:
    num_requests: int = 0
    missed: int = 0  #: requests that the plan did not serve while the program was disturbed
    lost: int = 0  #: requests that were not on the schedule although the known sequence had returned a pass before
    displaced: int = 0  #: requests that were found, but whose places were still taken
    wrong: str = ""  #: what is wrong; empty: nothing
    deviations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Pass:
    kind: int  #: which cycle
    deviations: list[int]
    exact: bool  #: everything has to be served from the plan


class _Program:
    """One program: its cycles, its plan, and the requests that it makes, all drawn beforehand."""

    def __init__(self, rng: np.random.Generator) -> None:
        kinds = int(rng.choice([1, 1, 1, 2, 3, 4]))
        streams = int(rng.choice([1, 1, 2, 3])) if kinds == 1 else 1
        self.cycles = [_cycle(rng, kinds, streams) for _ in range(kinds)]
        self.peak_bytes = max(cycle.peak_bytes for cycle in self.cycles)
        self.begins = [0, *np.cumsum([len(cycle) for cycle in self.cycles])[:-1].tolist()]
        columns = ("size", "stream", "offset")
        self.schedule = tuple(np.concatenate([getattr(cycle, name) for cycle in self.cycles]) for name in columns)
        self.marked = kinds > 1 or bool(rng.random() < 0.4)
        # kinds that begin alike are told apart only where they part: then the marks have to be right
        self.alike = len({int(cycle.size[0] + 511) // 512 for cycle in self.cycles}) < kinds
        self.passes = [_Pass(int(rng.integers(kinds)), [], True) for _ in range(kinds)]
        for _ in range(int(rng.integers(1, 4))):
            what = rng.integers(0, CUT, rng.integers(1, 9)) if rng.random() < 0.9 else [rng.choice([CUT, HALVE])]
            self.passes.append(_Pass(int(rng.integers(kinds)), [int(one) for one in what], False))
        last = len(self.passes) - 1
        self.gives_up = int(rng.integers(kinds, last + 1)) if rng.random() < 0.25 else -1
        self.passes += [_Pass(int(rng.integers(kinds)), [], i > 0) for i in range(1 + _CHECKED)]
        rows: list[_Request] = []
        self.bounds, now = [0], 0
        for index, one in enumerate(self.passes):
            cycle = self.cycles[one.kind]
            until = sum(len(self.cycles[other.kind]) for other in self.passes[index : last + 2]) - 1
            rows += [(t + now, s, q, d + now) for t, s, q, d in _disturb(rng, cycle, one.deviations, until)]
            self.bounds.append(len(rows))
            now += len(cycle)
        columns = map(np.ascontiguousarray, np.array(rows, np.int64).T)
        self.at, self.size, self.stream, self.death = columns
        self.latest = int(max(self.death.max(), self.at.max())) + 2


def _cycle(rng: np.random.Generator, kinds: int, streams: int) -> Cycle:
    length = int(rng.integers(12, 240 if kinds == 1 else 120))
    cycle = make_cycle(rng, length, streams=streams, num_sizes=int(rng.integers(2, 60)))
    if kinds == 1:
        return cycle
    # kinds of steps hand nothing on to each other
    return from_requests(cycle.size, cycle.stream, np.minimum(cycle.lifespan, length - np.arange(length)))


def _disturb(rng: np.random.Generator, cycle: Cycle, what: list[int], until: int) -> list[_Request]:
    """One pass over a cycle with deviations; it begins at time 0, and what is not on the cycle dies by `until`."""
    rows = [(i, int(cycle.size[i]), int(cycle.stream[i]), i + int(cycle.lifespan[i])) for i in range(len(cycle))]
    for kind in what:
        if not rows:
            break
        at = int(rng.integers(len(rows)))
        count = min(int(rng.choice([1, 1, 1, 2, 5, 30])), len(rows) - at)
        here = rows[at : at + count]
        if kind == INSERT:
            lifespans = rng.geometric(0.02, count).tolist()
            sizes, streams = rng.integers(1, 4 * MIB, count).tolist(), rng.integers(0, 3, count).tolist()
            when = here[0][0]
            more = zip(sizes, streams, lifespans, strict=True)
            rows[at:at] = [(when, size, stream, min(when + lives, until)) for size, stream, lives in more]
        elif kind == DROP:
            del rows[at : at + count]
        elif kind == RESIZE:
            change = int(rng.choice([-1, 1])) * int(rng.integers(1, 2 * MIB))
            rows[at : at + count] = [(t, max(1, s + change), q, d) for t, s, q, d in here]
        elif kind == REORDER:
            here = rows[at : at + max(count, 2)]
            order = rng.permutation(len(here)) if count > 1 else np.arange(len(here))[::-1]
            rows[at : at + len(here)] = [(row[0], *here[i][1:]) for row, i in zip(here, order.tolist(), strict=True)]
        elif kind == STREAM:
            rows[at : at + count] = [(t, s, (q + 1) % 3, d) for t, s, q, d in here]
        elif kind == REPEAT:
            rows[at + count : at + count] = [(here[-1][0], s, q, min(d, until)) for _, s, q, d in here]
        elif kind == CUT:
            del rows[at:]
        elif kind == HALVE:
            rows = [(t, max(1, s // 2), q, d) for t, s, q, d in rows]
    return rows


def one_program(device: Device, seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    program, state = _Program(rng), device.state
    outcome = Outcome(len(program.at))
    live, (starts, ends) = np.zeros(2, np.int64), np.zeros((2, _MAX_LIVE), np.int64)
    address, following = np.zeros((2, len(program.at)), np.int64)
    due = np.full(program.latest + 1, -1, np.int64)
    work = address, due, following, live, starts, ends
    requests = program.size, program.stream, program.at, program.death
    device.serve(program.schedule, program.begins, program.peak_bytes)
    planned = True
    for index, one in enumerate(program.passes):
        if not planned:
            device.serve(program.schedule, program.begins, program.peak_bytes)
            planned = True
            outcome.deviations.append("planned again")
        if program.marked:
            expected = one.kind if program.alike or rng.random() < 0.5 else int(rng.integers(len(program.cycles)))
            begin = program.begins[expected]
            state.arena.begin_step(begin, begin + len(program.cycles[expected]), begin)
        before = state.record.iterations.misses, state.record.iterations.conflicts
        first, end = program.bounds[index], program.bounds[index + 1]
        middle = int(rng.integers(first, end + 1)) if index == program.gives_up else end
        entries = device.allocate, device.free, state.address
        result = _run(*entries, *requests, first, middle, *work, device.held)
        if index == program.gives_up and device.dissolve():
            planned = False
            outcome.deviations.append("given up")
        if result == 0 and middle < end:
            result = _run(*entries, *requests, middle, end, *work, device.held)
        outcome.deviations += [NAMES[kind] for kind in one.deviations]
        if result != 0:
            outcome.wrong = WRONG[result]
            return outcome
        misses, conflicts = state.record.iterations.misses - before[0], state.record.iterations.conflicts - before[1]
        if one.exact:
            outcome.lost, outcome.displaced = outcome.lost + misses, outcome.displaced + conflicts
        else:
            outcome.missed += misses + conflicts
        if rng.random() < 0.1:
            device.give_back()
    _free_due(device.free, program.latest, *work)
    outcome.wrong = f"{live[0]} blocks are left" if live[0] else _left_over(device)
    return outcome


def _left_over(device: Device) -> str:
    state = device.state
    if state.record.plan.arena_bytes and not device.dissolve():
        return "the arena has to stay although nothing lives"
    device.clear()
    counters = ["total.allocated_bytes", "total.requested_bytes", "statistics.reserved_bytes", "total.num_live"]
    counters += ["lookup.live_count", "statistics.num_unknown_frees", "plan.arena_live"]
    left = not_zero(state.record, *counters)
    if device.pieces:
        left.append(f"{len(device.pieces)} pieces of memory are left")
    return ", ".join(left)


def soak_programs(num_programs: int, seed: int) -> dict[str, Any]:
    device, began = Device(), time.perf_counter()
    problems, exceptions, totals = [], [], Counter[str]()
    for one in range(seed, seed + num_programs):
        outcome = one_program(device, one)
        late = {"lost": outcome.lost, "displaced": outcome.displaced}
        totals.update(outcome.deviations)
        totals.update(programs=1, requests=outcome.num_requests, missed=outcome.missed, **late)
        totals.update({f"programs with requests {what} after recovery": count > 0 for what, count in late.items()})
        if outcome.wrong:
            problems.append(f"seed {one}: {outcome.wrong}")
            device = Device()  # whatever is wrong with it must not spoil the next program
        elif outcome.lost or outcome.displaced:
            exceptions.append(f"seed {one}: {late} after {', '.join(outcome.deviations)}")
        if len(problems) == _MAX_PROBLEMS:
            break
    seconds = time.perf_counter() - began
    return {"seed": seed, "seconds": seconds, "counts": totals, "exceptions": exceptions, "problems": problems}
