"""Small programs for hostile plans: requests that come and go in a cycle, with an oracle for every address.

Contract: an address that lies outside the memory that the device gave out, or in a live request, is an AssertionError.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.core.snapshot import segments
from stalloc.lifespans.repeating_schedule import Schedule
from stalloc.planner import Plan

MIB = 1 << 20
_LARGEST = 256 * MIB  # of the requests that are made
_PASSES = 3


class Oracle:
    """What lives, by address."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._live: list[tuple[int, int]] = []
        self._held: list[tuple[int, int]] = []  # memory of the device
        self._version: tuple[int, ...] = ()  # what it was read at

    def add(self, address: int, size_bytes: int) -> None:
        """A request is served at this address."""
        end, record = address + size_bytes, self._controller.state.record
        version = (
            record.statistics.num_segment_allocs,
            record.statistics.num_segment_frees,
            record.statistics.num_segments,
            record.plan.arena,
        )
        if version != self._version:
            found = segments(self._controller.state)
            self._held, self._version = [(one.address, one.address + one.size_bytes) for one in found], version
        inside = any(low <= address and end <= high for low, high in self._held)
        assert inside, f"{address:#x}, +{size_bytes} is not ours"
        place = bisect_left(self._live, (address, end))
        for low, high in self._live[max(place - 1, 0) : place + 1]:
            assert end <= low or high <= address, f"{address:#x}, +{size_bytes} overlaps {low:#x}, +{high - low}"
        insort(self._live, (address, end))

    def remove(self, address: int) -> None:
        """It is freed."""
        del self._live[bisect_left(self._live, (address, 0))]


@dataclass(frozen=True, eq=False)
class Program:
    """A step that repeats: entry i is requested in each pass and dies `lifespan[i]` requests later."""

    size: np.ndarray  #: (n,) bytes
    stream: np.ndarray  #: (n,) index
    lifespan: np.ndarray  #: (n,) requests, 1 to n

    @classmethod
    def of_plan(cls, plan: Plan) -> "Program":
        """What follows the schedule of a plan as far as its numbers make sense, whatever the plan says of lifespans."""
        count = len(plan.schedule_size)
        usable = (
            (plan.schedule_size > 0)
            & (plan.schedule_size <= _LARGEST)
            & (plan.schedule_stream >= 0)
            & (plan.schedule_stream < 8)
        )
        return cls(plan.schedule_size[usable], plan.schedule_stream[usable], np.full(int(usable.sum()), count // 2 + 1))

    def schedule(self) -> Schedule:
        """The schedule of this program: a cycle without a prologue."""
        count = len(self.size)
        start = np.arange(count, dtype=np.int64)
        return Schedule(
            size=self.size,
            stream=self.stream,
            start=start,
            end=start + self.lifespan,
            planned=np.ones(count, bool),
            num_prologue=0,
            cycle_start=0,
            cycle_end=count,
            row=start,
            covered_requests=3 * count,
            period_requests=count,
            minimum_size=513,
        )

    def run(self, controller: Any, rng: np.random.Generator) -> None:
        """Run a few passes, with a request of some other size now and then, and free everything."""
        oracle, state = Oracle(controller), controller.state
        due: dict[int, list[int]] = {}
        clock = 0
        for _ in range(_PASSES):
            for size, stream, lifespan in zip(
                self.size.tolist(), self.stream.tolist(), self.lifespan.tolist(), strict=True
            ):
                for address in due.pop(clock, ()):
                    oracle.remove(address)
                    state.free(address)
                asked = [(size, stream, lifespan)]
                if rng.random() < 0.1:
                    asked.append((int(rng.integers(513, 8 * MIB)), 0, int(rng.integers(1, 20))))
                for size_bytes, index, stays in asked:
                    address = state.malloc(size_bytes, index)
                    if address:  # else memory has run out, as it may
                        oracle.add(address, size_bytes)
                        due.setdefault(clock + stays, []).append(address)
                clock += 1
        for addresses in due.values():
            for address in addresses:
                state.free(address)


def make_program(rng: np.random.Generator) -> Program:
    """A program of random requests, some of which live into the next pass."""
    count = int(rng.integers(6, 24))
    size = (rng.choice(rng.integers(1, 4096, 5), count) * 1024 + 513).astype(np.int64)
    streams = rng.integers(0, 2, count) if rng.random() < 0.3 else np.zeros(count, np.int64)
    return Program(size, streams.astype(np.int64), np.minimum(rng.geometric(0.2, count), count).astype(np.int64))
