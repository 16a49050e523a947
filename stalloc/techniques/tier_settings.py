"""What of a program is kept in host memory and on disk, as data.

Contract: settings hold no objects of the program, so they can be written to a file; whatever such a file says, they can
only choose what lies where, and name no file.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from stalloc.techniques.parts import Shares

_MOST = 1 << 62


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """Which tiers are used; by default the device alone."""

    host_bytes: int = 0  #: of host memory, at the most
    disk_bytes: int = 0  #: on disk, at the most, of state and parameters that have no room in host memory
    paged_window_bytes: int = 0
    """Bytes of paged optimizer state on the device at once; 1: one part of it at a time. 0: state is not paged."""
    streamed_window: int = 0
    """How many repeated blocks have their parameters on the device at once; 0: all. Needs a paged optimizer."""
    device_share: float = 0.0  #: of the parameters, by bytes, whose state stays on the device
    processor_share: float = 0.0  #: of the parameters, by bytes, that the processor updates
    sends_gradients: bool = False
    """Whether gradients leave in backward, of what the processor updates and of streamed layers."""
    updates_beside_backward: bool = False  #: whether the processor updates streamed layers as their gradients come

    @property
    def shares(self) -> Shares:
        """The shares kept on the device and updated by the processor."""
        return Shares(self.device_share, self.processor_share)

    def __bool__(self) -> bool:
        return bool(self.paged_window_bytes)

    def as_json(self) -> dict[str, int | float]:
        """Plain values (JSON) for a file."""
        return asdict(self)


def tiers_from_json(told: Any) -> TierSettings:
    """The settings that `as_json` wrote; a field added later has its default. Raises ValueError for anything else."""
    names = {one.name: one.type for one in fields(TierSettings)}
    if not isinstance(told, dict) or not set(told) <= set(names):
        raise ValueError("what it keeps in host memory is damaged")
    for name, value in told.items():
        if names[name] is bool and type(value) is not bool:
            raise ValueError("what it does with gradients is neither true nor false")
        if names[name] is int and not (type(value) is int and 0 <= value < _MOST):
            raise ValueError("what it keeps in host memory is no number of bytes")
        if names[name] is float and not (type(value) in (int, float) and 0 <= value <= 1):
            raise ValueError("what it keeps in host memory is no share")
    return TierSettings(**told)
