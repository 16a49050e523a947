"""What an operator's schema says about running it twice: what it changes, whether it draws random numbers.

Contract: facts are of the operator alone, looked up once; what depends on a call (a dropout of 0, a normalization that
trains) is asked for with its arguments. An operator without a schema (a higher-order one) is taken as one whose results
cannot be kept.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STATISTICS = ("running_mean", "running_var")  #: changed by normalizations, whose schemas mostly do not say so
_DROPOUTS = ("dropout_p", "dropout", "p")  #: arguments that say how much is dropped; with 0 nothing is drawn


@dataclass(frozen=True)
class OperatorFacts:
    """What recomputation has to know of an operator: what it changes, and whether it draws random numbers."""

    name: str  #: as torch prints it, such as "aten.mm.default"
    is_fresh: bool  #: its results are new memory: neither views of what it reads nor what it changed
    mutated: tuple[tuple[int, str], ...]  #: arguments that it changes in place: position and name
    is_declared: bool  #: whether the schema says that it changes something, so that autograd counts it
    is_random: bool
    dropouts: tuple[tuple[int, str, Any], ...]  #: arguments of that meaning: position, name, default
    generator: tuple[int, str] | None  #: the argument that takes a generator of the program's own
    is_view: bool  #: hands on memory that it is given, without a look at the numbers in it
    training: tuple[int, str] | None  #: of a normalization: whether it changes its running statistics, and nothing else


@functools.cache
def facts_of(operator: Any) -> OperatorFacts:
    """The facts of an operator, as a dispatch mode is given it."""
    import torch

    schema = getattr(operator, "_schema", None)
    if schema is None:
        return OperatorFacts(str(operator), False, (), False, False, (), None, False, None)
    numbered = list(enumerate(schema.arguments))
    declared = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    is_write = [known or one.name in _STATISTICS for known, one in zip(declared, schema.arguments, strict=True)]
    aliases = [one.alias_info for one in schema.returns]
    training = [(i, one.name) for i, one in numbered if one.name == "training"]
    generators = [(i, one.name) for i, one in numbered if str(one.type) in ("Optional[Generator]", "Generator")]
    return OperatorFacts(
        name=str(operator),
        is_fresh=bool(aliases) and all(one is None for one in aliases),
        mutated=tuple((i, one.name) for i, one in numbered if is_write[i]),
        is_declared=any(declared),
        is_random=torch.Tag.nondeterministic_seeded in operator.tags,
        dropouts=tuple((i, one.name, one.default_value) for i, one in numbered if one.name in _DROPOUTS),
        generator=generators[0] if generators else None,
        is_view=bool(aliases) and None not in aliases and not any(is_write),
        training=training[0] if training and _is_of_statistics(schema, is_write) else None,
    )


def _is_of_statistics(schema: Any, is_write: list[bool]) -> bool:
    """Whether running statistics are all that an operator changes."""
    written = [one.name for one, changes in zip(schema.arguments, is_write, strict=True) if changes]
    return bool(written) and set(written) <= set(_STATISTICS)


def changed_by(facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call changes in place."""
    if not facts.mutated or (facts.training and not argument(*facts.training, args, kwargs)):
        return []
    return [argument(place, name, args, kwargs) for place, name in facts.mutated]


def argument(place: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any = None) -> Any:
    """An argument of a call, by position or by name."""
    return args[place] if place < len(args) else kwargs.get(name, default)


def draws_random(facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes numbers from a random generator."""
    if not facts.is_random:
        return False
    given = [argument(place, name, args, kwargs, default) for place, name, default in facts.dropouts]
    return not (given and all(value == 0 for value in given))


def own_generator(facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws from a generator that the program made, whose state checkpoints do not put back."""
    return facts.generator is not None and argument(*facts.generator, args, kwargs) is not None
