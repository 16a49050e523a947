"""Steps that programs mark: which kinds there are is learnt while they recur, and each is planned soon."""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from programs.core_machine import Intervals, Owners

from stalloc.lifespans.units import recurring_steps
from stalloc.replay.offline import make_controller
from stalloc.runtime.controller import MARK_STEP, Controller
from stalloc.runtime.runtime_settings import Arena, Phase, Settings
from stalloc.runtime.step_places import StepPlaces
from stalloc.runtime.tapes import plan_steps

MIB = 1 << 20


class Program:
    """Steps of layers on a device of numbers: activations, gradients that are zeroed before the backward pass.

    With several streams batches come on one and workspaces are another's. Every address is checked: no two live blocks
    overlap, and no byte passes from one stream to another. (The device never hands out an address twice.)
    """

    def __init__(
        self,
        *,
        plan: bool = True,
        capacity_bytes: int = 0,
        keeps_batch: bool = False,
        streams: int = 1,
        arena: Arena = "pages",
    ) -> None:
        settings = Settings(plan=plan, plan_wait_seconds=1e6, max_effort=math.inf, keep_recording=not plan, arena=arena)
        self.controller: Controller = make_controller(capacity_bytes, settings)
        self.controller.watching.expects_marks = True
        self.state = self.controller.state
        self.streams = streams
        self.live, self.owners = Intervals(), Owners()
        self.gradients: list[int] = []
        self.keeps_batch = keeps_batch  # until there is the next one
        self.batch = 0
        self.weights = [self.allocate(MIB + 512 * i) for i in range(12)]

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """One request; it has to be served."""
        stream %= self.streams
        address = int(self.state.malloc(size_bytes, stream))
        assert address
        self.live.add(address, size_bytes)
        self.owners.note(address, size_bytes, stream)
        return address

    def free(self, address: int) -> None:
        """The end of one."""
        self.live.remove(address)
        self.state.free(address)

    def forward(self, width: int) -> list[int]:
        """A batch and activations."""
        batch = self.allocate(width * 900, 2)
        if self.batch:
            self.free(self.batch)
        self.batch = batch
        return [self.allocate(width * (1000 + 7 * i)) for i in range(12)]

    def train(self, width: int) -> None:
        """A training step; `width` decides the sizes of the activations."""
        activations = self.forward(width)
        self.drop_batch()
        for address in self.gradients:
            self.free(address)
        self.gradients = []
        for i in reversed(range(12)):
            workspace = self.allocate(width * 500, 1)
            self.gradients.append(self.allocate(MIB + 512 * i))
            self.free(workspace)
            self.free(activations.pop())

    def evaluate(self, width: int) -> None:
        """A forward pass of which nothing is kept."""
        for address in self.forward(width):
            self.free(address)
        self.drop_batch()

    def drop_batch(self) -> None:
        """The end of the batch, if it is not kept."""
        if not self.keeps_batch:
            self.free(self.batch)
            self.batch = 0

    def make_state(self, count: int) -> None:
        """What an optimizer makes in its first step, and keeps."""
        self.controller.expect_lasting()
        self.weights += [self.allocate(21 * MIB) for _ in range(count)]

    def step(self, *parts: Callable[[], None], waits: bool = True) -> tuple[int, int]:
        """One step, with a mark at its end: requests that the plan served, and that it did not."""
        plans, before = self.controller.status.num_plans, self.counts()
        for part in parts:
            part()
        after = self.counts()
        if plans != self.controller.status.num_plans:  # the counting begins anew with a plan
            before = (0, 0)
        self.controller.mark(MARK_STEP, "")
        search = self.controller.steps.search
        if search is not None and waits:  # equal runs, equal figures: what runs beside the program is waited for
            assert search.done.wait(60)
        return after[0] - before[0], after[1] - before[1]

    def wait_for_plans(self, seconds: float) -> None:
        """Let steps wait no longer than this for plans, from here on."""
        status = self.controller.status
        status.settings = replace(status.settings, plan_wait_seconds=seconds)

    def counts(self) -> tuple[int, int]:
        """Hits and misses so far."""
        return self.state.record.hits, self.state.record.misses + self.state.record.conflicts


def in_rounds(seed: int, kinds: int, rounds: int) -> Iterator[int]:
    """Every kind once a round, in a random order."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        yield from rng.permutation(kinds).tolist()


def test_what_a_new_optimizer_keeps_has_no_places_of_the_plan() -> None:
    program = Program()
    for _ in range(6):
        program.step(lambda: program.train(1000))

    def make_optimizer() -> None:
        program.controller.expect_lasting()
        for gradient in range(12):  # as large as the gradients, which have places that are free now
            program.weights.append(program.allocate(MIB + 512 * gradient))

    served = program.step(lambda: program.train(1000), make_optimizer)
    assert served == (37, 12)
    for _ in range(3):
        assert program.step(lambda: program.train(1000)) == (37, 0)


def test_what_is_made_before_a_step_and_stays_displaces_few_of_its_requests() -> None:
    program, served = Program(), []

    def copy_weights() -> None:
        program.weights += [program.allocate(700_000 + 4096 * i) for i in range(40)]

    for number in range(24):
        copies = [copy_weights] if number in (8, 16) else []
        served.append(program.step(*copies, lambda: program.train(2000))[0])
    assert min(served[8], served[16]) >= 37 - 8
    assert served[9:16] == [37] * 7


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_kinds_in_random_order_are_planned_by_their_third_appearance(seed: int, streams: int) -> None:
    program = Program(streams=streams)
    for number, kind in enumerate(in_rounds(seed, 3, 8)):
        served = program.step(lambda width=2000 + 500 * kind: program.train(width))
        if number >= 9:
            assert served == (37, 0)


class MadeUpKind:
    """A step of random requests on random streams; some are handed on, and freed early in the next step.

    An unruly one frees what was handed on to it anywhere, or not at all.
    """

    def __init__(self, rng: np.random.Generator, streams: int, unruly: bool) -> None:
        self.length = 4 * int(rng.integers(5, 15))
        self.size = rng.choice(rng.integers(513, 4 * MIB, 8), self.length).tolist()
        self.stream = rng.integers(0, streams, self.length).tolist()
        place = np.arange(self.length)
        self.end = np.minimum(place + rng.geometric(0.1, self.length), self.length).tolist()
        self.clears = int(rng.integers(0, self.length)) if unruly else self.length // 4  # where; 0: it does not
        chosen = (rng.random(self.length) < 0.15) & (place > self.clears) & (self.clears > 0)
        self.hands_on = set(np.flatnonzero(chosen).tolist())

    def run(self, program: Program) -> None:
        """One step."""
        due: dict[int, list[int]] = {}
        handed, program.gradients = program.gradients, []
        for i in range(self.length):
            for address in due.pop(i, ()):
                program.free(address)
            if i == self.clears > 0:
                for address in handed:
                    program.free(address)
                handed = []
            address = program.allocate(self.size[i], self.stream[i])
            if i in self.hands_on:
                program.gradients.append(address)
            else:
                due.setdefault(self.end[i], []).append(address)
        for addresses in due.values():
            for address in addresses:
                program.free(address)
        program.gradients += handed


@pytest.mark.parametrize("unruly", [False, True])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_made_up_kinds_on_several_streams_are_served_and_never_share_a_byte(seed: int, unruly: bool) -> None:
    """`Program.allocate` checks every address."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    program = Program(streams=4)
    kinds = [MadeUpKind(rng, 4, unruly) for _ in range(4)]
    hits = missed = 0
    for number, kind in enumerate(rng.integers(0, 4, 60).tolist()):
        served = program.step(lambda kind=kinds[kind]: kind.run(program))
        if number >= 30:
            hits, missed = hits + served[0], missed + served[1]
    assert program.controller.status.phase is Phase.PLANNED
    assert missed <= (0.2 * hits if unruly else 0)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_replaced_only_once_there_is_another_does_not_upset_the_others(seed: int) -> None:
    """A batch that is kept until there is the next one has no place in plans for several kinds: it borrows one."""
    program = Program(keeps_batch=True)
    served = [program.step(lambda width=2000 + 500 * kind: program.train(width)) for kind in in_rounds(seed, 3, 30)][9:]
    assert sum(missed for _, missed in served) < 0.05 * sum(hits for hits, _ in served)


def test_an_evaluation_now_and_then_is_planned_by_its_third_appearance() -> None:
    program = Program()
    for number in range(24):
        evaluates = number % 5 == 4
        served = program.step(lambda work=program.evaluate if evaluates else program.train: work(2000))
        if number >= 14:
            assert served == (13 if evaluates else 37, 0)


def test_a_kind_that_was_not_recorded_when_it_came_first_is_planned_by_its_third_appearance() -> None:
    """Nothing is recorded while all goes by the plan, so the first evaluation is only known by how long it is."""
    program = Program()
    for number in range(60):
        parts = [lambda: program.train(2000)]
        if number % 12 == 11:
            parts.insert(0, lambda: program.evaluate(1500))
        served = program.step(*parts)
        if number > 28:  # the first steps on the new plan find blocks of the old one
            assert served == (50 if number % 12 == 11 else 37, 0)
    assert program.controller.status.phase is Phase.PLANNED


def test_a_program_that_goes_on_with_another_step_is_planned_anew() -> None:
    """Steps of which none is like those that were planned, as after layers were thawed."""
    program = Program()
    for number in range(60):
        served = program.step(lambda width=(2000, 3000, 2000)[number // 20]: program.train(width))
        if number % 20 > 6 or number > 40:  # what it goes back to is known
            assert served == (37, 0)


def test_inference_after_training_is_planned_although_nothing_marks_it() -> None:
    program = Program()
    for _ in range(12):
        program.step(lambda: program.train(2000))
    for _ in range(200):
        program.evaluate(1500)
    before = program.counts()
    for _ in range(20):
        program.evaluate(1500)
    assert program.counts() == (before[0] + 20 * 13, before[1])


def test_a_layer_that_was_taken_for_a_step_gives_way_to_the_step_around_it() -> None:
    """Nothing marks the steps: at first only layers are seen to repeat, and each step begins with what they do not."""
    program = Program()
    program.controller.watching.expects_marks = False

    def run_step() -> None:
        x = program.allocate(3 * MIB)
        for _ in range(8):
            activations = [program.allocate(MIB + 512 * i) for i in range(6)]
            y = program.allocate(2 * MIB)
            for address in (*activations, x):
                program.free(address)
            x = y
        program.free(x)

    planned_by = 0
    for number in range(60):
        plans = program.controller.status.num_plans
        run_step()
        planned_by = number if program.controller.status.num_plans != plans else planned_by
    before = program.counts()
    for _ in range(10):
        run_step()
    assert program.controller.status.num_plans > 1  # the first was of layers
    assert planned_by < 8  # what came while that one was in force was recorded
    assert not program.state.record.recording
    assert program.counts() == (before[0] + 10 * 57, before[1])


def test_a_kind_that_comes_long_after_the_plan_is_planned_soon() -> None:
    program = Program()
    for number in range(100):
        program.step(lambda width=[1000, 1000, 1400][number % 3] if number < 30 else 1000: program.train(width))
    for number in range(24):
        program.step(lambda width=[1000, 1700][number % 2]: program.train(width))
    for number in range(10):
        assert program.step(lambda width=[1000, 1700][number % 2]: program.train(width)) == (37, 0)


@pytest.mark.parametrize("seed", range(4))
def test_kinds_of_steps_that_nothing_marks_are_planned(seed: int) -> None:
    print(f"seed {seed}")
    program, rng = Program(), np.random.default_rng(seed)
    program.controller.watching.expects_marks = False
    for _ in range(90):
        program.evaluate(int(rng.choice([1500, 2000, 2600])))
    held = program.state.record.reserved_bytes
    before = program.counts()
    for _ in range(40):
        program.evaluate(int(rng.choice([1500, 2000, 2600])))
    assert program.counts() == (before[0] + 40 * 13, before[1])
    assert program.state.record.reserved_bytes <= held


@pytest.mark.parametrize("epoch", ["aaaaab", "aab", "ab", "aabaac", "abcccc"])
def test_after_two_epochs_each_kind_of_step_is_expected_where_it_comes(epoch: str) -> None:
    places = StepPlaces(Program().state)
    places.follow_kinds([0, 10, 20], [10, 10, 10], [b"a", b"b", b"c"])
    steps = ["abc".index(kind) for kind in 4 * epoch]
    expected = [places.expected_after(10 * kind)[0] // 10 for kind in steps]
    assert expected[2 * len(epoch) : -1] == steps[2 * len(epoch) + 1 :]


def test_kinds_whose_planning_took_long_are_put_in_force_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch may be over by then, and its record gone."""
    go_on = threading.Event()

    def plan_late(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return plan_steps(*arguments)

    program = Program()
    for _ in range(10):
        program.step(lambda: program.train(2000))
    program.wait_for_plans(0.0)
    monkeypatch.setattr("stalloc.runtime.tapes.plan_steps", plan_late)
    for number in range(100):
        program.step(lambda width=(2000, 2000, 2500)[number % 3]: program.train(width), waits=False)
    go_on.set()
    for number in range(60):
        served = program.step(lambda width=(2000, 2500, 3000)[number % 3]: program.train(width))
        if number > 15:
            assert served == (37, 0)


def test_a_plan_stays_while_one_is_made_for_what_the_program_does_now(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def plan_late(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return plan_steps(*arguments)

    program = Program()
    for _ in range(10):
        program.step(lambda: program.train(2000))
    program.wait_for_plans(0.0)
    monkeypatch.setattr("stalloc.runtime.tapes.plan_steps", plan_late)
    for _ in range(60):  # so many misses would end the plan
        program.step(lambda: program.train(2500), waits=False)
    go_on.set()
    program.step(lambda: program.train(2500))
    program.step(lambda: program.train(2500))
    assert program.step(lambda: program.train(2500)) == (37, 0)
    assert program.controller.status.num_plans == 2


def test_what_is_kept_until_a_step_ten_later_has_made_another_has_places() -> None:
    """Plans of kinds of steps know none for it: the cycle of ten steps does."""
    program, kept = Program(), [0]

    def keep() -> None:
        made = [program.allocate(3 * MIB + 512 * i) for i in range(12)]
        for address in filter(None, kept):
            program.free(address)
        kept[:] = made

    for number in range(60):
        parts = [lambda number=number: program.train(2000 + 500 * (number % 2))]
        if number % 10 == 9:
            parts.append(keep)
        served = program.step(*parts)
        if number > 30:
            assert served == (49 if number % 10 == 9 else 37, 0)


def test_a_step_that_is_another_every_fourth_time_is_planned_although_nothing_marks_it() -> None:
    """The plan of the usual one serves until the record shows the four."""
    program = Program()
    program.controller.watching.expects_marks = False
    for number in range(40):
        before = program.counts()
        program.evaluate(1500 if number % 4 else 2600)
        if 14 <= number < 16:
            assert program.counts() == (before[0] + 13, before[1])
        if number > 25:
            assert program.counts() == (before[0] + 13, before[1])


def test_what_is_known_to_outlive_a_step_stands_in_no_way_of_the_next() -> None:
    """Pages that are idle at the end of a step move to a copy that is kept, before more than was needed is held."""
    program = Program()
    program.controller.watching.expects_marks = False
    sizes = 16 * MIB, 15 * MIB, 14 * MIB, 13 * MIB
    state = program.allocate(sizes[0])
    for number in range(100):
        before = program.counts()
        made = [program.allocate(size) for size in sizes[1:]]
        program.free(state)
        state = program.allocate(sizes[0])
        for address in made:
            program.free(address)
        if number in (19, 39, 62, 80):
            program.weights.append(program.allocate(sizes[0]))
        if number > 21:
            assert program.counts() == (before[0] + 4, before[1] + (number in (39, 62, 80)))
    record = program.state.record
    assert record.reserved_bytes <= record.total.allocated_peak + 6 * MIB


def test_a_ring_of_several_steps_is_followed_from_mark_to_mark() -> None:
    """The batch lives a little longer than a step, so the ring has two: the marks of both count."""
    program = Program(keeps_batch=True)
    for number in range(12):
        hits, missed = program.step(lambda: program.train(2000))
        if number > 5:
            assert (hits, missed) == (37, 0)


def test_steps_that_never_recur_are_not_planned() -> None:
    program = Program()
    for number in range(20):
        program.step(lambda width=2000 + 16 * number: program.train(width))
    assert program.controller.status.num_plans == 0


def test_what_is_handed_on_through_an_evaluation_is_known() -> None:
    """Gradients live through the evaluation, up to the next backward pass."""
    program = Program(plan=False, keeps_batch=True)
    for _ in range(4):
        program.step(lambda: program.train(2000))
        program.step(lambda: program.train(2000))
        program.step(lambda: program.evaluate(1500))
    train, evaluate = (
        next(kind for kind in recurring_steps(program.controller.recording.trace()) if len(kind.size) == length)
        for length in (37, 13)
    )
    assert len(train.handed_on(0)) == 13  # the gradients, and the batch
    ranks = np.flatnonzero(train.size[train.handed_on(0)] < 1_800_000)
    assert len(ranks) == 12
    assert (evaluate.until[0][ranks] == 13).all()  # they outlive the evaluation
    assert (train.until[0][ranks] == 13).all()  # and go when the forward pass is over
    assert (train.end > 0).all()


def test_the_state_of_an_optimizer_does_not_pin_what_is_transient() -> None:
    """It is made when the memory of a whole step is free, and two would not fit into the segment of an activation."""
    program = Program()
    for number in range(8):
        program.step(
            lambda: program.train(40_000),
            *[lambda: program.make_state(6)] * (number == 0),
        )
    assert program.controller.status.phase is Phase.PLANNED
    state = program.state
    assert state.record.reserved_bytes <= state.allocated_peak_bytes + 40 * MIB  # two segments that are not full


def test_watching_needs_hardly_more_than_what_is_allocated() -> None:
    """Requests of many sizes share memory while they are recorded."""
    program = Program()
    for _ in range(3):
        program.step(lambda: program.train(40_000), lambda: program.evaluate(37_000), lambda: program.evaluate(29_000))
    assert program.controller.status.num_plans == 0
    assert program.state.reserved_peak_bytes < 1.1 * program.state.allocated_peak_bytes + 20 * MIB


def test_an_unknown_step_finds_room_in_the_arena_of_a_full_device() -> None:
    """Everything that is idle is lent, and where that is not enough the plan goes, before memory is said to be out."""
    wanted = Program()
    for _ in range(8):
        wanted.step(lambda: wanted.train(40_000))
    program = Program(capacity_bytes=wanted.state.reserved_peak_bytes + 64 * MIB)
    for _ in range(12):
        program.step(lambda: program.train(40_000))
    assert program.controller.status.phase is Phase.PLANNED
    for width in (39_000, 31_000, 35_000):  # each asserts that it is served
        program.step(lambda width=width: program.train(width))
    for _ in range(12):
        program.step(lambda: program.train(40_000))
    assert program.step(lambda: program.train(40_000)) == (37, 0)


@pytest.mark.parametrize(("times", "planned"), [(3, False), (20, True)])
def test_a_step_that_needs_more_than_any_before_ends_the_plan_where_it_may_fill_the_device(
    times: int, planned: bool
) -> None:
    """What the plan does not know is packed better without it, and nobody knows yet how much that will be."""
    wanted = Program()
    wanted.step(lambda: wanted.train(40_000))
    program = Program(capacity_bytes=times * wanted.state.reserved_peak_bytes)
    for _ in range(8):
        program.step(lambda: program.train(40_000))
    assert program.controller.status.phase is Phase.PLANNED
    program.step(lambda: program.train(60_000))
    assert (program.controller.status.phase is Phase.PLANNED) == planned


def test_an_unknown_step_reserves_hardly_more_than_was_ever_allocated() -> None:
    program = Program()
    for _ in range(8):
        program.step(lambda: program.train(40_000))
    before = program.state.record.reserved_bytes
    hits, missed = program.step(lambda: program.train(36_000))
    assert missed > hits
    assert program.state.record.step_reserved_peak <= before + 20 * MIB


def test_unknown_steps_in_a_row_reserve_hardly_more_than_was_ever_allocated() -> None:
    program = Program()
    for _ in range(8):
        program.step(lambda: program.train(40_000))
    before = program.state.record.reserved_bytes
    for width in (36_000, 39_000, 34_000, 38_000):
        program.step(lambda width=width: program.train(width))
        assert program.state.record.reserved_bytes <= before + 40 * MIB


def grow(program: Program, work: Callable[[int], None], seed: int, num_steps: int) -> list[tuple[int, int]]:
    """Kinds of steps that need more are added twice; what is reserved for each new plan, and has to be (bytes)."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    widths, found, plans = [20_000, 23_000], [], 0
    for number in range(num_steps):
        if number in (num_steps // 3, 2 * num_steps // 3):
            widths.append(2 * max(widths))
        program.step(lambda: work(widths[int(rng.integers(len(widths)))]))
        if program.controller.status.num_plans > plans:
            record = program.state.record  # where pages were held at the peak before, some may wait in the heap
            found.append((record.reserved_bytes, max(record.arena_bytes, record.total.allocated_peak)))
        plans = program.controller.status.num_plans
    return found


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_an_arena_in_which_nothing_lives_goes_back_before_a_larger_one_is_taken(seed: int, streams: int) -> None:
    """Evaluations hand nothing on."""
    program = Program(streams=streams)
    found = grow(program, program.evaluate, seed, 60)
    assert len({needed for _, needed in found}) >= 3
    for reserved, needed in found:
        assert reserved < needed + 40 * MIB


@pytest.mark.parametrize("streams", [1, 3])
def test_a_plan_waits_for_what_was_borrowed_from_the_arena_before_it(streams: int) -> None:
    """The batch is replaced only once there is the next one, and has no place in the plan."""
    program = Program(streams=streams, keeps_batch=True)
    found = grow(program, program.evaluate, 1, 60)
    assert len({needed for _, needed in found}) >= 3
    for reserved, needed in found:
        assert reserved < needed + 2 * 80_000 * 900 + 40 * MIB  # and batches


def test_the_old_arena_goes_back_when_what_was_handed_on_is_gone() -> None:
    """Gradients live up to the backward pass, so that a larger arena is taken beside; nothing new is served there."""
    program = Program(streams=3, keeps_batch=True)  # of which one is served elsewhere in every step
    grow(program, program.train, 2, 60)
    for _ in range(4):
        program.step(lambda: program.train(20_000))
    assert program.state.record.reserved_bytes < 1.25 * program.state.record.arena_bytes


@pytest.mark.parametrize("streams", [1, 3])
def test_a_plan_for_one_more_kind_that_fits_takes_the_arena_over(streams: int) -> None:
    """Although gradients live there, and streams have regions."""
    program = Program(streams=streams, arena="pool")
    for width in in_rounds(1, 2, 8):
        program.step(lambda width=width: program.train(40_000 + 1000 * width))
    plans, reserved, arena = (
        program.controller.status.num_plans,
        program.state.record.reserved_bytes,
        program.state.record.arena,
    )
    for width in in_rounds(2, 3, 8):
        served = program.step(lambda width=width: program.train(39_000 + 1000 * width))
        assert program.state.record.arena == arena
    assert served == (37, 0)
    assert program.controller.status.num_plans > plans
    assert program.state.record.reserved_bytes < 1.2 * reserved


def drift(program: Program, widths: list[int], until: Callable[[], bool]) -> None:
    """Evaluate, with these widths in turn, until something is so."""
    for number in range(300):
        if until():
            return
        program.step(lambda number=number: program.evaluate(widths[number % len(widths)]))
    raise AssertionError("it never was so")


@pytest.mark.parametrize("streams", [1, 3])
def test_an_arena_that_was_taken_over_shrinks_once_nothing_lives_there(streams: int) -> None:
    program = Program(streams=streams, arena="pool")
    controller, state = program.controller, program.state
    drift(program, [60_000], lambda: controller.status.phase is Phase.PLANNED)
    large, arena = state.record.arena_bytes, state.record.arena
    kept = program.allocate(100 * MIB)
    assert arena <= kept < arena + large
    drift(program, [20_000, 23_000], lambda: controller.status.num_plans > 1)
    program.step(lambda: program.evaluate(20_000))
    assert state.record.arena_bytes == large  # around what lives there
    program.free(kept)
    for width in [23_000, 20_000] * 3:
        program.step(lambda width=width: program.evaluate(width))
    assert state.record.arena_bytes < 0.5 * large
    assert state.record.reserved_bytes < state.record.arena_bytes + 40 * MIB
    taken = controller.device.num_allocs
    for width in [23_000, 20_000] * 10:
        assert program.step(lambda width=width: program.evaluate(width)) == (13, 0)
    assert controller.device.num_allocs == taken


def test_a_thread_that_allocates_at_random_keeps_no_step_from_being_planned() -> None:
    """It asks in between and frees what steps made; what it asks for itself is served from the heap."""
    program = Program()
    rng = np.random.default_rng(1)
    kept: list[int] = []

    def disturb() -> None:
        kept.append(program.allocate(int(rng.integers(513, 8 * MIB))))
        if len(kept) > 3:
            program.free(kept.pop(0))

    with ThreadPoolExecutor(max_workers=1) as other:

        def beside() -> None:
            """In the other thread, in the middle of a step."""
            other.submit(disturb).result()

        for _ in range(9):
            program.step(beside, lambda: program.train(2000), beside)
        served = [program.step(beside, lambda: program.train(2000), beside) for _ in range(20)]
    assert program.controller.status.phase is Phase.PLANNED
    assert sum(hits for hits, _ in served) > 0.6 * 20 * 37  # what is lent to the other takes places of the plan


def test_a_step_that_is_broken_off_and_begun_anew_displaces_next_to_nothing() -> None:
    """As after an error that was caught, which sets no mark."""
    program = Program()
    for _ in range(8):
        program.step(lambda: program.train(2000))
    for _ in range(3):
        for address in program.forward(2000):
            program.free(address)
        program.drop_batch()
        hits, missed = program.step(lambda: program.train(2000))
        assert hits + missed == 37
        assert missed <= 5
