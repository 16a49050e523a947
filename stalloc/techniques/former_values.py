"""Values of memory outside a block that the block itself changes: what it read before, for running it again.

Contract: a value that was read and then changed by the block is copied before the change; one that was read after it is
copied too where it is small, as a second call of the block may change it again. Memory that only others change is never
copied: whether they did is seen by the counts of autograd.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from stalloc.techniques.tensor_memory import tensors_of

_SMALL_BYTES = 1 << 20
_ANY = -1

Read = tuple[int, int, int]
"""A storage, how often autograd saw it changed when it was read, and how often the block itself had changed it."""


class FormerValues:
    """How often one call of a block changed each storage, and copies of what it read in between."""

    def __init__(self) -> None:
        self._changes: dict[int, int] = {}  # of each storage
        self._counted: dict[int, int] = {}  # those that autograd counts
        self._read: set[int] = set()  # storages that were read since the block changed them last
        self._copies: dict[tuple[int, int], Any] = {}  # storage and number of changes -> its memory as it was

    def reads(self, versions: Iterable[tuple[int, int]]) -> list[Read]:
        """What an operation of the forward pass reads."""
        return [(storage, version, self._changes.get(storage, 0)) for storage, version in versions]

    def without(self, reads: Sequence[Read], storages: set[int]) -> list[Read]:
        """The reads, with a read of any state in place of those of some storages, whose values do not matter."""
        return [(0, 0, _ANY) if one in storages else (one, version, state) for one, version, state in reads]

    def before_change(self, storages: set[int], values: Any) -> None:
        """These storages are about to be changed by an operation that is given `values`."""
        self._copy(storages & self._read, values)
        self._read -= storages

    def changed(self, storages: set[int], *, counted: bool) -> None:
        """Note that these storages were changed; `counted`: autograd has counted it."""
        for counts in (self._changes, self._counted) if counted else (self._changes,):
            counts |= {one: counts.get(one, 0) + 1 for one in storages}

    def was_read(self, storages: Iterable[int], values: Any) -> None:
        """An operation has read the values of these storages."""
        self._read.update(storages)
        if self._changes:
            self._copy({one for one in storages if one in self._changes}, values, _SMALL_BYTES)

    def _copy(self, storages: set[int], values: Any, most_bytes: int | None = None) -> None:
        for tensor in tensors_of(values) if storages else ():
            memory = _memory(tensor)
            if memory is None or memory._cdata not in storages:
                continue
            key = memory._cdata, self._changes.get(memory._cdata, 0)
            if key not in self._copies and (most_bytes is None or memory.nbytes() <= most_bytes):
                with unseen():
                    self._copies[key] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory).clone()

    def is_as_it_was(self, reads: Sequence[Read], now: Sequence[tuple[int, int]]) -> bool:
        """Whether all that was read has its value yet, or was copied: autograd counts the changes of the second run
        too, though they are left out."""
        return all(
            (storage, state) in self._copies
            or state == _ANY
            or (state == self._changes.get(storage, 0) and version == before + self._counted.get(storage, 0))
            for (storage, before, state), (_, version) in zip(reads, now, strict=False)
        )

    def put_back(
        self, reads: Sequence[Read], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of an operation, with the copies in place of what was changed."""
        if not self._copies or not any((storage, state) in self._copies for storage, _, state in reads):
            return args, kwargs
        copies = {
            id(tensor): self._copies.get((storage, state))
            for tensor, (storage, _, state) in zip(tensors_of((args, kwargs)), reads, strict=False)
        }

        def as_it_was(tensor: Any) -> Any:
            copied = copies.get(id(tensor))
            if copied is None or _memory(tensor) is None:
                return tensor
            with unseen():
                one = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                return one.set_(copied.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

        found: tuple[Sequence[Any], Mapping[str, Any]] = tree_map_only(torch.Tensor, as_it_was, (args, kwargs))
        return found


def unseen() -> Any:
    """A context for operations of stalloc's own, which no mode of the program or of stalloc is to see."""
    return torch._C._DisableTorchDispatch()


def _memory(tensor: Any) -> Any:
    """The storage of a tensor whose numbers lie in it as they are; None for another tensor."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.untyped_storage()
