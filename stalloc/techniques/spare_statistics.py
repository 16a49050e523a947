"""Running statistics that nobody reads, for normalizations that are computed a second time.

Contract: a normalization that trains computes the same whatever its running statistics are, and changes nothing else;
the spare ones are made once for each shape and stay for the rest of the program.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stalloc.techniques.former_values import unseen
from stalloc.techniques.operator_facts import OperatorFacts, argument


class SpareStatistics:
    """The spare running statistics for the normalizations in one call of a block, by their position."""

    def __init__(self) -> None:
        self._spare: dict[int, list[tuple[int, str, Any]]] = {}  # arguments with what stands in for them

    def add(self, position: int, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """This operation of the forward pass has changed its running statistics."""
        given = [(place, name, argument(place, name, args, kwargs)) for place, name in facts.mutated]
        self._spare[position] = [
            (place, name, _spare_like(name, tuple(one.shape), one.dtype, one.device))
            for place, name, one in given
            if isinstance(one, torch.Tensor)
        ]

    def put_in(
        self, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments to recompute an operation with, spare statistics in place of its own."""
        spare = self._spare.get(position)
        if spare is None:
            return args, kwargs
        positional, named = list(args), dict(kwargs)
        for place, name, one in spare:
            if place < len(positional):
                positional[place] = one
            else:
                named[name] = one
        return positional, named


@functools.cache
def _spare_like(name: str, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """A spare tensor that all of one shape share: what is written to it is never read."""
    with unseen():
        return torch.empty(shape, dtype=dtype, device=device)
