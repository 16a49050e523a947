"""One launch for thousands of blocks: copy, fill, copy-and-fill, check, on torch's current device and stream.

Contract: a call returns once the launch is queued; later work of that stream sees its result. Within one call no
target may share bytes with another target or with any source, since programs work in any order. In Triton's
interpreter (TRITON_INTERPRET=1) addresses are those of host memory and a call returns when all is done.
"""

import sys
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stalloc.errors import SetupError

from .block_columns import Column, check_disjoint, columns, pattern_bytes
from .configs import Config, config_for
from .driver_tables import Tables
from .worklist import work_table

MODES = {"copy": 0, "fill": 1, "copy-fill": 2, "check": 3}
_INTERPRETED = Config(tile_bytes=1 << 18, byte_tile=1 << 16, group_rows=16)  # few large steps: each costs Python
_INTERPRETED_PROGRAMS = 2


def batched_copy(
    source: ArrayLike, target: ArrayLike, size: ArrayLike, *, config: Config | None = None, check: bool = True
) -> None:
    """Copy n blocks of device memory: (n,) absolute addresses and bytes, any alignment, 0 bytes allowed.

    `check` False leaves out the proof that no target is shared, for callers that have it already.
    Raises BadInputError (columns that do not fit, shared bytes), SetupError (no Triton).
    """
    a, b, count = columns(source, target, size)
    if check:
        check_disjoint(a, b, count)
    _launch("copy", a, b, count, bytes(16), config)


def batched_fill(
    target: ArrayLike,
    size: ArrayLike,
    value: int | bytes = 0,
    *,
    config: Config | None = None,
    check: bool = True,
    tables: Tables | None = None,
) -> None:
    """Fill n blocks of device memory, (n,) absolute addresses and bytes, with a byte or a pattern.

    A pattern of 1, 2, 4, 8 or 16 bytes begins anew at the start of every block. `tables` as in `batched_mismatches`:
    the call then waits until all is filled. Raises as `batched_copy`.
    """
    address, count = columns(target, size)
    if check:
        check_disjoint(None, address, count)
    _launch("fill", None, address, count, pattern_bytes(value), config, tables)


def batched_copy_fill(
    source: ArrayLike,
    target: ArrayLike,
    size: ArrayLike,
    value: int | bytes = 0,
    *,
    config: Config | None = None,
    check: bool = True,
) -> None:
    """Copy n blocks and leave the pattern in their sources, which must not share bytes with each other either.

    (n,) absolute addresses and bytes; each byte is read once and both writes follow. Raises as `batched_copy`.
    """
    a, b, count = columns(source, target, size)
    if check:
        check_disjoint(None, np.concatenate([a, b]), np.concatenate([count, count]))
    _launch("copy-fill", a, b, count, pattern_bytes(value), config)


def batched_mismatches(
    address: ArrayLike,
    size: ArrayLike,
    value: int | bytes = 0,
    *,
    config: Config | None = None,
    tables: Tables | None = None,
) -> Column:
    """How many bytes of each of n blocks differ from the pattern, as (n,); waits for the result.

    `tables`: where the launch's tables go, for callers that torch's allocator must not be asked by.
    Raises BadInputError, SetupError as `batched_copy`.
    """
    sizes = np.asarray(size, np.int64)
    some = np.flatnonzero(sizes > 0)
    start, count = columns(address, size)
    counts = np.zeros(len(sizes), np.int64)
    if len(some) == 0:
        return counts
    place = _Place(tables)
    counters, base = place.upload(np.zeros(len(some), np.int64))
    shape = config or place.config
    words, programs = base + 8 * np.arange(len(some)), place.programs(shape)
    made = work_table(words, start, count, pattern_bytes(value), config=shape, num_programs=programs, counts=True)
    place.tell(start, count, writes=False)
    place.run("check", *made, shape)
    counts[some] = place.download(counters, base)
    return counts


class _Place:
    """Where a launch goes: torch's current device, or host memory in the interpreter."""

    def __init__(self, tables: Tables | None = None) -> None:
        try:
            from triton import knobs

            from . import triton_code
        except ImportError as error:
            raise SetupError(
                "Triton is not installed: pip install 'stalloc[triton]', or use the references."
            ) from error
        self._kernel = triton_code.batched
        self._torch: Any = None
        self._tables = tables
        if tables is not None:
            tables.begin()
        if knobs.runtime.interpret:
            self.config, self._num_sms = _INTERPRETED, 0
            return
        import torch

        self._torch = torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.config = config_for((properties.major, properties.minor))
        self._num_sms = properties.multi_processor_count

    def programs(self, config: Config) -> int:
        """Programs of the persistent grid."""
        return self._num_sms * config.programs_per_sm if self._num_sms else _INTERPRETED_PROGRAMS

    def upload(self, table: np.ndarray) -> tuple[Any, int]:
        """A table where the kernel can read it: what keeps it, and its address."""
        if self._torch is None:
            return table, table.ctypes.data
        if self._tables is not None:
            return table, self._tables.upload(table)
        # pageable memory: torch has read the table when it returns, and its allocator keeps the copy for the stream
        tensor = self._torch.from_numpy(table).to("cuda", non_blocking=True)
        return tensor, tensor.data_ptr()

    def download(self, kept: Any, address: int) -> np.ndarray:
        """A table back as an array; waits for the stream."""
        if self._torch is not None and self._tables is not None:
            self._tables.download(address, kept)
        return kept.cpu().numpy() if self._torch is not None and self._tables is None else kept

    def tell(self, address: Column, size: Column, *, writes: bool) -> None:
        """Tell the checker of the order of work, where the virtual GPU has one, what a launch is about to access."""
        virtual: Any = sys.modules.get("stalloc.device.virtual")
        checker = virtual.order_checker() if virtual is not None and self._torch is not None else None
        if checker is not None:
            stream = self._torch.cuda.current_stream()
            for at, num_bytes in zip(address.tolist(), size.tolist(), strict=True):
                checker.touch(stream.device_index, stream.cuda_stream, at, num_bytes, int(writes))

    def run(self, mode: str, table: np.ndarray, units: int, config: Config) -> None:
        """Queue one launch; wait for it where the next one may write over its tables."""
        kept, address = self.upload(table)
        self._kernel[(min(units, self.programs(config)),)](
            address,
            MODE=MODES[mode],
            TILE_BYTES=config.tile_bytes,
            BYTE_TILE=config.byte_tile,
            GROUP_ROWS=config.group_rows,
            num_warps=config.num_warps,
        )
        if self._torch is not None and self._tables is not None:
            self._torch.cuda.current_stream().synchronize()
        del kept


def _launch(
    mode: str,
    source: Column | None,
    target: Column,
    size: Column,
    pattern: bytes,
    config: Config | None,
    tables: Tables | None = None,
) -> None:
    if len(size) == 0:
        return
    place = _Place(tables)
    shape = config or place.config
    if source is not None:
        place.tell(source, size, writes=mode == "copy-fill")
    place.tell(target, size, writes=True)
    place.run(mode, *work_table(source, target, size, pattern, config=shape, num_programs=place.programs(shape)), shape)
