"""The kernels' references: the same functions in numpy on host memory and in plain torch on any device.

Contract: block after block in the order of the table, no vector paths, no work list; whatever a kernel does is right
if and only if the memory afterwards is what these leave. They share no code with the kernels but the checks of the
tables. A pattern begins anew at the start of every block.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .block_columns import Column, columns, pattern_bytes


def host_copy(source: ArrayLike, target: ArrayLike, size: ArrayLike) -> None:
    """Copy n blocks of host memory, one after the other: (n,) addresses and bytes. Each may overlap itself."""
    for a, b, count in zip(*(column.tolist() for column in columns(source, target, size)), strict=True):
        ctypes.memmove(b, a, count)


def host_fill(target: ArrayLike, size: ArrayLike, value: int | bytes = 0) -> None:
    """Fill n blocks of host memory, (n,) addresses and bytes, with a byte or a pattern."""
    pattern = pattern_bytes(value)
    for address, count in zip(*(column.tolist() for column in columns(target, size)), strict=True):
        _host(address, count)[:] = _repeated(pattern, count)


def host_copy_fill(source: ArrayLike, target: ArrayLike, size: ArrayLike, value: int | bytes = 0) -> None:
    """Copy n blocks of host memory, then fill their sources. Sources and targets must not overlap."""
    host_copy(source, target, size)
    host_fill(source, size, value)


def host_mismatches(address: ArrayLike, size: ArrayLike, value: int | bytes = 0) -> Column:
    """How many bytes of each of n blocks of host memory differ from the pattern: (n,)."""
    pattern = pattern_bytes(value)
    pairs = zip(np.asarray(address).tolist(), np.asarray(size).tolist(), strict=True)
    counts = [int(np.count_nonzero(_host(a, count) != _repeated(pattern, count))) if count else 0 for a, count in pairs]
    return np.array(counts, np.int64)


def torch_copy(source: ArrayLike, target: ArrayLike, size: ArrayLike, device: Any = "cuda") -> None:
    """Copy n blocks of a torch device's memory on its current stream: (n,) addresses and bytes."""
    for a, b, count in zip(*(column.tolist() for column in columns(source, target, size)), strict=True):
        _tensor(b, count, device).copy_(_tensor(a, count, device))


def torch_fill(target: ArrayLike, size: ArrayLike, value: int | bytes = 0, device: Any = "cuda") -> None:
    """Fill n blocks of a torch device's memory, (n,) addresses and bytes, with a byte or a pattern."""
    for address, count in zip(*(column.tolist() for column in columns(target, size)), strict=True):
        _tensor(address, count, device).copy_(_torch_pattern(value, count, device))


def torch_copy_fill(
    source: ArrayLike, target: ArrayLike, size: ArrayLike, value: int | bytes = 0, device: Any = "cuda"
) -> None:
    """Copy n blocks of a torch device's memory, then fill their sources."""
    torch_copy(source, target, size, device)
    torch_fill(source, size, value, device)


def torch_mismatches(address: ArrayLike, size: ArrayLike, value: int | bytes = 0, device: Any = "cuda") -> Column:
    """How many bytes of each of n blocks of a torch device's memory differ from the pattern: (n,)."""
    counts = []
    for a, count in zip(np.asarray(address).tolist(), np.asarray(size).tolist(), strict=True):
        different = 0
        if count:
            different = int((_tensor(a, count, device) != _torch_pattern(value, count, device)).sum())
        counts.append(different)
    return np.array(counts, np.int64)


def _host(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def _repeated(pattern: bytes, count: int) -> np.ndarray:
    unit = np.frombuffer(pattern, np.uint8)
    if (unit == unit[0]).all():
        return np.broadcast_to(unit[0], count)  # large ranges of one byte need no second buffer of their size
    return np.resize(unit, count)


def _tensor(address: int, count: int, device: Any) -> Any:
    """`count` bytes at an address as a tensor that owns nothing."""
    import torch

    place = torch.device(device)
    if place.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
    if place.index is None:
        place = torch.device(place.type, torch.cuda.current_device())
    storage = torch._C._construct_storage_from_data_pointer(address, place, count)
    return torch.empty(0, dtype=torch.uint8, device=place).set_(storage)


def _torch_pattern(value: int | bytes, count: int, device: Any) -> Any:
    import torch

    one = torch.frombuffer(bytearray(pattern_bytes(value)), dtype=torch.uint8).to(device)
    return one.repeat(-(-count // len(one)))[:count]
