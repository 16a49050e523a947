"""Logs of the DTR simulator (Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021): one JSON object a line.

A storage lives from its first tensor to the release of its last alias; that is a request. `CONSTANT` and an `ALIAS` of
-1 begin a storage, any other `ALIAS` and `COPY` add a tensor to one, `RELEASE` removes one, `COPY_FROM` moves one to
another storage, `MUTATE` writes in place.
Storages of zero bytes are left out. The log has operators and no allocator: no addresses, no streams, one device.
"""

import io
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalloc.errors import BadInputError
from stalloc.trace.record import MARK_PHASE_BEGIN, MARK_PHASE_END, Action, Trace
from stalloc.trace.sources.events import MAX_SIZE_BYTES, Mark, make_trace
from stalloc.trace.sources.json_text import decode

WRITE_AGAIN = "write the log again"


def looks_like_dtr_log(head: bytes) -> bool:
    """Whether a file begins as such a log does."""
    return head.startswith(b"{") and b'"INSTRUCTION"' in head.splitlines()[0]


def follow_log(path: Path, data: bytes, follow: Callable[[dict[str, Any]], None]) -> None:
    """Hand over the instructions of a log, one after the other.

    Raises BadInputError naming a line that is cut short, or for which `follow` raises a LookupError, TypeError,
    ValueError or OverflowError.
    """
    for number, line in enumerate(io.BytesIO(data), start=1):
        if not line.strip():
            continue
        entry = decode(path, line, f"line {number}")
        try:
            follow(entry)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise BadInputError(
                f"{path}: line {number} is no instruction that fits the ones before it "
                f"({type(error).__name__}: {str(error)[:60]}): {WRITE_AGAIN}."
            ) from error


def read_dtr_log(path: Path, data: bytes) -> Trace:
    """The storages of a log as the trace of device 0; annotations become phases, each until the next one.

    Raises BadInputError naming the line that is cut short, or that names a tensor which is not there.
    """
    storages = _Storages()
    follow_log(path, data, storages.follow)
    return make_trace(
        path,
        "dtr log",
        action=storages.action,
        identity=storages.identity,
        size=storages.size,
        marks=storages.marks,
        notes=["lifespans are of logical storages: the log has no addresses and no streams"],
    )


class _Storages:
    """Which storage each tensor lies in, and how many tensors each storage has."""

    def __init__(self) -> None:
        self.action, self.identity, self.size = array("b"), array("Q"), array("q")
        self.marks: list[Mark] = []
        self._storage: dict[str, int] = {}
        self._num_tensors: list[int] = []
        self._num_bytes: list[int] = []
        self._constants: set[str] = set()
        self._told_bytes: dict[str, int] = {}  # of tensors whose storage is not known yet
        self._arguments: list[Any] = []

    def follow(self, entry: dict[str, Any]) -> None:
        instruction = entry["INSTRUCTION"]
        if instruction == "CONSTANT":
            self._constants.add(str(entry["NAME"]))
        elif instruction == "CALL":
            self._arguments = list(entry["ARGS"])
        elif instruction == "MEMORY":
            name = str(entry["NAME"])
            self._told_bytes[name] = int(entry["MEMORY"])
            if name in self._constants:
                self._constants.discard(name)
                self._begin(name)
        elif instruction == "ALIAS":
            name, argument = str(entry["NAME"]), int(entry["ALIAS"])
            if argument < 0:
                self._begin(name)
            else:
                self._told_bytes.pop(name, None)
                self._join(name, str(self._arguments[argument]))
        elif instruction == "COPY":
            self._join(str(entry["DST"]), str(entry["SRC"]))
        elif instruction == "COPY_FROM":
            self._move(str(entry["DST"]), str(entry["SRC"]))
        elif instruction == "RELEASE":
            self._release(str(entry["NAME"]))
        elif instruction == "ANNOTATE":
            name = str(entry["ANNOTATION"]).lower()
            self.marks += [(len(self.action), MARK_PHASE_END, self.marks[-1][2])] if self.marks else []
            self.marks.append((len(self.action), MARK_PHASE_BEGIN, name))
        elif instruction != "MUTATE":
            raise ValueError(f"unknown instruction {str(instruction)[:30]!r}")

    def _begin(self, name: str) -> None:
        num_bytes = self._told_bytes.pop(name)
        if not 0 <= num_bytes <= MAX_SIZE_BYTES:
            raise ValueError(f"a storage of {num_bytes} bytes")
        self._put(name, len(self._num_bytes))
        self._num_tensors.append(1)
        self._num_bytes.append(num_bytes)
        self._event(Action.ALLOC, len(self._num_bytes) - 1)

    def _join(self, name: str, other: str) -> None:
        storage = self._storage[other]
        self._put(name, storage)
        self._num_tensors[storage] += 1

    def _move(self, name: str, other: str) -> None:
        """A tensor stands for another one's storage from now on."""
        storage = self._storage[other]
        self._num_tensors[storage] += 1
        if name in self._storage:
            self._release(name)
        self._put(name, storage)

    def _put(self, name: str, storage: int) -> None:
        if name in self._storage:
            raise ValueError(f"tensor {name[:30]} is there already")
        self._storage[name] = storage

    def _release(self, name: str) -> None:
        storage = self._storage.pop(name)
        self._num_tensors[storage] -= 1
        if self._num_tensors[storage] == 0:
            self._event(Action.FREE_COMPLETED, storage)

    def _event(self, action: Action, storage: int) -> None:
        if self._num_bytes[storage]:
            self.action.append(action)
            self.identity.append(storage)
            self.size.append(self._num_bytes[storage])
