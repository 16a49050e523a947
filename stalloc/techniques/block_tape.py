"""One call of a block, operation by operation: what its forward pass did, and running it again to the same result.

Contract: the second run makes the same operations in the same order, on what they read the first time, or it is an
error. Of those, results that were kept are handed out instead of computed, and what changed memory outside the block
(counters, averages) is not done again, but for normalizations, which get other memory for their running statistics: one
that trains computes the same whatever these are, and changes nothing else. A result is kept only if it is new memory
that nothing changes before it is needed; random numbers are kept only where none are drawn anew after them, so that
generators say the same both times. Which is asked for decides about bytes and time, never about what comes out.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS

from stalloc.errors import RecomputeError
from stalloc.techniques.module_state import ModuleState
from stalloc.techniques.tensor_memory import is_plain, sizes_of, storages_of, tensors_of, unseen, versions_of

Wanted = Callable[[int, str], bool]
"""Whether the result of an operation is to be kept, given its position in the block and its name."""


def keeps_nothing(position: int, name: str) -> bool:
    return False


_Arguments = tuple[Sequence[Any], Mapping[str, Any]]
_OF_PYTHON = "aten.lift_fresh.default"  # hands on a tensor that was made from numbers of Python's
_STATISTICS = ("running_mean", "running_var")  # changed by normalizations, whose schemas mostly do not say so
_DROPOUTS = ("dropout_p", "dropout", "p")  # arguments that say how much is dropped; with 0 nothing is drawn


@dataclass(frozen=True)
class OperatorFacts:
    """What an operator's schema says about running it twice. One without (higher-order) is not kept, nor repeated."""

    name: str  #: as torch prints it, such as "aten.mm.default"
    is_fresh: bool = False  #: its results are new memory: neither views of what it reads nor what it changed
    mutated: tuple[tuple[int, str], ...] = ()  #: arguments that it changes in place: position and name
    is_declared: bool = False  #: whether the schema says that it changes something, so that autograd counts it
    is_random: bool = False
    dropouts: tuple[tuple[int, str, Any], ...] = ()  #: arguments of that meaning: position, name, default
    generator: tuple[int, str] | None = None  #: the argument that takes a generator of the program's own
    is_view: bool = False  #: hands on memory that it is given, without a look at the numbers in it
    training: tuple[int, str] | None = None
    """Of a normalization: the argument that says whether it changes its running statistics, and nothing else."""

    def changed_by(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if not self.mutated or (self.training and not _argument(*self.training, args, kwargs)):
            return []
        return [_argument(place, name, args, kwargs) for place, name in self.mutated]

    def draws_random(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        given = [_argument(place, name, args, kwargs, default) for place, name, default in self.dropouts]
        return not (given and all(value == 0 for value in given))

    def draws_from_own(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call draws from a generator that the program made, whose state checkpoints do not put back."""
        return self.generator is not None and _argument(*self.generator, args, kwargs) is not None


@functools.cache
def facts_of(operator: Any) -> OperatorFacts:
    """The facts of an operator, as a dispatch mode is given it."""
    if (schema := getattr(operator, "_schema", None)) is None:
        return OperatorFacts(str(operator))
    numbered = [(place, one.name, one) for place, one in enumerate(schema.arguments)]
    declared = {name for _, name, one in numbered if one.alias_info is not None and one.alias_info.is_write}
    written = declared | {name for _, name, _ in numbered if name in _STATISTICS}
    aliases = [one.alias_info for one in schema.returns]
    training = [(place, name) for place, name, _ in numbered if name == "training"]
    generators = [(at, name) for at, name, one in numbered if str(one.type) in ("Optional[Generator]", "Generator")]
    return OperatorFacts(
        name=str(operator),
        is_fresh=bool(aliases) and all(one is None for one in aliases),
        mutated=tuple((place, name) for place, name, _ in numbered if name in written),
        is_declared=bool(declared),
        is_random=torch.Tag.nondeterministic_seeded in operator.tags,
        dropouts=tuple((place, name, one.default_value) for place, name, one in numbered if name in _DROPOUTS),
        generator=generators[0] if generators else None,
        is_view=bool(aliases) and None not in aliases and not written,
        training=training[0] if training and written and written <= set(_STATISTICS) else None,
    )


def _argument(place: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any = None) -> Any:
    return args[place] if place < len(args) else kwargs.get(name, default)


_SMALL_BYTES = 1 << 20
_ANY = -1

_Read = tuple[int, int, int]
"""A storage, how often autograd saw it changed when it was read, and how often the block itself had changed it."""


class _FormerValues:
    """How often one call of a block changed each storage outside, and copies of what it read in between. A value that
    was read and then changed by the block is copied before the change; one that was read after it is copied too where
    it is small, as a second call of the block may change it again. Memory that only others change is never copied:
    whether they did is seen by the counts of autograd."""

    def __init__(self) -> None:
        self._changes: dict[int, int] = {}  # of each storage
        self._counted: dict[int, int] = {}  # those that autograd counts
        self._read: set[int] = set()  # storages that were read since the block changed them last
        self._copies: dict[tuple[int, int], Any] = {}  # storage and number of changes -> its memory as it was

    def reads(self, versions: Iterable[tuple[int, int]]) -> list[_Read]:
        return [(storage, version, self._changes.get(storage, 0)) for storage, version in versions]

    def without(self, reads: Sequence[_Read], storages: set[int]) -> list[_Read]:
        """The reads, with a read of any state in place of those of some storages, whose values do not matter."""
        return [(0, 0, _ANY) if one in storages else (one, version, state) for one, version, state in reads]

    def before_change(self, storages: set[int], values: Any) -> None:
        self._copy(storages & self._read, values)
        self._read -= storages

    def changed(self, storages: set[int], *, counted: bool) -> None:
        """Note that these storages were changed; `counted`: autograd has counted it."""
        for counts in (self._changes, self._counted) if counted else (self._changes,):
            counts |= {one: counts.get(one, 0) + 1 for one in storages}

    def was_read(self, storages: Iterable[int], values: Any) -> None:
        self._read.update(storages)
        if self._changes:
            self._copy({one for one in storages if one in self._changes}, values, _SMALL_BYTES)

    def _copy(self, storages: set[int], values: Any, most_bytes: int | None = None) -> None:
        for tensor in tensors_of(values) if storages else ():
            if not is_plain(tensor) or (memory := tensor.untyped_storage())._cdata not in storages:
                continue
            key = memory._cdata, self._changes.get(memory._cdata, 0)
            if key not in self._copies and (most_bytes is None or memory.nbytes() <= most_bytes):
                with unseen():
                    self._copies[key] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory).clone()

    def is_as_it_was(self, reads: Sequence[_Read], now: Sequence[tuple[int, int]]) -> bool:
        """Whether all that was read has its value yet, or was copied: autograd counts the changes of the second run
        too, though they are left out."""
        return all(
            (storage, state) in self._copies
            or state == _ANY
            or (state == self._changes.get(storage, 0) and version == before + self._counted.get(storage, 0))
            for (storage, before, state), (_, version) in zip(reads, now, strict=False)
        )

    def put_back(self, reads: Sequence[_Read], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Arguments:
        if not self._copies or not any((storage, state) in self._copies for storage, _, state in reads):
            return args, kwargs
        copies = {
            id(tensor): self._copies.get((storage, state))
            for tensor, (storage, _, state) in zip(tensors_of((args, kwargs)), reads, strict=False)
        }

        def as_it_was(tensor: Any) -> Any:
            copied = copies.get(id(tensor))
            if copied is None or not is_plain(tensor):
                return tensor
            with unseen():
                one = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                return one.set_(copied.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

        return tree_map_only(torch.Tensor, as_it_was, (args, kwargs))


_Cast = tuple[int, int, Any]
"""The memory of a weight, how often autograd saw it changed, and the type that it is cast to."""
_TO_COPY = torch.ops.aten._to_copy.default
_ALIVE: dict[int, tuple[StorageWeakRef, _Cast]] = {}
"""Casts that blocks have made, by their memory."""


class _CastWeights:
    """Weights that autocast casts once for several uses: which cast a block makes depends on what came before it. If
    one run of a block casts a weight and the other finds the cast made already, the runs count as equal, as long as
    nobody has changed the weight since the forward pass: whoever made the cast, it has the same numbers."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Any], _Cast]] = {}  # by position
        self._used: set[_Cast] = set()

    def note(self, position: int, operator: Any, args: Sequence[Any], results: Any, read: Iterable[int]) -> None:
        if _ALIVE:
            self._used |= {_ALIVE[one][1] for one in read if one in _ALIVE and not _ALIVE[one][0].expired()}
        if _is_of_weight(operator, args):
            cast = _cast(args, results.dtype)
            self._made[position] = weakref.ref(args[0]), cast
            for one in [one for one, (memory, _) in _ALIVE.items() if memory.expired()]:
                del _ALIVE[one]
            memory = results.untyped_storage()
            _ALIVE[memory._cdata] = StorageWeakRef(memory), cast

    def is_extra(self, position: int, operator: Any, args: Sequence[Any], kwargs: Any) -> bool:
        """Whether an operation of a later run casts a weight whose cast the forward pass found made."""
        if not self._used or not _is_of_weight(operator, args):
            return False
        cast = _cast(args, kwargs.get("dtype"))
        return cast in self._used and not (position in self._made and self._made[position][1] == cast)

    def is_made(self, position: int, operator: Any, args: Sequence[Any]) -> bool:
        """Whether, in a later run, the cast that the forward pass made at this position already exists."""
        if position not in self._made:
            return False
        weight, (memory, version, _) = self._made[position][0](), self._made[position][1]
        if weight is None or weight._version != version:
            return False
        return not (_is_of_weight(operator, args) and args[0].untyped_storage()._cdata == memory)


def _is_of_weight(operator: Any, args: Sequence[Any]) -> bool:
    return operator is _TO_COPY and args[0].is_leaf and args[0].requires_grad


def _cast(args: Sequence[Any], dtype: Any) -> _Cast:
    return args[0].untyped_storage()._cdata, args[0]._version, dtype


@functools.cache
def _spare_like(name: str, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Spare running statistics, that all of one shape share for good: what is written to them is never read."""
    with unseen():
        return torch.empty(shape, dtype=dtype, device=device)


class BlockTape:
    """What one call of a block did. `block` is what sentences call it; `inputs` are the tensors that it was given."""

    def __init__(self, block: str, wanted: Wanted, inputs: Iterable[Any] = ()) -> None:
        self.block = block
        inputs = list(inputs)
        self._devices = {torch.device("cpu"), *(one.device for one in inputs)}  # whose random state is put back
        self._given = storages_of(inputs)
        self._wanted = wanted
        self._operators: list[Any] = []
        self._reads: list[list[_Read]] = []  # what each was given
        self._former = _FormerValues()  # of storages outside that the forward pass changed in place
        self._kept: dict[int, tuple[Any, list[tuple[Any, int]]]] = {}  # position -> results, tensors with versions
        self._effects: dict[int, set[int]] = {}  # position -> storages outside that it changed
        self._spare: dict[int, list[tuple[int, str, Any]]] = {}  # position -> arguments with what stands in for them
        self._casts = _CastWeights()
        self.own: set[int] = set()  # storages that were made in this call
        self._random: list[int] = []  # positions of kept results that drew random numbers
        self._lasting_random = False  # random numbers were drawn that cannot be drawn again
        self._position = 0
        self._taken = False

    @property
    def num_operations(self) -> int:
        return len(self._operators)

    @property
    def names(self) -> list[str]:
        return [str(operator) for operator in self._operators]

    @property
    def kept_bytes(self) -> dict[int, int]:
        """What is kept, by position: the bytes of its memory, which torch rounds up to 512."""
        return {position: sum(sizes_of(results).values()) for position, (results, _) in self._kept.items()}

    def positions_of(self, storages: set[int]) -> set[int]:
        return {position for position, (results, _) in self._kept.items() if storages_of(results) & storages}

    @property
    def lasting(self) -> set[int]:
        """Positions whose results are kept whether wanted or not, since they have effects."""
        return set(self._effects)

    @property
    def random(self) -> set[int]:
        return set(self._random)

    def recording(self) -> TorchDispatchMode:
        return _Mode(self.block, self.record)

    def repeating(self) -> TorchDispatchMode:
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
        return self._record(operator, operator, args, kwargs)

    def _record(self, operator: Any, do: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do an operation of the forward pass by calling `do`, and note what it reads, changes and makes."""
        position, facts = len(self._operators), facts_of(operator)
        self._operators.append(operator)
        self._reads.append(self._former.reads(versions_of((args, kwargs))))
        read = {one for one, *_ in self._reads[position]}
        # asked for before, as set_ exchanges the memory of a tensor
        written = storages_of(facts.changed_by(args, kwargs)) if facts.mutated else set()
        if outside := written - self.own:
            if facts.is_declared and outside & self._given:  # which autograd saves, and forbids to change
                raise self._impossible(f"{facts.name} changes in place what the block was given")
            self._former.before_change(outside, (args, kwargs))
        results = do(*args, **kwargs)
        self._casts.note(position, operator, args, results, read)
        if outside:
            self._former.changed(outside, counted=facts.is_declared)
        of_program = facts.generator is not None and facts.draws_from_own(args, kwargs)
        random = facts.is_random and facts.draws_random(args, kwargs) and not of_program
        spared = facts.training is not None and bool(outside) and outside == written
        if spared:
            given = [(place, name, _argument(place, name, args, kwargs)) for place, name in facts.mutated]
            self._spare[position] = [
                (place, name, _spare_like(name, tuple(one.shape), one.dtype, one.device))
                for place, name, one in given
                if isinstance(one, torch.Tensor)
            ]
            self._reads[position] = self._former.without(self._reads[position], outside)
        lasting = (bool(outside) and not spared) or of_program
        if not lasting and not facts.is_view:
            self._former.was_read(read - self.own - written, (args, kwargs))
        if written != outside:
            self._drop(written - outside)
            if lasting:
                raise self._impossible(f"{facts.name} changes memory of its own and something outside in one operation")
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
        self.own.update(made if facts.name == _OF_PYTHON else made - read)
        return results

    def repeat(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
            raise self._different(f"its operation {position} {told}")
        if position in self._effects:
            facts = facts_of(operator)
            if not self._effects[position] <= storages_of(facts.changed_by(args, kwargs)):
                raise self._different(f"{facts.name} changed another tensor before")
            return self._kept[position][0]
        if position not in self._kept:
            return self._do_again(position, operator, *self._with_spare(position, args, kwargs))
        results, versions = self._kept.pop(position)
        for tensor, version in versions:
            if tensor._version != version:
                raise RecomputeError(
                    f"{self.block}: a result of {operator} that was kept has been changed in place since. "
                    "Keep another operation, or nothing, of this block."
                )
        return results

    def _with_spare(self, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Arguments:
        if position not in self._spare:
            return args, kwargs
        positional, named = list(args), dict(kwargs)
        for place, name, one in self._spare[position]:
            if place < len(positional):
                positional[place] = one
            else:
                named[name] = one
        return positional, named

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

    def _keep(self, position: int, results: Any) -> None:
        kept = tree_map(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, results)
        self._kept[position] = kept, [(one, one._version) for one in tree_leaves(kept) if isinstance(one, torch.Tensor)]

    def _drop(self, storages: set[int]) -> None:
        gone = {
            position
            for position, (results, _) in self._kept.items()
            if position not in self._effects and storages_of(results) & storages
        }
        last_random = max((position for position in self._random if position in gone), default=None)
        if last_random is not None:  # those before it are drawn again too
            self._check_drawn_again("a result with random numbers is changed in place")
            gone |= {position for position in self._random if position < last_random}
            self._random = [position for position in self._random if position > last_random]
        for position in gone:
            self._kept.pop(position, None)

    def _draw_again(self, facts: OperatorFacts, results: Any) -> None:
        """Note that random numbers are drawn and not kept; those drawn before them are then not kept either."""
        draws = f"{facts.name} draws random numbers"
        if any(isinstance(one, torch.Tensor) and one.device not in self._devices for one in tree_leaves(results)):
            raise self._impossible(f"{draws} on a device on which the block is given no tensor")
        self._check_drawn_again(draws)
        for position in self._random:
            self._kept.pop(position, None)
        self._random.clear()

    def _check_drawn_again(self, what: str) -> None:
        if self._lasting_random:
            raise self._impossible(f"{what} after others that cannot be drawn again")

    def _impossible(self, what: str) -> RecomputeError:
        return RecomputeError(f"{self.block} cannot be computed twice: {what}. Leave this block as it is.")

    def _different(self, what: str) -> RecomputeError:
        return RecomputeError(
            f"{self.block} does not do the same when it is recomputed: {what}. Leave this block as it is."
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
