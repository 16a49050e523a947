"""torch's storages: which may move, and moving them together, so that every view and alias follows.

Contract: a storage that moved holds the same bytes at another address, owns its new memory and no longer its old one;
every tensor on it, whoever holds it, reads the new place, since torch computes addresses from the storage each time.
The device is idle when bytes move: all streams are waited for before and after, so no kernel reads a block that is
going away, and none reads the new one too early. Where there is no room for the new place beside the old one, the bytes
wait in host memory meanwhile.

torch has no function for this. A storage keeps its memory in three words, the address, the deleter and what the
deleter is given; exchanging them between two storages of one device and size exchanges their memory, ownership
included. Where these words lie is looked for once a process and proven on two storages of our own; where that fails
nothing is ever moved.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.compaction.schedule import Copy, batched
from stalloc.errors import BadInputError, SetupError

_WORDS = 8  # of a storage that are looked at


@dataclass(frozen=True, eq=False)
class Candidate:
    """One storage that was found, and why it has to stay, if it has to."""

    storage: Any
    address: int
    size_bytes: int
    reason: str  #: empty: it may move


def _read(storage: Any, word: int) -> int:
    return ctypes.c_uint64.from_address(storage._cdata + 8 * word).value


def _write(storage: Any, word: int, value: int) -> None:
    ctypes.c_uint64.from_address(storage._cdata + 8 * word).value = value


@cache
def _place() -> int:
    """The first of the three words. Raises SetupError where this torch keeps them otherwise."""
    import torch

    a, b = (torch.full((256,), value, dtype=torch.uint8) for value in (1, 2))
    alias = a[7:]
    pair = a.untyped_storage(), b.untyped_storage()
    place = next((i for i in range(_WORDS) if all(_read(s, i) == s.data_ptr() for s in pair)), None)
    # the deleter of both is the same function, and what it is given is the address
    if place is not None and all(_read(s, place + 2) == s.data_ptr() for s in pair):
        before = a.data_ptr(), b.data_ptr()
        if _read(pair[0], place + 1) == _read(pair[1], place + 1) != 0:
            _exchange(*pair, place)
            after = b.data_ptr(), a.data_ptr()
            fine = before == after and int(alias[0]) == 2 and int(b[0]) == 1
            if fine:
                return place
            _exchange(*pair, place)
    raise SetupError(
        f"torch {torch.__version__} keeps its storages in a way that stalloc does not know: nothing can be moved; "
        "use the torch versions that stalloc is tested with."
    )


def _exchange(a: Any, b: Any, place: int) -> None:
    for word in range(place, place + 3):
        one, other = _read(a, word), _read(b, word)
        _write(a, word, other)
        _write(b, word, one)


def exchange(a: Any, b: Any) -> None:
    """Let two storages of one device and one size in bytes swap their memory.

    Raises BadInputError if they differ in either, SetupError on a torch whose storages are not understood.
    """
    if a.device != b.device or a.nbytes() != b.nbytes():
        raise BadInputError(
            f"a storage of {a.nbytes()} bytes on {a.device} cannot take the memory of one of {b.nbytes()} bytes "
            f"on {b.device}."
        )
    _exchange(a, b, _place())


def borrowed_storage(address: int, size_bytes: int, device: Any) -> Any:
    """A storage on memory that it does not own, and that has to stay as long as it is read."""
    import torch

    return torch._C._construct_storage_from_data_pointer(address, device, size_bytes)


def slice_storage(arena: Any, offset_bytes: int, size_bytes: int) -> Any:
    """A storage of its own on part of a uint8 tensor, whose memory it keeps alive."""
    from torch.utils.dlpack import from_dlpack, to_dlpack

    return from_dlpack(to_dlpack(arena[offset_bytes : offset_bytes + size_bytes])).untyped_storage()


@dataclass(frozen=True, eq=False)
class _Arena:
    """A buffer that storages were moved into."""

    device: Any
    low: int  #: address
    high: int
    alive: Any  #: a weak reference to its storage, which the slices keep alive
    others: int  #: references to it besides those of the slices, as torch made them


_arenas: list[_Arena] = []


def remember_arena(arena: Any, num_slices: int) -> None:
    """So many storages on slices of this uint8 tensor may be moved again, as long as it lives."""
    from torch.multiprocessing.reductions import StorageWeakRef

    _arenas[:] = [known for known in _arenas if not known.alive.expired()]
    low, storage = arena.data_ptr(), arena.untyped_storage()
    alive, num_bytes = StorageWeakRef(storage), storage.nbytes()
    del storage
    _arenas.append(_Arena(arena.device, low, low + num_bytes, alive, _num_references(alive) - num_slices))


def _num_references(alive: Any) -> int:
    import torch

    return int(torch._C._storage_Use_Count(alive.cdata))


def _arena_at(address: int, device: Any) -> _Arena | None:
    """The buffer moved into that is alive and holds an address."""
    inside = (one for one in _arenas if one.device == device and one.low <= address < one.high)
    return next((one for one in inside if not one.alive.expired()), None)


def num_slices(address: int, device: Any) -> int | None:
    """How many storages keep the buffer alive that begins at an address; None if none of those moved into does."""
    arena = _arena_at(address, device)
    return _num_references(arena.alive) - arena.others if arena is not None and arena.low == address else None


def tensors_of(*objects: Any, gradients: bool = True) -> Iterator[Any]:
    """Tensors of modules (parameters, buffers), optimizers (state), tensors and containers of these, with gradients."""
    import torch

    for thing in objects:
        if isinstance(thing, torch.Tensor):
            yield getattr(thing, "_local_tensor", thing)  # of a distributed tensor, this rank's part
            own = torch._C.TensorBase.grad.__get__(thing) if gradients and thing.is_leaf else None  # a look brings none
            if own is not None:
                yield own
        elif isinstance(thing, torch.nn.Module):
            yield from tensors_of(*thing.parameters(), *thing.buffers(), gradients=gradients)
        elif isinstance(thing, torch.optim.Optimizer):
            groups = [group["params"] for group in thing.param_groups]
            yield from tensors_of(groups, thing.state, gradients=gradients)
        elif isinstance(thing, Mapping):
            yield from tensors_of(*thing.keys(), *thing.values(), gradients=gradients)
        elif isinstance(thing, Iterable) and not isinstance(thing, (str, bytes)):
            yield from tensors_of(*thing, gradients=gradients)


def candidates(tensors: Iterable[Any], exclude: Iterable[Any] = ()) -> list[Candidate]:
    """The distinct storages of some tensors, each with the reason why it must not move, if there is one.

    What cannot be told from a storage (an address that a library, a kernel of the user or a CUDA graph remembers) has
    to be named in `exclude`.
    """
    barred = {tensor.untyped_storage()._cdata for tensor in exclude}
    found: dict[int, Candidate] = {}
    for tensor in tensors:
        if not _has_memory(tensor):
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in found and storage.nbytes():
            reason = "excluded by the caller" if storage._cdata in barred else _reason(tensor, storage)
            found[storage._cdata] = Candidate(storage, storage.data_ptr(), storage.nbytes(), reason)
    return list(found.values())


def _has_memory(tensor: Any) -> bool:
    """Whether a tensor has bytes of its own: no meta tensor, none of a sparse or quantised kind, no wrapper."""
    import torch

    plain = tensor.layout is torch.strided and not tensor.is_meta
    return plain and type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@cache
def _own_deleter(device: Any) -> int:
    """The deleter of torch's allocator on a device; an empty tensor has it and takes no memory."""
    import torch

    return _read(torch.empty(0, dtype=torch.uint8, device=device).untyped_storage(), _place() + 1)


def _reason(tensor: Any, storage: Any) -> str:
    address = storage.data_ptr()
    if address == 0:
        return "it has no memory"
    if tensor.device.type == "cpu" and tensor.is_pinned():
        return "its memory is pinned"
    if tensor.device.type == "cpu" and storage.is_shared():
        return "its memory is shared with other processes"
    if _read(storage, _place() + 1) != _own_deleter(tensor.device) and _arena_at(address, tensor.device) is None:
        return "its memory belongs to another library"
    return ""


def packed(group: Sequence[Candidate], alignment: int) -> tuple[Column, int]:
    """Offsets of storages one behind the other, (n,), and the bytes that they take."""
    size = np.array([member.size_bytes for member in group], np.int64)
    rounded = -(-size // alignment) * alignment
    return np.cumsum(rounded) - rounded, int(rounded.sum())


def wait_for(device: Any) -> None:
    """Wait until a device has done all that it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def move_together(
    group: Sequence[Candidate],
    *,
    alignment: int,
    copy: Copy | None,
    through_host: bool = False,
    least_bytes: int = 0,
    unwanted: Callable[[int], bool] = lambda address: False,
) -> Any:
    """Move storages of one device into one new buffer, a uint8 tensor, which is returned; each keeps it alive.

    The buffer has `least_bytes` at least and does not begin at an `unwanted` address. `through_host`: let go of the old
    memory first. Raises torch's out-of-memory error if there is no room, in which case nothing moved.
    """
    import torch

    device = group[0].storage.device
    offset, total = packed(group, alignment)
    total = max(total, least_bytes)
    if through_host:  # all old memory is freed before new is asked for
        host = read_to_host([member.storage for member in group], offset, total)
        free_memory(group)
        release(device)
        return write_from_host(group, host, offset, unwanted)
    arena = new_buffer(total, device, unwanted)
    wait_for(device)
    source = np.array([member.address for member in group], np.int64)
    size = np.array([member.size_bytes for member in group], np.int64)
    target = arena.data_ptr() + offset
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        (copy or copy_for(device))(source, target, size)
    wait_for(device)
    point_into(group, arena, offset)
    return arena


def new_buffer(total: int, device: Any, unwanted: Callable[[int], bool]) -> Any:
    """A new uint8 tensor, not in a place that is to be emptied: those that are offered are held until one is not."""
    import torch

    held = []
    while True:
        buffer = torch.empty(total, dtype=torch.uint8, device=device)
        if not unwanted(buffer.data_ptr()):
            return buffer
        held.append(buffer)


def point_into(group: Sequence[Candidate], arena: Any, offset: Column) -> None:
    """Give each storage its part of a buffer; their old memory goes with the storages that had the parts."""
    for member, at in zip(group, offset.tolist(), strict=True):
        exchange(member.storage, slice_storage(arena, at, member.size_bytes))
    remember_arena(arena, len(group))


def read_to_host(storages: Sequence[Any], offset: Column, total: int) -> Any:
    """The bytes of storages of one device in host memory, at these offsets of a uint8 tensor."""
    import torch

    device, host = storages[0].device, torch.empty(total, dtype=torch.uint8)
    wait_for(device)
    for storage, at in zip(storages, offset.tolist(), strict=True):
        host[at : at + storage.nbytes()].copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
    wait_for(device)
    return host


def free_memory(group: Sequence[Candidate]) -> None:
    """Let go of the memory of storages; nothing may read them until they have other memory."""
    for member in group:
        exchange(member.storage, borrowed_storage(0, member.size_bytes, member.storage.device))


def write_from_host(group: Sequence[Candidate], host: Any, offset: Column, unwanted: Callable[[int], bool]) -> Any:
    """Give storages without memory a new buffer with bytes that wait in host memory; where there is none, one each.

    That buffer is returned, or the last.
    """
    import torch

    device = group[0].storage.device
    try:
        arena = new_buffer(len(host), device, unwanted)
    except torch.OutOfMemoryError:
        if len(group) > 1:  # somebody else was quicker, but each of the places that became free is large enough for one
            return write_one_by_one(group, host, offset)
        arena = torch.empty(len(host), dtype=torch.uint8, device=device)  # anywhere is better than nowhere
    arena.copy_(host)
    wait_for(device)
    point_into(group, arena, offset)
    return arena


def write_one_by_one(group: Sequence[Candidate], host: Any, offset: Column) -> Any:
    """As `write_from_host`, with a buffer for each storage, the largest first; the last one is returned."""
    made, start = None, np.zeros(1, np.int64)
    for member, low in sorted(zip(group, offset.tolist(), strict=True), key=lambda pair: -pair[0].size_bytes):
        made = write_from_host([member], host[low : low + member.size_bytes], start, lambda address: False)
    return made


def release(device: Any) -> None:
    """Give free segments back to the device, where stalloc serves it."""
    from stalloc.runtime import current

    runtime = current()
    if runtime is not None and device.type == "cuda":
        runtime.controllers[device.index].memory.release_unused()


def copy_for(device: Any) -> Copy:
    """The kernel on a GPU, the reference in host memory."""
    from stalloc import kernels

    return kernels.host_copy if device.type == "cpu" else batched
