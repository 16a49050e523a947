"""NCCL's communicators on the virtual GPU: which a program made, and what it used each for (see virtual_nccl.c)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")  # as virtual_nccl.c numbers them
_MOST_NOTED, _MOST_PEERS = 1024, 1024


class _Noted(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rank", "num_ranks", "device", "group", "parent", "reserved")),
        ("num_calls", ctypes.c_uint64 * len(KINDS)),
        ("most_bytes", ctypes.c_uint64 * len(KINDS)),
        ("sends_to", ctypes.c_uint8 * _MOST_PEERS),
        ("receives_from", ctypes.c_uint8 * _MOST_PEERS),
    ]


@dataclass(frozen=True, kw_only=True)
class SeenCommunicator:
    """One communicator, and what this process did with it."""

    rank: int
    num_ranks: int
    device: int
    group: str | None
    """The name of its process group, where a rank of a dry run made it."""
    most_bytes: dict[str, int]
    """The largest call of each kind of collective that there was."""
    sends_to: tuple[int, ...]
    """Ranks of the communicator other than this one."""
    receives_from: tuple[int, ...]


class Communicators:
    """The communicators that this process makes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._groups: list[str] = []
        self.ranks: dict[str, list[int]] = {}
        """The ranks of each process group that was noted, in their order there."""
        self.backends: dict[str, str] = {}
        """The backend that each process group uses for GPUs: "nccl", "gloo"."""

    def note_group(self, group: str, ranks: Sequence[int], backend: str) -> None:
        """Remember a process group, which may be gone when the program ends."""
        self.ranks[group] = list(ranks)
        self.backends[group] = backend

    def next_is_of(self, group: str) -> None:
        """Say which process group the next ones belong to."""
        if group not in self._groups:
            self._groups.append(group)
        self._library.stalloc_virtual_group(self._groups.index(group))

    def seen(self) -> list[SeenCommunicator]:
        """Those that were made so far, in order."""
        pointers = (ctypes.POINTER(_Noted) * _MOST_NOTED)()
        num = self._library.stalloc_virtual_communicators(pointers, _MOST_NOTED)
        return [self._read(pointers[i].contents) for i in range(num)]

    def _read(self, noted: _Noted) -> SeenCommunicator:
        calls = zip(KINDS, noted.num_calls, noted.most_bytes, strict=True)
        return SeenCommunicator(
            rank=noted.rank,
            num_ranks=noted.num_ranks,
            device=noted.device,
            group=self._groups[noted.group] if noted.group >= 0 else None,
            most_bytes={kind: most for kind, num, most in calls if num},
            sends_to=tuple(peer for peer, sends in enumerate(noted.sends_to) if sends),
            receives_from=tuple(peer for peer, receives in enumerate(noted.receives_from) if receives),
        )
