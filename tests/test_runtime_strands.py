"""Threads that make steps side by side on one device: each is planned by itself, whatever order they ask in."""

import math
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from numba import cfunc
from programs.core_machine import Intervals, Machine, Ring, hammer
from programs.step_program import Program

from stalloc.core.arena_tape import ArenaTape
from stalloc.core.constants import ACTION_ALLOC, ACTION_FREE_COMPLETED
from stalloc.core.records import Event, table, word_at
from stalloc.core.regions import on_pages
from stalloc.core.state import DeviceState
from stalloc.errors import PlanError
from stalloc.replay.offline import make_controller
from stalloc.runtime.askers import strands_of
from stalloc.runtime.controller import MARK_STEP, Controller
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.runtime.strand_search import side_by_side

MIB = 1 << 20


TASK = np.array([-1], np.int64)  # the piece of work for another that is under way, as torch has it for a thread
_TASK_AT = TASK.ctypes.data


@cfunc("int64(int64, int64, int64)")
def task_of(_, __, ___):
    """What stands for torch's function."""
    return word_at(_TASK_AT, 0).value


class Side:
    """One of several programs on a device, in a thread of its own; its backward pass is another thread's work."""

    def __init__(self, several: "Several", width: int) -> None:
        self.several, self.width = several, width
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.step = self.train()

    def train(self) -> Iterator[None]:
        """Steps for ever, a request at a time; the sizes of gradients are the same whatever the width."""
        several, run = self.several, self.thread.submit
        gradients: list[int] = []
        while True:
            activations: list[int] = []
            for i in range(8):
                activations.append(run(several.allocate, self.width * (1000 + 7 * i)).result())
                yield
            for address in gradients:
                run(several.free, address).result()
            gradients, task = [], several.new_task()
            loss = several.work(task, partial(several.allocate, self.width * 2000))
            for i in reversed(range(8)):
                gradients.append(several.work(task, partial(several.allocate, MIB + 512 * i)))
                several.work(task, partial(several.free, activations.pop()))
                yield
            several.work(task, partial(several.free, loss))
            run(several.controller.mark, MARK_STEP, "").result()
            if (search := several.controller.steps.search) is not None:  # equal runs, equal figures
                assert search.done.wait(60)
            several.steps += 1
            yield


class Several:
    """Programs side by side on a device of numbers, a request at a time, in a random order."""

    def __init__(self, seed: int, widths: list[int], *, tells_tasks: bool = True) -> None:
        print(f"seed {seed}")
        settings = Settings(plan=True, plan_wait_seconds=1e6, max_effort=math.inf)
        self.controller: Controller = make_controller(0, settings)
        self.state: DeviceState = self.controller.state
        self.live, self.rng = Intervals(), np.random.default_rng(seed)
        self.engine = ThreadPoolExecutor(max_workers=1)  # as torch's for a device
        self.tasks, self.steps = 0, 0
        if tells_tasks:
            self.state.write(task_of=task_of.address)
        self.sides = [Side(self, width) for width in widths]

    def allocate(self, size_bytes: int) -> int:
        """One request; no two live blocks overlap."""
        address = int(self.state.malloc(size_bytes, 0))
        self.live.add(address, size_bytes)
        return address

    def free(self, address: int) -> None:
        """The end of one."""
        self.live.remove(address)
        self.state.free(address)

    def new_task(self) -> int:
        """Another backward pass."""
        self.tasks += 1
        return self.tasks

    def work(self, task: int, do: Callable[[], int | None]) -> int:
        """Something that the engine's thread does for a program."""
        TASK[0] = task
        made = self.engine.submit(do).result()
        TASK[0] = -1
        return made or 0

    def run(self, num_steps: int, sides: list[Side] | None = None) -> tuple[int, int]:
        """So many steps of these programs together: requests that the plan served, and that it did not."""
        record, end = self.state.record, self.steps + num_steps
        hits, misses = record.hits, record.misses + record.conflicts
        chosen = sides or self.sides
        while self.steps < end:
            next(chosen[int(self.rng.integers(len(chosen)))].step)
        return record.hits - hits, record.misses + record.conflicts - misses


@pytest.mark.parametrize("seed", range(3))
def test_each_is_planned_by_itself_whatever_order_they_ask_in(seed: int) -> None:
    several = Several(seed, [2000, 1400])
    several.run(14)
    assert several.controller.status.phase is Phase.PLANNED
    hits, misses = several.run(40)
    assert misses < 0.01 * hits  # where a page came too late
    assert hits > 39 * 17
    # one goes on alone, then with other steps: they are no strand's, and planned anew
    one = several.sides[:1]
    assert several.run(10, one)[0] > 160
    one[0].width = 3000
    several.run(40, one)
    assert several.controller.status.phase is Phase.PLANNED
    assert several.run(10, one) == (170, 0)


def test_three_threads_of_the_same_steps_are_told_apart() -> None:
    several = Several(5, [2000, 2000, 1000])
    several.run(24)
    assert several.controller.status.phase is Phase.PLANNED
    hits, misses = several.run(40)
    assert misses < 0.02 * hits


def test_what_a_shared_thread_does_for_several_is_left_to_the_heap_where_nothing_says_for_whom() -> None:
    several = Several(2, [2000, 1400], tells_tasks=False)
    several.run(40)
    several.run(20)  # every address is checked
    assert several.state.record.num_unknown_frees == 0


def test_threads_that_take_turns_are_one_program() -> None:
    """The order of all requests is the same in each round, and one plan knows more than several."""
    several = Several(1, [2000, 1400])
    for _ in range(20):
        for side in several.sides:
            several.run(1, [side])
    assert several.controller.status.phase is Phase.PLANNED
    assert several.state.record.num_strands == 0
    assert several.run(1, several.sides[:1])[1] == 0


def test_another_thread_that_makes_the_steps_from_now_on_is_not_beside_the_first() -> None:
    """As where hooks of a backward pass step optimizers, in a thread of torch's, and then the program itself does."""
    program = Program()
    with ThreadPoolExecutor(max_workers=1) as other:
        for _ in range(20):
            other.submit(program.step, lambda: program.train(2000)).result()
    for _ in range(6):
        program.step(lambda: program.train(3000))
    assert [program.step(lambda: program.train(3000)) for _ in range(4)] == [(37, 0)] * 4


def test_work_is_of_the_thread_whose_blocks_it_frees() -> None:
    """Both wait while the pieces of work -2 and -3 run, which ask for the same."""
    rows = [(ACTION_ALLOC, 1, 11), (ACTION_ALLOC, 2, 22), (ACTION_ALLOC, 3, -2), (ACTION_ALLOC, 4, -3)]
    rows += [(ACTION_FREE_COMPLETED, 2, -2), (ACTION_FREE_COMPLETED, 1, -3), (ACTION_ALLOC, 5, 33)]
    events = table(Event, len(rows))
    events["requested_bytes"] = 1024
    events["action"], events["address"], events["thread"] = np.array(rows).T
    found = strands_of(events, [11, 22])
    assert (found[11], found[22], found[-2], found[-3]) == (0, 1, 1, 0)


@pytest.mark.parametrize("streams", [1, 2])
def test_each_thread_has_bytes_and_pages_of_its_own(streams: int) -> None:
    rng = np.random.default_rng(3)
    tapes = [Ring(rng, 40, streams=streams).tape() for _ in range(3)]
    tape = on_pages(side_by_side(tapes, [1, 2, 3]))
    strand, pages = np.repeat(np.arange(3), 40), [set[int]() for _ in range(3 * streams)]
    for of, owner in zip(pages, np.unique(tape.owner), strict=True):
        own = tape.owner == owner
        assert len(np.unique(strand[own])) == len(np.unique(tape.stream[own])) == 1
        for begin, size in zip(tape.offset[own].tolist(), tape.size[own].tolist(), strict=True):
            of.update(range(begin >> 21, ((begin + size - 1) >> 21) + 1))
    assert len(set.union(*pages)) == sum(map(len, pages))
    assert tape.rings.tolist() == [[0, 40], [40, 80], [80, 120]]


def test_strands_without_rings_are_refused() -> None:
    column = np.array([1024, 2048])
    tape = ArenaTape(arena_bytes=4096, size=column, stream=column * 0, offset=column - 1024, strands=((1, 2),))
    machine = Machine()
    with pytest.raises(PlanError, match="2 rings do not fit"):
        machine.state.arena.install(tape)


@pytest.mark.parametrize("order", [True, False])
def test_blocks_stay_apart_under_three_threads_that_follow_strands_of_their_own(order: bool) -> None:
    reserve = 4 << 30
    machine = Machine(reserve, memory=mmap.mmap(-1, reserve))
    rng = np.random.default_rng(2)
    rings = [Ring(rng, 60) for _ in range(3)]
    for ring in rings:
        ring.size[:] = ring.size // 32  # small enough to write to every granule
    machine.install(side_by_side([ring.tape() for ring in rings], [1, 2, 3]))
    results: dict[int, tuple[int, int]] = {}

    def work(index: int) -> None:
        results[index] = hammer(*machine.entries, 0, rings[index].size, order, 100_000, 24, 77 + index, index + 1)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [results[index] for index in range(3)] == [(0, 0)] * 3
    record = machine.state.record
    assert record.arena_live == record.total.num_live == record.num_unknown_frees == 0
    assert record.hits > 1000
