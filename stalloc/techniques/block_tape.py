"""One call of a block, operation by operation: what its forward pass did, and running it again to the same result.

Contract: the second run makes the same operations in the same order, on what they read the first time, or it is an
error. Of those, results that were kept are handed out instead of computed, and what changed memory outside the block
(counters, averages) is not done again, but for normalizations, which get other memory for their running statistics. A
result is kept only if it is new memory that nothing changes before it is needed; random numbers are kept only where
none are drawn anew after them, so that generators say the same both times. Which is asked for decides about bytes and
time, never about what comes out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import SAC_IGNORED_OPS

from stalloc.errors import RecomputeError
from stalloc.techniques.cast_weights import CastWeights
from stalloc.techniques.former_values import FormerValues, Read
from stalloc.techniques.module_state import ModuleState
from stalloc.techniques.operator_facts import OperatorFacts, changed_by, draws_random, facts_of, own_generator
from stalloc.techniques.spare_statistics import SpareStatistics
from stalloc.techniques.tensor_memory import sizes_of, storages_of, versions_of

Wanted = Callable[[int, str], bool]
"""Whether the result of an operation is to be kept, given its position in the block and its name."""


def keeps_nothing(position: int, name: str) -> bool:
    """As a `Wanted`: no result is."""
    return False


_OF_PYTHON = "aten.lift_fresh.default"  # hands on a tensor that was made from numbers of Python's


class BlockTape:
    """What one call of a block did. `block` is what sentences call it; `inputs` are the tensors that it was given."""

    def __init__(self, block: str, wanted: Wanted, inputs: Iterable[Any] = ()) -> None:
        self.block = block
        inputs = list(inputs)
        self._devices = {torch.device("cpu"), *(one.device for one in inputs)}  # whose random state is put back
        self._given = storages_of(inputs)
        self._wanted = wanted
        self._operators: list[Any] = []
        self._reads: list[list[Read]] = []  # what each was given
        self._former = FormerValues()  # of storages outside that the forward pass changed in place
        self._kept: dict[int, tuple[Any, list[tuple[Any, int]]]] = {}  # position -> results, tensors with versions
        self._effects: dict[int, set[int]] = {}  # position -> storages outside that it changed
        self._statistics = SpareStatistics()
        self._casts = CastWeights()
        self._own: set[int] = set()  # storages that were made in this call
        self._random: list[int] = []  # positions of kept results that drew random numbers
        self._lasting_random = False  # random numbers were drawn that cannot be drawn again
        self._position = 0
        self._taken = False

    @property
    def num_operations(self) -> int:
        """Operations that the forward pass has made so far."""
        return len(self._operators)

    @property
    def names(self) -> list[str]:
        """The operations of the forward pass, in order."""
        return [str(operator) for operator in self._operators]

    @property
    def kept_bytes(self) -> dict[int, int]:
        """What is kept, by position: the bytes of its memory, which torch rounds up to 512."""
        return {position: sum(sizes_of(results).values()) for position, (results, _) in self._kept.items()}

    def positions_of(self, storages: set[int]) -> set[int]:
        """Positions whose kept results lie in some of these storages."""
        return {position for position, (results, _) in self._kept.items() if storages_of(results) & storages}

    def own(self, storages: set[int]) -> set[int]:
        """Which of these storages were made in this call."""
        return storages & self._own

    @property
    def lasting(self) -> set[int]:
        """Positions whose results are kept whether wanted or not, since they have effects."""
        return set(self._effects)

    @property
    def random(self) -> set[int]:
        """Positions of random numbers that are kept."""
        return set(self._random)

    def recording(self) -> TorchDispatchMode:
        """The mode to enter for the forward pass."""
        return _Mode(self.block, self.record)

    def repeating(self) -> TorchDispatchMode:
        """The mode to enter for each run after the forward pass."""
        return _Mode(self.block, self.repeat)

    def watch(self, state: ModuleState) -> None:
        """The forward pass begins, with the module in this state."""

    def begin_again(self) -> None:
        """A run after the forward pass begins; what was kept is given to the first, any other computes it again."""
        if self._taken and self._lasting_random and self._random:
            raise RecomputeError(
                f"{self.block} is computed a third time, as backward is called twice on it: random numbers that were "
                "kept of it are gone, and cannot be drawn again. Keep nothing of its operations, or call backward once."
            )
        self._taken = True
        self._position = 0

    def finish(self, outputs: Any) -> None:
        """End the forward pass; results that the caller holds are not kept, since the caller may change them."""
        self._drop(storages_of(tree_leaves(outputs)))

    def record(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do an operation of the forward pass."""
        return self._record(operator, operator, args, kwargs)

    def _record(self, operator: Any, do: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do an operation of the forward pass by calling `do`, and note what it reads, changes and makes."""
        position, facts = len(self._operators), facts_of(operator)
        self._operators.append(operator)
        self._reads.append(self._former.reads(versions_of((args, kwargs))))
        read = {one for one, *_ in self._reads[position]}
        # asked for before, as set_ exchanges the memory of a tensor
        written = storages_of(changed_by(facts, args, kwargs)) if facts.mutated else set()
        outside = written - self._own
        if outside:
            self._check_given(outside, facts)
            self._former.before_change(outside, (args, kwargs))
        results = do(*args, **kwargs)
        self._casts.note(position, operator, args, results, read)
        if outside:
            self._former.changed(outside, counted=facts.is_declared)
        of_program = facts.generator is not None and own_generator(facts, args, kwargs)
        random = facts.is_random and draws_random(facts, args, kwargs) and not of_program
        spared = facts.training is not None and bool(outside) and outside == written
        if spared:
            self._statistics.add(position, facts, args, kwargs)
            self._reads[position] = self._former.without(self._reads[position], outside)
        lasting = (bool(outside) and not spared) or of_program
        if not lasting and not facts.is_view:
            self._former.was_read(read - self._own - written, (args, kwargs))
        if written != outside:
            self._drop(written - outside)
            if lasting:
                raise RecomputeError(
                    f"{self.block} cannot be computed twice: {facts.name} changes memory of its own and something "
                    "outside in one operation. Leave this block as it is."
                )
        made = storages_of(results) if facts.is_fresh or facts.name == _OF_PYTHON else set()
        if lasting:
            self._effects[position] = outside
            self._keep(position, results)
            self._lasting_random |= random
        elif facts.is_fresh and self._wanted(position, facts.name) and not made & read:
            self._keep(position, results)
            if random:
                self._random.append(position)
        elif random:
            self._draw_again(facts, results)
        self._own.update(made if facts.name == _OF_PYTHON else made - read)
        return results

    def repeat(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do an operation again, or hand out its results."""
        if self._casts.is_extra(self._position, operator, args, kwargs):
            return operator(*args, **kwargs)
        while self._casts.is_made(self._position, operator, args):
            self._kept.pop(self._position, None)
            self._position += 1
        position = self._position
        self._position += 1
        before: Any = self._operators[position] if position < len(self._operators) else None
        if before is not operator:
            told = f"was {before} and is {operator} now" if before else f"is {operator}, and there was none"
            raise RecomputeError(
                f"{self.block} does not do the same when it is recomputed: its operation {position} {told}. "
                "Leave this block as it is."
            )
        if position in self._effects:
            facts = facts_of(operator)
            if not self._effects[position] <= storages_of(changed_by(facts, args, kwargs)):
                raise RecomputeError(
                    f"{self.block} does not do the same when it is recomputed: {facts.name} changed another tensor "
                    "before. Leave this block as it is."
                )
            return self._kept[position][0]
        if position not in self._kept:
            return self._do_again(position, operator, *self._statistics.put_in(position, args, kwargs))
        results, versions = self._kept.pop(position)
        for tensor, version in versions:
            if tensor._version != version:
                raise RecomputeError(
                    f"{self.block}: a result of {operator} that was kept has been changed in place since. "
                    "Keep another operation, or nothing, of this block."
                )
        return results

    def _do_again(self, position: int, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do an operation again on the values that it read; if the forward pass changed them since, it left copies."""
        reads = self._reads[position]
        if not facts_of(operator).is_view:
            if not self._former.is_as_it_was(reads, versions_of((args, kwargs))):
                raise RecomputeError(
                    f"{self.block} cannot be recomputed: what its operation {position}, "
                    f"{self._operators[position]}, reads was changed in place since. Leave this block as it is."
                )
            args, kwargs = self._former.put_back(reads, args, kwargs)
        return operator(*args, **kwargs)

    def _check_given(self, changed: set[int], facts: OperatorFacts) -> None:
        """Raise an error if an operation changes what the block was given: autograd saves that, and forbids changes."""
        if facts.is_declared and changed & self._given:
            raise RecomputeError(
                f"{self.block} cannot be computed twice: {facts.name} changes in place what the block was given. "
                "Leave this block as it is."
            )

    def _keep(self, position: int, results: Any) -> None:
        kept = tree_map(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, results)
        self._kept[position] = kept, [(one, one._version) for one in tree_leaves(kept) if isinstance(one, torch.Tensor)]

    def _drop(self, storages: set[int]) -> None:
        """Compute again whatever lies in these storages."""
        gone = [
            position
            for position, (results, _) in self._kept.items()
            if position not in self._effects and storages_of(results) & storages
        ]
        last_random = max((position for position in self._random if position in gone), default=None)
        if last_random is not None:  # those before it are drawn again too
            self._check_drawn_again("a result with random numbers is changed in place")
            gone += [position for position in self._random if position < last_random]
            self._random = [position for position in self._random if position > last_random]
        for position in gone:
            self._kept.pop(position, None)

    def _draw_again(self, facts: OperatorFacts, results: Any) -> None:
        """Note that random numbers are drawn and not kept; those drawn before them are then not kept either."""
        if any(isinstance(one, torch.Tensor) and one.device not in self._devices for one in tree_leaves(results)):
            raise RecomputeError(
                f"{self.block} cannot be computed twice: {facts.name} draws random numbers on a device on which the "
                "block is given no tensor. Leave this block as it is."
            )
        self._check_drawn_again(f"{facts.name} draws random numbers")
        for position in self._random:
            self._kept.pop(position, None)
        self._random.clear()

    def _check_drawn_again(self, what: str) -> None:
        if self._lasting_random:
            raise RecomputeError(
                f"{self.block} cannot be computed twice: {what} after others that cannot be drawn again. "
                "Leave this block as it is."
            )


_OF_CHECKPOINTS = frozenset(map(id, SAC_IGNORED_OPS))  # operators are objects that stay; hashing one takes longer


class _Mode(TorchDispatchMode):
    """Hands each operation to a function, but for those that torch's checkpoints themselves make."""

    def __init__(self, block: str, do: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self.block, self._do = block, do

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if id(func) in _OF_CHECKPOINTS:
            return func(*args, **(kwargs or {}))
        return self._do(func, args, kwargs or {})


def current_block() -> str:
    """The block that this thread computes with a tape, the innermost; empty if it computes none."""
    return next((mode.block for mode in reversed(_get_current_dispatch_mode_stack()) if type(mode) is _Mode), "")
