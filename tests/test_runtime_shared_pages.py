"""Pages of an arena that streams shared: those that lie in several segments go back like any other."""

from typing import Any

import numpy as np
import pytest
from programs.core_machine import Cycle
from programs.cycle_program import INSERT, LINGER, Program
from test_runtime_handing import Checked, shared_plan

from stalloc.core.constants import GRANULE

MANY = 1 << 60  # bytes: more than there are


class Paged(Checked):
    """A machine whose arena has memory by pages."""

    def __init__(self, num_streams: int) -> None:
        super().__init__(num_streams)
        self.pages: set[int] = set()  # addresses of those that have memory

    def back(self, every: int = 1) -> None:
        """Give all of the arena memory, or every so many pages."""
        for begin in range(0, self.state.record.plan.arena_bytes, every * GRANULE):
            self.state.arena.use_pages(begin, begin + GRANULE)
            self.pages.add(self.state.record.plan.arena + begin)

    def dissolve(self) -> list[int]:
        """Make segments of the arena, once all streams are done with it; their bases."""
        self.state.arena.drop_schedule()
        self.state.arena.end_sharing()
        self.driver.synchronize()
        return self.state.arena.dissolve()

    def leave(self, wanted: int = MANY) -> tuple[list[tuple[int, int]], dict[int, int]]:
        """Take the memory of pages that are free in segments away: of which, and which segments begin elsewhere."""
        ranges, begins = self.state.leave_pages(wanted)
        self.driver.synchronize()
        for address, size in ranges:
            self.pages.difference_update(range(address, address + size, GRANULE))
        return ranges, begins

    def check(self) -> None:
        """What lives has memory, and nothing is held that is not needed."""
        used = {page for at, size in self.live.items() for page in range(at - at % GRANULE, at + size, GRANULE)}
        inside = {page for page in used if page in self.pages}
        assert inside == self.pages, "a page is held in which nothing lives"
        assert not [page for page in used if self._is_of_arena(page) and page not in self.pages]
        others = sum(size for base, size in self.segments.items() if base != self.first)
        assert self.state.record.statistics.reserved_bytes == len(self.pages) * GRANULE + others

    def _is_of_arena(self, address: int) -> bool:
        return self.first <= address < self.first + dict(self.segments.items())[self.first]

    first = 0  # address of the arena


def start(seed: int) -> tuple[Paged, Program]:
    """A machine that serves a cycle whose streams share pages, and its program."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    cycle, machine = Cycle(rng, 60, streams=3), Paged(3)
    cycle.size = -(-cycle.size // 512) * 512
    machine.follow(cycle, shared_plan(cycle), has_memory=False)
    machine.first = machine.state.record.plan.arena
    return machine, Program(machine, cycle, rng)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_a_page_that_is_free_in_all_segments_that_have_a_part_of_it_goes_back(seed: int) -> None:
    machine, program = start(60 + seed)
    machine.back()
    for _ in range(3):
        program.one_pass({5: INSERT, 20: LINGER})
    bases = set(machine.dissolve())
    num_shared = sum(base % GRANULE > 0 for base in bases)
    while True:
        _, begins = machine.leave()
        machine.check()
        num_shared -= len(begins)
        assert set(begins) <= bases
        bases = bases - set(begins) | {base for base in begins.values() if base}
        if not machine.live:
            break
        for address in machine.live.addresses()[::3]:
            machine.free(address)
    assert num_shared == 0
    assert not machine.pages
    machine.give_back_segments()
    assert machine.state.record.statistics.reserved_bytes == 0
    assert set(machine.state.heap.remove_empty_ranges()) == bases


@pytest.mark.parametrize("seed", range(4))
def test_no_more_pages_are_taken_from_streams_than_are_asked_for(seed: int) -> None:
    machine, program = start(60 + seed)
    machine.back()
    program.one_pass()
    num_shared = len({base // GRANULE for base in machine.dissolve() if base % GRANULE})
    program.end()
    machine.state.leave_pages((len(machine.pages) - num_shared) * GRANULE)  # all others
    before = machine.state.record.statistics.reserved_bytes
    page = int(machine.state.heap.segments()[0].max()) // GRANULE * GRANULE
    shared, _ = machine.state.leave_pages(2 * GRANULE, between=(page, page + GRANULE))
    assert len(shared) == 2
    assert (page, GRANULE) not in shared
    assert machine.state.record.statistics.reserved_bytes == before - 2 * GRANULE


@pytest.mark.parametrize("seed", range(4))
def test_a_page_without_memory_is_of_one_stream(seed: int) -> None:
    machine, program = start(60 + seed)
    machine.back(every=2)
    for _ in range(3):
        program.one_pass()
    parted = [base for base in machine.dissolve() if base % GRANULE]
    assert parted
    assert all(base - base % GRANULE in machine.pages for base in parted), "memory would have to come to parts of pages"


@pytest.mark.usefixtures("cuda_torch")
def test_a_program_of_two_branches_on_two_streams_holds_nothing_in_the_end(run_checks: Any) -> None:
    assert run_checks(_BRANCHES) == {"planned": True, "left": True, "allocated": 0, "reserved": 0}


_BRANCHES = """
import gc, json, math, random
import stalloc
from stalloc.runtime import Settings
stalloc.install(device="virtual", settings=Settings(streams="share", planning_share=math.inf))
import torch
from stalloc.integrations import statistics
is_planned = lambda: statistics()[0].phase == "running on the plan"
rng, weights = random.Random(0), []
for i in range(8):
    weights.append(torch.zeros(300_000 + 50_000 * i, device="cuda", requires_grad=True))
optimizer = torch.optim.SGD(weights, lr=0.1)
side, main = torch.cuda.Stream(), torch.cuda.current_stream()

def branch(weights):
    total = 0
    for weight in weights:
        for _ in range(5):
            weight = (weight * 1.5).sin()
        total = total + weight.sum()
    return total

def forward():
    side.wait_stream(main)
    with torch.cuda.stream(side):
        first = branch(weights[:4])
    second = branch(weights[4:])
    main.wait_stream(side)
    first.record_stream(main)
    return first, second

for _ in range(16):
    sum(forward()).backward()
    optimizer.step()
    optimizer.zero_grad()
said, held = {"planned": is_planned()}, forward()  # lives in the arena when its plan goes
for _ in range(40):
    if is_planned():
        others = [torch.empty(rng.randrange(10_000, 900_000), device="cuda") for _ in range(200)]
        optimizer.step()
        others.clear()
said["left"] = not is_planned()
del weights, optimizer, held
gc.collect()
torch.cuda.empty_cache()
said |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
print(json.dumps(said))
"""
