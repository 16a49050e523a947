"""The memory of tensors: which it is, how often it was changed, and what autograd holds while somebody else keeps it.

Contract: storages are told apart by a number that is theirs as long as they live. A tensor that was changed in place
after it was saved is an error when backward asks for it, as it is without hooks, for which autograd does not look
itself. Parameters and their views, and small, sparse and odd kinds of tensors are held as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from stalloc.cost.disjoint_sets import LEAST_BYTES
from stalloc.errors import OffloadError
from stalloc.sizes import aligned

unseen = torch._C._DisableTorchDispatch
"""A context for operations of stalloc's own, which no mode of the program or of stalloc is to see."""
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # most of what operators are given


def storages_of(values: Any) -> set[int]:
    """Numbers for the memory of all tensors in nested containers; a tensor not in one piece of memory has none."""
    return {storage for one in tensors_of(values) if (storage := storage_of(one))}


def versions_of(values: Any) -> list[tuple[int, int]]:
    """The memory, as a number, of all tensors in lists and dictionaries, and how often autograd saw each changed."""
    return [(storage_of(one), -1 if one.is_inference() else one._version) for one in tensors_of(values)]


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor; 0 for one that is not in one piece of memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a sparse one
        return 0


def tensors_of(values: Any) -> list[Any]:
    """All tensors in lists and dictionaries, in one order for each structure."""
    found: list[Any] = []
    rest = [values]
    for value in rest:  # which grows meanwhile
        if type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):  # asking for a union of types takes four times as long
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
    return found


def sizes_of(values: Any) -> dict[int, int]:
    """The bytes of the memory of all tensors, by the numbers of `storages_of`."""
    return {
        one.untyped_storage()._cdata: aligned(one.untyped_storage().nbytes())
        for one in tree_leaves(values)
        if isinstance(one, torch.Tensor) and one.layout == torch.strided
    }


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor lie in its storage as they are."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def may_be_kept_elsewhere(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether the memory of a tensor that is being saved is worth being kept elsewhere, and may be."""
    if type(tensor) is not torch.Tensor or tensor.device.type != device_type or tensor.is_nested:
        return False
    owner = tensor if tensor._base is None else tensor._base
    if not is_plain(tensor) or isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad):
        return False
    if tensor.untyped_storage().nbytes() < LEAST_BYTES or torch._C._current_graph_task_id() != -1:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class PackingContext:
    """A context, which may be entered often: autograd holds what `pack` makes of what is saved in it."""

    def __init__(self) -> None:
        self._entered: list[saved_tensors_hooks] = []

    def pack(self, tensor: torch.Tensor) -> "PackedTensor":
        """What autograd is to hold of a tensor."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        self._entered.append(saved_tensors_hooks(self.pack, PackedTensor.unpacked))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.pop().__exit__()


class PackedTensor:
    """A saved tensor. `_alias` shares its count of changes; its memory is a keeper's, or (None) the alias's own. A
    keeper that gives the `alias` itself lets it have the memory, until that is somewhere else (`let_go_of`). `bring`
    gives its memory on the device, when backward asks for it."""

    __slots__ = ("_alias", "_bring", "_layout", "_version", "memory")

    def __init__(
        self,
        bring: Callable[[Any], torch.UntypedStorage],
        memory: Any,
        tensor: torch.Tensor,
        alias: torch.Tensor | None = None,
    ) -> None:
        self._bring, self.memory, self._version = bring, memory, tensor._version
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        if alias is not None:
            self._alias = alias
        elif memory is not None:
            self._alias = alias_of(tensor)
            let_go_of(self._alias)
        else:
            self._alias = tensor if tensor.is_leaf else tensor.detach()  # a result itself would hold what made it

    def unpacked(self) -> torch.Tensor:
        if self._alias._version != self._version:
            raise OffloadError(
                f"a tensor of shape {tuple(self._layout[1])} that backward needs was changed in place after it was "
                "saved: its gradients would be wrong. Do not change it before backward."
            )
        if self.memory is None:
            return self._alias
        storage = self._bring(self.memory)
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
