"""What of a program is kept in host memory, as data.

Contract: settings hold no objects of the program, so they can be written to a file; whatever such a file says, they can
only choose what lies where.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

_MOST = 1 << 62


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """Which tiers are used; by default the device alone."""

    host_bytes: int = 0  #: of host memory, at the most
    paged_window_bytes: int = 0
    """Of optimizer state on the device at once, if it is paged; 1: no more than one part of it. 0: it is not paged."""
    streamed_window: int = 0
    """How many repeated blocks have their parameters on the device at once; 0: all. Needs a paged optimizer."""

    def __bool__(self) -> bool:
        return bool(self.paged_window_bytes)

    def as_json(self) -> dict[str, int]:
        """For a file."""
        return asdict(self)


def tiers_from_json(told: Any) -> TierSettings:
    """What `as_json` gave. Raises ValueError for anything else."""
    names = {one.name for one in fields(TierSettings)}
    if not isinstance(told, dict) or set(told) != names:
        raise ValueError("what it keeps in host memory is damaged")
    if not all(type(value) is int and 0 <= value < _MOST for value in told.values()):
        raise ValueError("what it keeps in host memory is no number of bytes")
    return TierSettings(**told)
