"""Steps that are dynamic in part, as a mixture of experts is: what they have in common is served from a plan."""

import numpy as np
import pytest
from programs.step_program import MIB, Program

from stalloc.runtime.runtime_settings import Phase
from stalloc.runtime.statistics import report

EXPERTS, LAYERS = 8, 4


class Mixture(Program):
    """Layers whose experts take as many tokens as the data says; their gradients are of one size."""

    def __init__(self, seed: int, *, skewed: bool = False, plan: bool = True) -> None:
        print(f"seed {seed}")
        super().__init__(plan=plan)
        self._rng, self._skewed = np.random.default_rng(seed), skewed

    def tokens(self) -> list[int]:
        """Of each expert of a layer; none, for some, where the routing is skewed."""
        share = self._rng.dirichlet(np.full(EXPERTS, 0.4 if self._skewed else 8.0))
        return (share * 4000).astype(int).tolist()

    def train(self, width: int = 1000) -> None:
        """A training step."""
        saved: list[tuple[int, list[tuple[int, int]]]] = []
        for _ in range(LAYERS):
            attention = self.allocate(6 * MIB)
            experts = []
            for count in self.tokens():
                if count:
                    hidden, used = self.allocate(count * 2048), self.allocate(count * 1024)
                    self.free(self.allocate(count * 4096))
                    experts.append((hidden, used))
            saved.append((attention, experts))
            self.free(self.allocate(3 * MIB))
        for attention, experts in reversed(saved):
            gradients = []
            for hidden, used in reversed(experts):
                workspace = self.allocate(4 * MIB)
                gradients.append(self.allocate(MIB))
                for address in (hidden, used, workspace):
                    self.free(address)
            self.free(self.allocate(5 * MIB))
            for address in (attention, *gradients):
                self.free(address)

    def evaluate(self) -> None:
        """The first half of a step, of which nothing is kept."""
        for _ in range(LAYERS):
            attention = self.allocate(6 * MIB)
            for count in self.tokens():
                for address in (self.allocate(count * 2048), self.allocate(count * 1024), self.allocate(count * 4096)):
                    self.free(address)
            self.free(self.allocate(3 * MIB))
            self.free(attention)


@pytest.mark.parametrize("seed", range(3))
def test_what_steps_have_in_common_is_planned_from_the_sixth_on(seed: int) -> None:
    program = Mixture(seed)
    served = [program.step(program.train) for _ in range(30)]
    assert program.controller.status.phase is Phase.PLANNED
    assert served[4] == (0, 0)
    hits, misses = np.array(served[6:]).T
    assert np.median(hits) == LAYERS * (3 + 2 * EXPERTS), "all that is of one size in every step"
    assert np.median(misses) == 0, "and what the data decides is expected"
    assert misses.sum() < 0.1 * hits.sum(), "a size that equals another by chance costs a step"
    counted = report(program.controller).dynamic_requests / 25
    assert 0.9 < counted / (LAYERS * EXPERTS * 3) <= 1, "which is counted apart"


@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_served_although_evaluation_comes_before_it(seed: int) -> None:
    """Evaluation goes the way of a step, and leaves it."""
    program = Mixture(seed)

    def train_after_evaluation() -> None:
        for _ in range(3):
            program.evaluate()
        program.train()

    for _ in range(8):
        program.step(program.train)
    steps = (train_after_evaluation, program.train, program.train)
    hits, misses = np.array([[program.step(step) for step in steps] for _ in range(6)]).sum(axis=0).T
    assert hits[0] > misses[0], "the step is found where it begins, and most of the evaluation is served with it"
    assert (hits[1:] > 10 * misses[1:]).all()


@pytest.mark.parametrize("steps", [80, 132, 133, 134, 400])
def test_a_step_that_misses_much_after_long_does_not_end_the_plan(steps: int) -> None:
    """Where nothing is recorded, or a record has just begun, no steps show anew what they have in common."""
    program = Mixture(3)
    for _ in range(steps):
        program.step(program.train)

    def check_something_else() -> None:
        for address in [program.allocate((20 + number) * MIB) for number in range(40)]:
            program.free(address)

    program.step(check_something_else, program.train)
    assert program.controller.status.note == ""
    served = [program.step(program.train) for _ in range(6)]
    assert program.controller.status.phase is Phase.PLANNED
    assert served[-1][0] > LAYERS * EXPERTS


@pytest.mark.parametrize("seed", range(3))
def test_no_more_is_held_than_without_a_plan(seed: int) -> None:
    program, without = Mixture(seed), Mixture(seed, plan=False)
    for one in (program, without):
        for _ in range(30):
            one.step(one.train)
    assert program.state.reserved_peak_bytes <= without.state.reserved_peak_bytes + 4 * MIB


class LargeMixture(Mixture):
    """The same with sixteen times the bytes."""

    def allocate(self, size_bytes: int) -> int:
        return super().allocate(16 * size_bytes)


@pytest.mark.parametrize("seed", range(3))
def test_pages_move_for_what_the_data_decides_rather_than_more_be_held(seed: int) -> None:
    program = LargeMixture(seed)
    for _ in range(40):
        program.step(program.train)
    peak_bytes = program.state.allocated_peak_bytes
    assert program.state.record.statistics.reserved_bytes <= 1.004 * peak_bytes + 4 * MIB


class FineMixture(Mixture):
    """Many experts that keep a few tensors of less than 2 MiB, where gradients of another size have places later."""

    most_held_bytes = 0

    def allocate(self, size_bytes: int) -> int:
        address = super().allocate(size_bytes)
        self.most_held_bytes = max(self.most_held_bytes, self.state.record.statistics.reserved_bytes)
        return address

    def train(self, width: int = 1000) -> None:
        saved: list[list[int]] = []
        for _ in range(6 * LAYERS):
            for count in self.tokens():
                saved.append([self.allocate(count * 2816) for _ in range(4)])
                self.free(self.allocate(count * 1024))
        gradients = []
        for kept in reversed(saved):
            gradients += [self.allocate(11 * MIB // 4) for _ in range(2)]
            for address in reversed(kept):
                self.free(address)
        for address in gradients:
            self.free(address)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_idle_is_not_cut_into_pieces_too_small_to_use(seed: int) -> None:
    program = FineMixture(seed)
    for number in range(20):
        program.step(program.train)
        if number == 10:
            program.most_held_bytes = 0
    assert program.controller.status.phase is Phase.PLANNED
    assert program.most_held_bytes <= 1.035 * program.state.allocated_peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_experts_without_tokens_skip_what_they_would_ask_for(seed: int) -> None:
    """Every address is checked; what an expert leaves out does not cost the others their places."""
    program = Mixture(seed, skewed=True)
    served = [program.step(program.train) for _ in range(40)]
    hits, misses = np.array(served[10:]).sum(axis=0)
    assert hits > 0.8 * (hits + misses)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_in_two_may_evaluate_before_it_trains(seed: int) -> None:
    """What some steps have is planned, though the others ask for much more."""
    program = Mixture(seed)

    def evaluate_and_train() -> None:
        for _ in range(4):
            program.evaluate()
        program.train()

    for _ in range(8):
        program.step(program.train)
        program.step(evaluate_and_train)
    served = [(program.step(program.train), program.step(evaluate_and_train)) for _ in range(6)]
    hits, misses = np.array(served).sum(axis=(0, 1))
    assert hits > 2 * misses


class Sequence(Program):
    """Static requests in a row, each freed after the next two; one whose size differs comes among them."""

    def __init__(self, length: int = 40) -> None:
        super().__init__()
        self._rng, self._length = np.random.default_rng(0), length

    def any_size(self) -> int:
        """That no other request has."""
        return int(self._rng.integers(1000, 8000)) * 1024 + 512

    def train(self, *, skipped: range = range(0), beside: range = range(2, 10)) -> None:
        """A step that leaves some out, and has one of any size before each of those in `beside`."""
        held: list[int] = []
        for number in range(self._length):
            if number in skipped:
                continue
            held += [self.allocate(self.any_size())] if number in beside else []
            held.append(self.allocate(4 * MIB + number * MIB))
            while len(held) > 2:
                self.free(held.pop(0))
        for address in held:
            self.free(address)


def test_the_place_is_found_again_although_other_sizes_come_between() -> None:
    program = Sequence()
    for _ in range(10):
        program.step(program.train)
    assert program.step(program.train) == (40, 0)
    hits, missed = program.step(lambda: program.train(skipped=range(10, 16), beside=range(16, 30)))
    assert hits + missed == 34 + 14
    assert hits >= 25, "after a few of those that follow what is left out"


def test_the_place_is_found_again_although_the_data_asked_for_what_comes_much_later() -> None:
    """Three requests in a row whose sizes the schedule has, one after the other, twenty requests ahead."""
    program = Sequence(length=120)

    def train(*between: int) -> None:
        program.train(skipped=range(8, 120))
        for size in between or [program.any_size()]:
            program.free(program.allocate(size))
        program.train(skipped=range(8), beside=range(60, 80))

    for _ in range(10):
        program.step(train)
    assert program.step(train) == (120, 0)
    hits, _ = program.step(lambda: train(34 * MIB, 35 * MIB, 36 * MIB))
    assert hits >= 116, "after a few that were missed"


def test_a_plan_that_misses_much_of_a_step_is_soon_made_anew() -> None:
    """Four steps were alike by chance; later ones ask for twenty requests more."""
    program = Sequence()

    def ask_for_more() -> None:
        program.train()
        for number in range(20):
            program.free(program.allocate(60 * MIB + number * MIB))

    for _ in range(5):
        program.step(program.train)
    assert [program.step(ask_for_more)[1] for _ in range(3)] == [20, 20, 0]


@pytest.mark.parametrize(("more", "num_plans", "missed"), [(8, 2, 0), (7, 1, 7)])
def test_what_later_steps_have_in_common_is_planned_too(more: int, num_plans: int, missed: int) -> None:
    """From the eighth step on some more is asked for: after the sixteenth most have it. Few are not worth a plan."""
    program = Sequence()

    def ask_for_more() -> None:
        program.train()
        for number in range(more):
            program.free(program.allocate(2 * MIB + number * 65536))

    for _ in range(7):
        program.step(program.train)
    for _ in range(12):
        program.step(ask_for_more)
    assert program.step(ask_for_more)[1] == missed
    assert program.controller.status.num_plans == num_plans


@pytest.mark.parametrize(("more", "missed"), [(64, 0), (65, 1)])
def test_a_step_may_ask_for_sixty_four_more_of_any_size_at_a_place_than_those_before(more: int, missed: int) -> None:
    program, sizes = Program(), iter(range(100_000, 2_000_000, 1024))

    def train(num_dynamic: int) -> None:
        held = [program.allocate(40 * MIB)]
        held += [program.allocate(next(sizes)) for _ in range(num_dynamic)]
        for address in [*held, program.allocate(30 * MIB)]:
            program.free(address)
        for number in range(20):
            program.free(program.allocate((2 + number) * MIB))

    for _ in range(12):
        program.step(lambda: train(4))
    before = report(program.controller).misses
    program.step(lambda: train(4 + more))
    assert report(program.controller).misses - before == missed


def test_an_experts_request_of_a_static_size_is_told_by_its_proportion_to_the_last() -> None:
    """Each expert asks for its tokens and for four times that, twice; some have just as many tokens."""
    program, counts = Program(), iter(range(100, 2000))

    def train(tokens: int | None = None) -> None:
        held = []
        for _ in range(12):
            count = next(counts) if tokens is None else tokens
            held += [program.allocate(count * size) for size in (1024, 4096, 4096, 1024)]
            held.append(program.allocate(2 * MIB))
        for address in held:
            program.free(address)

    for _ in range(12):
        program.step(train)
    for tokens in (None, 512, None, 513, 511):
        assert program.step(lambda tokens=tokens: train(tokens)) == (12, 0), tokens


class Experts(Program):
    """Experts whose tokens the test decides: each asks for its list of tokens, twice its input, and a result.

    A result is freed before the next one comes; what comes after the last is of the same size, and lives on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts = iter(range(1000, 9000))

    def tokens(self) -> list[int]:
        """Of eight experts, none twice."""
        return [next(self._counts) for _ in range(8)]

    def train(self, tokens: list[int]) -> None:
        """A step; experts without tokens ask for nothing."""
        kept = [self.allocate(32 * MIB)]
        result = 0
        for count in tokens:
            if count:
                kept += [self.allocate(count * size) for size in (512, 2048, 2048)]
                if result:
                    self.free(result)
                result = self.allocate(4 * MIB)
        self.free(result)
        last = self.allocate(4 * MIB)
        for _ in range(12):
            self.free(self.allocate(4 * MIB))
        for address in reversed(kept):
            self.free(address)
        self.free(self.allocate(48 * MIB))
        self.free(last)


@pytest.mark.parametrize("left_out", [(7,), (6, 7), (0, 7), (3,)])
def test_what_follows_an_expert_that_is_left_out_is_not_taken_for_its_result(left_out: tuple[int, ...]) -> None:
    """It would live on where the results of all others have their place."""
    program = Experts()
    for _ in range(12):
        program.step(lambda: program.train(program.tokens()))
    tokens = [0 if number in left_out else count for number, count in enumerate(program.tokens())]
    assert program.step(lambda: program.train(tokens)) == (23 - len(left_out), 0)


class Gap(Program):
    """Eight experts between two static requests, and what comes after them; one expert may have 2,048 tokens."""

    def __init__(self, multiples: tuple[int, ...], after: list[int]) -> None:
        super().__init__()
        self._counts, self._multiples, self._after = iter(range(1001, 9000, 2)), multiples, after

    def train(self, odd: int = -1) -> None:
        """A step; an expert asks for `multiples` of its tokens in bytes, then come requests of `after` MiB."""
        held = [self.allocate(32 * MIB)]
        for expert in range(8):
            count = 2048 if expert == odd else next(self._counts)
            held += [self.allocate(count * size) for size in self._multiples]
        held += [self.allocate(size * MIB) for size in self._after]
        for address in reversed(held):
            self.free(address)


@pytest.mark.parametrize("number", [0, 3, 7])
def test_an_expert_that_asks_for_as_much_as_a_later_static_request_does_not_end_the_gap(number: int) -> None:
    """One of the experts has a size of the static request that comes after them."""
    program = Gap((512, 2048, 6144, 2048), [1, *range(5, 13)])
    for _ in range(12):
        program.step(program.train)
    hits, missed = program.step(lambda: program.train(number))
    assert hits >= 10
    assert missed <= 1, "no more than the place that it took"
    assert program.step(program.train) == (10, 0)


@pytest.mark.parametrize("number", [1, 6])
def test_an_expert_whose_requests_are_all_of_static_sizes_does_not_end_the_gap(number: int) -> None:
    """Three requests in a row are those of a place thirty requests ahead, but in proportion to one another, too."""
    program = Gap((512, 2048, 6144, 1024), [*range(20, 40), 1, 4, 12, 2])
    for _ in range(12):
        program.step(program.train)
    assert program.step(lambda: program.train(number)) == (25, 0)


def test_a_life_that_was_long_once_is_expected_again() -> None:
    """Data decides how long what it asks for lives; after ten short lives it is not where the plan needs the place."""
    program, sizes = Program(), iter(range(1001, 3000, 2))

    def train(lives: int) -> None:
        first = program.allocate(30 * MIB)
        program.free(first)
        some = [program.allocate(next(sizes) * 2048) for _ in range(4)]
        for number in range(12):
            program.free(program.allocate((20 + number) * MIB))
            for address in some if number == lives else []:
                program.free(address)

    for _ in range(12):
        program.step(lambda: train(11))
    for _ in range(10):
        program.step(lambda: train(0))
    assert program.step(lambda: train(11)) == (13, 0)


def test_what_is_of_no_proportion_is_not_lent_for_a_short_time() -> None:
    """An expert has so few tokens that its list of them is not planned for: what comes after it is another request."""
    program, counts = Program(), iter(range(1000, 9000))

    def train(few: bool = False) -> None:
        kept = [program.allocate(32 * MIB)]
        for number in range(4):
            count = 4 if few and number == 1 else next(counts)
            kept.append(program.allocate(count * 64))
            workspace, used = program.allocate(count * 1024), program.allocate(count * 3072)
            program.free(workspace)
            kept.append(used)
        for number in range(12):
            program.free(program.allocate((8 + number) * MIB))
        for address in reversed(kept):
            program.free(address)

    for _ in range(12):
        program.step(train)
    assert program.step(lambda: train(few=True)) == (13, 0)


@pytest.mark.parametrize("size_bytes", [96 * 1024, MIB])
def test_a_batch_that_is_kept_until_the_next_one_is_not_lent_what_the_step_needs(size_bytes: int) -> None:
    """It has no place on the plan, and how long it lives is not known before it is freed."""
    program, counts = Program(), iter(range(1001, 90_000, 2))
    batches: list[int] = []

    def train() -> None:
        batches.append(program.allocate(size_bytes))
        if len(batches) > 1:
            program.free(batches.pop(0))
        held = [program.allocate(16 * MIB), *[program.allocate(next(counts) * 512) for _ in range(20)]]
        for _ in range(15):
            program.free(program.allocate(2 * MIB))
        for number in range(30):
            program.free(program.allocate((20 + number % 3) * MIB))
        for address in reversed(held):
            program.free(address)

    for _ in range(6):
        program.step(train)
    assert [program.step(train) for _ in range(6)] == [(46, 1)] * 6


def test_what_is_on_no_schedule_does_not_take_the_places_of_little_requests() -> None:
    """Where one large block stands, a hundred of them would have to go elsewhere."""
    program, counts = Program(), iter(range(1000, 9000))

    def train(stray: int = 0) -> None:
        first = [program.allocate(32 * MIB), *[program.allocate(next(counts) * 512) for _ in range(40)]]
        held = [program.allocate(24 * MIB), *[program.allocate(48 * 1024) for _ in range(100)]]
        for address in held:
            program.free(address)
        strays = [program.allocate(2 * MIB + 512 * number) for number in range(stray)]
        for number in range(4):
            program.free(program.allocate((20 + number) * MIB))
        held = [program.allocate(24 * MIB), *[program.allocate(40 * 1024) for _ in range(100)]]
        for address in [*held, *strays, *first]:
            program.free(address)

    for _ in range(12):
        program.step(train)
    assert program.step(train)[0] == 207
    hits, _ = program.step(lambda: train(20))
    assert hits >= 200, "only large ones are displaced"


def test_steps_of_which_most_is_decided_by_data_get_no_plan() -> None:
    program, rng = Program(), np.random.default_rng(3)
    for _ in range(20):
        width = int(rng.integers(1000, 9000))
        program.step(lambda width=width: program.train(width))
    assert program.controller.status.num_plans == 0


def test_a_program_that_leaves_such_a_plan_gets_another() -> None:
    program = Mixture(1)
    for _ in range(12):
        program.step(program.train)
    assert program.controller.status.phase is Phase.PLANNED
    for _ in range(60):
        program.step(lambda: Program.train(program, 1000))
    assert program.step(lambda: Program.train(program, 1000)) == (37, 0)
