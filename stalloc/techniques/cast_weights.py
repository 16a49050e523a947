"""Weights that autocast casts once for several uses: which cast a block makes depends on what was computed before it.

Contract: if one run of a block casts a weight and the other finds the cast made already, the runs count as equal, as
long as nobody has changed the weight since the forward pass: whoever made the cast, it has the same numbers.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_Cast = tuple[int, int, Any]
"""The memory of a weight, how often autograd saw it changed, and the type that it is cast to."""
_TO_COPY = torch.ops.aten._to_copy.default
_ALIVE: dict[int, tuple[StorageWeakRef, _Cast]] = {}
"""Casts that blocks have made, by their memory."""


class CastWeights:
    """The casts of weights that one call of a block makes, and those made by others that it uses."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Any], _Cast]] = {}  # by position
        self._used: set[_Cast] = set()

    def note(self, position: int, operator: Any, args: Sequence[Any], results: Any, read: Iterable[int]) -> None:
        """An operation of the forward pass, which read these storages."""
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
