"""Steps that programs mark: they are learnt while they recur, and planned soon."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from programs.step_program import MIB, Program, in_rounds, planned_late

from stalloc.runtime.runtime_settings import Phase


def test_what_a_new_optimizer_keeps_has_no_places_of_the_plan() -> None:
    program = Program()
    for _ in range(6):
        program.step(lambda: program.train(1000))

    def make_optimizer() -> None:
        program.controller.expect_persistent()
        for gradient in range(12):  # as large as the gradients, which have places that are free now
            program.weights.append(program.allocate(MIB + 512 * gradient))

    served = program.step(lambda: program.train(1000), make_optimizer)
    assert served == (37, 12)
    for _ in range(3):
        assert program.step(lambda: program.train(1000)) == (37, 0)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_replaced_only_once_there_is_another_does_not_upset_the_others(seed: int) -> None:
    """A batch that is kept until there is the next one has no place in plans for several kinds: it borrows one."""
    program = Program(keeps_batch=True)
    served = [program.step(lambda width=2000 + 500 * kind: program.train(width)) for kind in in_rounds(seed, 3, 30)][9:]
    assert sum(missed for _, missed in served) < 0.05 * sum(hits for hits, _ in served)


@pytest.mark.parametrize("seed", range(3))
def test_a_large_batch_that_is_replaced_once_there_is_another_has_two_places_in_turn(seed: int) -> None:
    """Whichever kind of step comes next, and if steps come in between that have no batch."""
    program = Program(keeps_batch=True)

    def without_batch() -> None:
        for address in [program.allocate(3 * MIB + 512 * i) for i in range(20)]:
            program.free(address)

    counts = []
    for number in in_rounds(seed, 4, 20):
        width = 5000 + 1000 * number
        counts.append(program.step(without_batch if number == 3 else lambda width=width: program.train(width)))
    moves = program.controller.memory.paging.num_moves
    for number in in_rounds(seed + 10, 4, 10):
        width = 5000 + 1000 * number
        counts.append(program.step(without_batch if number == 3 else lambda width=width: program.train(width)))
    assert sum(misses for _, misses in counts[-40:]) == 0
    assert program.controller.memory.paging.num_moves == moves, "nor do pages move"


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
    program.controller.expects_marks = False

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
    assert not program.state.record.hot.recording
    assert program.counts() == (before[0] + 10 * 57, before[1])


@pytest.mark.parametrize("passes", [0, 1, 3, 9])
def test_one_request_in_between_ends_no_plan_of_a_short_step(passes: int) -> None:
    """Nothing marks the steps, and the plan is young: what came in between does not make its cycle a layer's."""
    program = Program()
    program.controller.expects_marks = False

    def run_step() -> None:
        for address in [program.allocate(MIB + 4096 * i) for i in range(5)]:
            program.free(address)

    for _ in range(11):
        run_step()
    assert program.controller.status.num_plans == 1
    for _ in range(passes):
        run_step()
    program.weights.append(program.allocate(3 * MIB))
    run_step()  # the arena goes around it
    before = program.counts()
    for _ in range(100):
        run_step()
    assert program.counts() == (before[0] + 500, before[1])
    assert program.controller.status.num_plans == 1


def test_a_plan_stays_while_one_is_made_for_what_the_program_does_now(monkeypatch: pytest.MonkeyPatch) -> None:
    program, go_on = planned_late(monkeypatch)
    for _ in range(60):  # so many misses would end the plan
        program.step(lambda: program.train(2500), waits=False)
    go_on.set()
    program.step(lambda: program.train(2500))
    program.step(lambda: program.train(2500))
    assert program.step(lambda: program.train(2500)) == (37, 0)
    assert program.controller.status.num_plans == 2


def test_what_is_known_to_outlive_a_step_stands_in_no_way_of_the_next() -> None:
    """Pages that are idle at the end of a step move to a copy that is kept, before more than was needed is held."""
    program = Program()
    program.controller.expects_marks = False
    sizes = 16 * MIB, 15 * MIB, 14 * MIB, 13 * MIB
    state = program.allocate(sizes[0])
    for number in range(200):
        made = [program.allocate(size) for size in sizes[1:]]
        program.free(state)
        state = program.allocate(sizes[0])
        for address in made:
            program.free(address)
        if number in range(20, 200, 19):
            program.weights.append(program.allocate(sizes[0]))
    hits, misses = program.counts()
    assert hits > 4 * 180
    assert misses <= 10 + 2  # the copies, and what the first of them that was in the way of anything displaced
    record = program.state.record
    assert record.statistics.reserved_bytes <= record.total.allocated_peak + 6 * MIB


def test_a_cycle_of_several_steps_is_followed_from_mark_to_mark() -> None:
    """The batch lives a little longer than a step, so the cycle has two: the marks of both count."""
    program = Program(keeps_batch=True)
    for number in range(12):
        hits, missed = program.step(lambda: program.train(2000))
        if number > 5:
            assert (hits, missed) == (37, 0)


def test_steps_that_recur_late_are_planned_soon_although_one_block_lives_for_longer() -> None:
    """A queue of keys has filled up after 60 steps, each with more of them; how long a key lives then shows later."""
    program, keys = Program(), []

    def train(step: int) -> None:
        keys.append(program.allocate(4096))
        if len(keys) > 60:
            program.free(keys.pop(0))
        program.free(program.allocate(MIB + 4096 * len(keys)))
        program.train(2000)

    served = [program.step(lambda number=number: train(number)) for number in range(75)]
    assert all(hits >= 37 for hits, _ in served[5:])


def test_steps_that_never_recur_are_not_planned() -> None:
    program = Program()
    for number in range(20):
        program.step(lambda width=2000 + 16 * number: program.train(width))
    assert program.controller.status.num_plans == 0


@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("place", ["before", "inside", "kept"])
def test_requests_of_any_size_keep_no_step_from_being_planned(kinds: int, place: str) -> None:
    """Labels of any number, of a kind of step that comes in any order; they may be kept until the next step is over."""
    program, rng = Program(), np.random.default_rng(3)
    kept: list[int] = []

    def labels() -> None:
        while kept:
            program.free(kept.pop())
        kept.extend(program.allocate(int(rng.integers(513, 8 * MIB))) for _ in range(2))

    def train(width: int) -> None:
        if place != "inside":
            labels()
            program.train(width)
        else:
            batch = program.allocate(width * 500)
            labels()
            program.free(batch)
            program.train(width)
        while kept and place != "kept":
            program.free(kept.pop())

    order = in_rounds(4, kinds, 36 // kinds)
    served = [program.step(lambda width=4000 + 500 * kind: train(width)) for kind in order][-12:]
    length = 37 + (place == "inside")
    assert sum(hits for hits, _ in served) > 0.97 * 12 * length


@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_thread_that_allocates_at_random_keeps_no_step_from_being_planned(num_requests: int) -> None:
    """It asks in between and frees what steps made; what it asks for itself is served from the heap."""
    program = Program()
    rng = np.random.default_rng(1)
    kept: list[int] = []

    def disturb() -> None:
        for _ in range(num_requests):
            kept.append(program.allocate(int(rng.integers(513, 8 * MIB))))
            if len(kept) > 3:
                program.free(kept.pop(0))

    with ThreadPoolExecutor(max_workers=1) as other:

        def beside() -> None:
            """In the other thread, in the middle of a step."""
            other.submit(disturb).result()

        def train_with_labels() -> None:
            labels = program.allocate(int(rng.integers(513, 8 * MIB)))
            program.train(3000)
            program.free(labels)

        for _ in range(9):
            program.step(beside, lambda: program.train(2000), beside)
        served = [program.step(beside, lambda: program.train(2000), beside) for _ in range(20)]
        assert program.controller.status.phase is Phase.PLANNED
        assert sum(hits for hits, _ in served) > 0.6 * 20 * 37  # what is lent to the other takes places of the plan
        # another step, in which the program itself asks for something of any size too
        for _ in range(40):
            program.step(beside, train_with_labels, beside)
        served = [program.step(beside, train_with_labels, beside) for _ in range(10)]
    assert program.controller.status.phase is Phase.PLANNED
    assert sum(hits for hits, _ in served) > 0.6 * 10 * 37


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
