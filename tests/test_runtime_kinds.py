"""Steps of several kinds, marked or not: which are told apart, planned and expected."""

import numpy as np
import pytest
from programs.step_program import MIB, Program, in_rounds, planned_late

from stalloc.core.constants import GRANULE
from stalloc.lifespans.recurring_steps import recurring_steps
from stalloc.runtime.runtime_settings import Phase
from stalloc.runtime.step_places import StepPlaces


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


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_kinds_in_random_order_are_planned_by_their_third_appearance(seed: int, streams: int) -> None:
    program = Program(streams=streams)
    for number, kind in enumerate(in_rounds(seed, 3, 8)):
        served = program.step(lambda width=2000 + 500 * kind: program.train(width))
        if number >= 9:
            assert served == (37, 0)


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
    program.controller.expects_marks = False
    for _ in range(90):
        program.evaluate(int(rng.choice([1500, 2000, 2600])))
    held = program.state.record.statistics.reserved_bytes
    before = program.counts()
    for _ in range(40):
        program.evaluate(int(rng.choice([1500, 2000, 2600])))
    assert program.counts() == (before[0] + 40 * 13, before[1])
    assert program.state.record.statistics.reserved_bytes <= held


@pytest.mark.parametrize("epoch", ["aaaaab", "aab", "ab", "aabaac", "abcccc"])
def test_after_two_epochs_each_kind_of_step_is_expected_where_it_comes(epoch: str) -> None:
    places = StepPlaces(Program().state)
    places.follow_kinds([0, 10, 20], [10, 10, 10], [b"a", b"b", b"c"], [False] * 3)
    steps = ["abc".index(kind) for kind in 4 * epoch]
    expected = [places.expected_after(10 * kind)[0] // 10 for kind in steps]
    assert expected[2 * len(epoch) : -1] == steps[2 * len(epoch) + 1 :]


def test_kinds_whose_planning_took_long_are_put_in_force_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch may be over by then, and its record gone."""
    program, go_on = planned_late(monkeypatch)
    for number in range(100):
        program.step(lambda width=(2000, 2000, 2500)[number % 3]: program.train(width), waits=False)
    go_on.set()
    for number in range(60):
        served = program.step(lambda width=(2000, 2500, 3000)[number % 3]: program.train(width))
        if number > 15:
            assert served == (37, 0)


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
    program.controller.expects_marks = False
    for number in range(40):
        before = program.counts()
        program.evaluate(1500 if number % 4 else 2600)
        if 14 <= number < 16:
            assert program.counts() == (before[0] + 13, before[1])
        if number > 25:
            assert program.counts() == (before[0] + 13, before[1])


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


@pytest.mark.parametrize("keeps_batch", [False, True])
def test_steps_that_go_on_for_different_lengths_lie_in_the_same_places(keeps_batch: bool) -> None:
    """As of an adaptive solver: which kind a step is of shows only where the forward pass ends.

    A batch that is kept until there is the next one has no place, and takes none of a step of another kind.
    """
    program, batch = Program(), [0]

    def run(num_layers: int) -> None:
        if keeps_batch:
            last, batch[0] = batch[0], program.allocate(16 << 10)
            if last:
                program.free(last)
        kept = []
        for layer in range(num_layers):
            kept += [program.allocate((1 + (layer + part) % 3) * MIB) for part in range(3)]
            kept += [program.allocate(16 << 10) for _ in range(2)]
        for number, address in enumerate(reversed(kept)):
            gradient = program.allocate((2 + number % 2) * MIB)
            program.free(address)
            program.free(gradient)

    rng = np.random.default_rng(5)
    for number, num_layers in enumerate(rng.integers(4, 9, 90).tolist()):
        _, missed = program.step(lambda num=num_layers: run(num))
        if number >= 45:
            assert missed <= keeps_batch


def test_what_hooks_keep_until_the_next_step_overwrites_it_costs_no_plan() -> None:
    """Every third step has a term more; what is kept has no place, and takes none."""
    program, features = Program(), [0]

    def run(has_term: bool) -> None:
        kept = []
        for layer in range(16):
            kept += [program.allocate((2 + part) * MIB) for part in range(3)]
            if layer == 3:
                made = program.allocate(4 * MIB)
                if features[0]:
                    program.free(features[0])
                features[0] = made
        term = [program.allocate(3 * MIB + 512 * part) for part in range(8 * has_term)]
        for number, address in enumerate(reversed(kept)):
            gradient = program.allocate((2 + number % 2) * MIB)
            program.free(address)
            program.free(gradient)
        for address in term:
            program.free(address)

    served = [program.step(lambda number=number: run(number % 3 == 2)) for number in range(60)]
    first = next(number for number, (hits, _) in enumerate(served) if hits)
    assert first < 9
    assert min(hits for hits, _ in served[first + 1 :]) > 60
    assert max(missed for _, missed in served[-40:]) <= 1


def test_what_is_little_and_kept_keeps_no_page_of_the_arena() -> None:
    program = Program()
    for _ in range(10):
        program.step(lambda: program.train(2000))
    assert program.controller.status.phase is Phase.PLANNED
    for i in range(12):
        width = 2000 if i % 2 else 1500  # a kind of step that is on no schedule yet, too
        program.step(lambda width=width: program.train(width), lambda i=i: program.allocate(4096 + 512 * i))
    for address in [*program.weights, *program.gradients]:
        program.free(address)
    program.controller.arenas.drop_schedule()
    program.controller.memory.release_unused()
    assert program.state.record.statistics.reserved_bytes <= 2 * GRANULE
