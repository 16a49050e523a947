"""What autograd holds in place of a tensor that it saved, while the tensor's memory is somebody else's to keep.

Contract: a tensor that was changed in place after it was saved is an error when backward asks for it, as it is without
hooks, for which autograd does not look itself. Parameters and their views, and small, sparse and odd kinds of tensors
are held as they are.
"""

from typing import Protocol, TypeVar

import torch

from stalloc.cost.disjoint_sets import LEAST_BYTES
from stalloc.errors import OffloadError
from stalloc.techniques.tensor_memory import is_plain, unseen

Memory = TypeVar("Memory", contravariant=True)


class Keeper(Protocol[Memory]):
    """The technique that keeps the memory of packed tensors."""

    def needed(self, memory: Memory, /) -> torch.UntypedStorage:
        """Its memory on the device, now that backward asks for it."""


def may_be_kept_elsewhere(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether the memory of a saved tensor is worth being kept elsewhere, and may be."""
    if type(tensor) is not torch.Tensor or tensor.device.type != device_type or tensor.is_nested:
        return False
    owner = tensor if tensor._base is None else tensor._base
    if not is_plain(tensor) or isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad):
        return False
    return tensor.untyped_storage().nbytes() >= LEAST_BYTES


class PackedTensor:
    """A saved tensor. `_alias` shares its count of changes; its memory is the keeper's, or (None) the alias's own.

    A keeper that gives the `alias` itself lets it have the memory, until that is somewhere else (`let_go_of`).
    """

    __slots__ = ("_alias", "_keeper", "_layout", "_version", "memory")

    def __init__(
        self, keeper: Keeper[Memory], memory: Memory | None, tensor: torch.Tensor, alias: torch.Tensor | None = None
    ) -> None:
        self._keeper, self.memory, self._version = keeper, memory, tensor._version
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        if alias is not None:
            self._alias = alias
        elif memory is not None:
            self._alias = alias_of(tensor)
            let_go_of(self._alias)
        else:
            self._alias = tensor if tensor.is_leaf else tensor.detach()  # a result itself would hold what made it

    def unpacked(self) -> torch.Tensor:
        """The tensor as it was saved."""
        if self._alias._version != self._version:
            raise OffloadError(
                f"a tensor of shape {tuple(self._layout[1])} that backward needs was changed in place after it was "
                "saved: its gradients would be wrong. Do not change it before backward."
            )
        if self.memory is None:
            return self._alias
        storage = self._keeper.needed(self.memory)
        tensor = self._alias.detach()
        if tensor.untyped_storage()._cdata != storage._cdata:
            values = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = values.set_(storage, *self._layout)
        return tensor


_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the memory of another and its count of changes."""
    with unseen():
        return tensor.detach()


def let_go_of(alias: torch.Tensor) -> None:
    """Let an alias of a tensor, which shares its count of changes in place, hold no memory."""
    kind = alias.dtype, alias.device
    if kind not in _empty:
        with unseen():  # by the tape of a block that is running
            _empty[kind] = torch.empty(0, dtype=kind[0], device=kind[1])
    alias.data = _empty[kind]
