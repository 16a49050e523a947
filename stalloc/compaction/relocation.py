"""Moving torch's storages into fresh buffers, together, and letting go of the old memory.

Contract: a storage either holds its bytes in the new place or is untouched. The device is idle when bytes move: all
streams are waited for before and after, so no kernel reads a block that is going away, and none reads the new one too
early. Where there is no room for the new place beside the old one, the bytes wait in host memory meanwhile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.compaction.execution import Copy
from stalloc.compaction.torch_storages import Candidate, empty_storage, exchange, remember_arena, slice_storage


def packed(sizes: Sequence[int], alignment: int) -> tuple[Column, int]:
    """Offsets of blocks one behind the other, (n,), and the bytes that they take."""
    size = np.array(sizes, np.int64)
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
    offset, total = packed([member.size_bytes for member in group], alignment)
    total = max(total, least_bytes)
    if through_host:
        return _through_host(group, offset, total, unwanted)
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


def _through_host(group: Sequence[Candidate], offset: Column, total: int, unwanted: Callable[[int], bool]) -> Any:
    """As `move_together`, with the bytes in host memory meanwhile: all old memory is freed before new is asked for."""
    device = group[0].storage.device
    wait_for(device)
    host = read_to_host([member.storage for member in group], offset, total)
    free_memory(group)
    release(device)
    return write_from_host(group, host, offset, unwanted)


def read_to_host(storages: Sequence[Any], offset: Column, total: int) -> Any:
    """The bytes of storages of one device in host memory, at these offsets of a uint8 tensor."""
    import torch

    host = torch.empty(total, dtype=torch.uint8)
    for storage, at in zip(storages, offset.tolist(), strict=True):
        host[at : at + storage.nbytes()].copy_(_bytes(storage))
    wait_for(storages[0].device)
    return host


def free_memory(group: Sequence[Candidate]) -> None:
    """Let go of the memory of storages; nothing may read them until they have other memory."""
    for member in group:
        exchange(member.storage, empty_storage(member.size_bytes, member.storage.device))


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
    made, anywhere = None, lambda address: False
    for nth in sorted(range(len(group)), key=lambda nth: -group[nth].size_bytes):
        low = int(offset[nth])
        made = write_from_host([group[nth]], host[low : low + group[nth].size_bytes], np.zeros(1, np.int64), anywhere)
    return made


def _bytes(storage: Any) -> Any:
    """A storage's memory as a uint8 tensor."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release(device: Any) -> None:
    """Give free segments back to the device, where stalloc serves it."""
    from stalloc.runtime import current

    runtime = current()
    if runtime is not None and device.type == "cuda":
        runtime.controllers[device.index].memory.release_unused()


def copy_for(device: Any) -> Copy:
    """The kernel on a GPU, the reference in host memory."""
    from stalloc import kernels

    if device.type == "cpu":
        return kernels.host_copy
    return lambda source, target, size: kernels.batched_copy(source, target, size, check=False)
