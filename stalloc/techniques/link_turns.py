"""Turns on a host link that several processes share: one of them copies at a time, each way, and the others wait.

Contract: a turn is a lock of a byte of a file, which the kernel takes back when its process ends, however it ends. Who
has had a turn comes after one that waits for it. No wait lasts longer than `patience_seconds`: then the copy is made
beside whoever has the turn, and until a turn is free again nobody is waited for, so a process that hangs costs time
once. Nothing that is computed depends on turns.
Source of what they are for: as in `stalloc.cost.disjoint_sets`.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stalloc.errors import BadInputError
from stalloc.notices import say

_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two looks


@dataclass(frozen=True)
class SharedLink:
    """A link to the host that `num_ranks` processes of one machine share, each with a number from 0."""

    file: str | os.PathLike[str]  #: the same file for all processes; made if it does not exist, and left there
    rank: int = 0
    num_ranks: int = 1
    patience_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Raises BadInputError for impossible numbers."""
        if not 0 <= self.rank < self.num_ranks:
            raise BadInputError(
                f"rank {self.rank} of {self.num_ranks} is not possible: give 0 to {self.num_ranks - 1}."
            )
        if not 0 <= self.patience_seconds < float("inf"):
            raise BadInputError(f"a wait of {self.patience_seconds:g} seconds is not possible: give 0 or more.")


class LinkTurns:
    """The turns of this process, one queue for each way of the link; its threads take turns too. Two bytes of the file
    are locked for each way: one by the next in line, one by whoever has the turn."""

    def __init__(self, link: SharedLink) -> None:
        """Raises BadInputError if the file cannot be used."""
        self.num_without = 0  #: copies that were made without a turn
        self._path, self._patience_seconds = Path(link.file), link.patience_seconds
        self._descriptor, self._threads = _opened(self._path)
        self._has_given_up = [False, False]

    @contextmanager
    def turn(self, *, to_device: bool) -> Iterator[None]:
        """A context that has the turn of one way, or goes without if the turn does not come in time."""
        patience = 0.0 if self._has_given_up[to_device] else self._patience_seconds
        has_turn = self._lock(to_device, time.monotonic() + patience)
        self.num_without += not has_turn
        if not has_turn and not self._has_given_up[to_device]:
            say(
                f"a copy has waited {patience:g} s for its turn on {self._path}: copies are made without one until "
                "there is one again."
            )
        self._has_given_up[to_device] = not has_turn
        try:
            yield
        finally:
            if has_turn:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 2 * to_device + 1)
                self._threads[to_device].release()

    def _lock(self, way: bool, deadline: float) -> bool:
        """Wait for this thread's turn until a moment of the monotonic clock, trying at least once; whether it came."""
        threads = self._threads[way]
        if not threads.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        has_turn = False
        if self._wait_for(2 * way, deadline):
            has_turn = self._wait_for(2 * way + 1, deadline)
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 2 * way)
        if not has_turn:
            threads.release()
        return has_turn

    def _wait_for(self, byte: int, deadline: float) -> bool:
        pause = _FIRST_PAUSE
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                return True
            except OSError:  # somebody else has it
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)


_Opened = tuple[int, tuple[threading.Lock, threading.Lock]]
_files: dict[tuple[int, int], _Opened] = {}
"""By device and number of the file: its descriptor, and a lock for this process's threads each way. Locks of a file are
the process's own (fcntl), not the descriptor's: a forked child has none of them, and keeps none alive. They go when any
descriptor of the file is closed, so there is one for all of the process, and it stays open."""
_opening = threading.Lock()


def _opened(path: Path) -> _Opened:
    with _opening:
        try:
            told = os.stat(path) if path.exists() else None
            if told is not None and (told.st_dev, told.st_ino) in _files:
                return _files[told.st_dev, told.st_ino]
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BadInputError(
                f"{path} cannot be locked ({error.strerror}): name a file that can be written."
            ) from None
        told = os.fstat(descriptor)
        return _files.setdefault((told.st_dev, told.st_ino), (descriptor, (threading.Lock(), threading.Lock())))
