"""The bytes of memory that is given back for a while: in the host, in a file, or nowhere.

Contract: `keep` has all bytes or raises SetupError, and what it could not keep takes no room; `bring_back` writes them
to the same addresses. A file has no name any more once it is open, so that nobody reads it and nothing of it is left.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stalloc.device.pinned_memory import pinned_memory
from stalloc.errors import SetupError
from stalloc.figures import human_bytes

_CHUNK_BYTES = 64 << 20  # that go through pinned memory at once, to a file and back
Runs = Sequence[tuple[int, int]]
"""Addresses and bytes of memory."""


class Keeper(Protocol):
    """Somewhere to keep bytes. The device is current."""

    @property
    def drops(self) -> bool:
        """Whether nothing is kept."""

    def keep(self, runs: Runs) -> None:
        """Copy them. Raises SetupError if there is no room."""

    def bring_back(self, runs: Runs) -> None:
        """Copy some of them back, in the same order."""


class Nowhere:
    """Nothing is kept: what comes back has no values."""

    drops = True

    def keep(self, runs: Runs) -> None:
        """See `Keeper`."""

    def bring_back(self, runs: Runs) -> None:
        """See `Keeper`."""


class InHost:
    """Pinned host memory, as much as is needed."""

    drops = False

    def __init__(self) -> None:
        self._memory: Any = None
        self._places: dict[int, int] = {}

    def keep(self, runs: Runs) -> None:
        """See `Keeper`."""
        total = sum(size for _, size in runs)
        self._memory = _pinned(total)
        at = 0
        for address, size in runs:
            self._places[address] = at
            _copy(self._memory.ptr + at, address, size, to_host=True)
            at += size

    def bring_back(self, runs: Runs) -> None:
        """See `Keeper`."""
        for address, size in runs:
            _copy(address, self._memory.ptr + self._places[address], size, to_host=False)


class InFile:
    """A file in a folder."""

    drops = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._places: dict[int, int] = {}

    def keep(self, runs: Runs) -> None:
        """See `Keeper`."""
        total = sum(size for _, size in runs)
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  (as long as the sleep)
            if total:
                os.posix_fallocate(self._file.fileno(), 0, total)
            staging = _pinned(min(total, _CHUNK_BYTES))
            at = 0
            for address, size in runs:
                self._places[address] = at
                for begin, count in _chunks(size):
                    _copy(staging.ptr, address + begin, count, to_host=True)
                    _write(self._file.fileno(), _view(staging, count), at + begin)
                at += size
        except OSError as error:
            self._file = None
            raise SetupError(
                f"{human_bytes(total)} cannot be kept in {self._folder} ({error.strerror}): name a folder with room."
            ) from error

    def bring_back(self, runs: Runs) -> None:
        """See `Keeper`."""
        staging = _pinned(min(sum(size for _, size in runs), _CHUNK_BYTES))
        for address, size in runs:
            for begin, count in _chunks(size):
                view = _view(staging, count)
                if _read(self._file.fileno(), view, self._places[address] + begin) != count:
                    raise SetupError(f"the file of a job that sleeps in {self._folder} was cut: its memory is lost.")
                _copy(address + begin, staging.ptr, count, to_host=False)


def _chunks(size: int) -> list[tuple[int, int]]:
    return [(begin, min(_CHUNK_BYTES, size - begin)) for begin in range(0, size, _CHUNK_BYTES)]


def _write(file: int, view: Any, at: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], at + done)


def _read(file: int, view: Any, at: int) -> int:
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], at + done)
        if not count:
            break
        done += count
    return done


def _view(memory: Any, count: int) -> Any:
    return np.frombuffer(memory, np.uint8, count).data


def _pinned(size_bytes: int) -> Any:
    """Raises SetupError where the host has no more."""
    try:
        return pinned_memory(max(size_bytes, 1))
    except MemoryError as error:
        raise SetupError(
            f"the host has no {human_bytes(size_bytes)} of memory to be pinned: sleep with to='disk', or 'drop'."
        ) from error


def _copy(target: int, source: int, size_bytes: int, *, to_host: bool) -> None:
    from cupy.cuda import runtime

    kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
    runtime.memcpy(target, source, size_bytes, kind)
