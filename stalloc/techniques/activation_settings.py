"""Which share of what is saved for backward is kept in host memory, as data.

Contract: settings hold no objects of the program, so they can be written to a file; whatever such a file says, they can
only choose what lies where.
"""

from dataclasses import asdict, dataclass
from typing import Any

_MOST = 1 << 62


@dataclass(frozen=True, kw_only=True)
class ActivationSettings:
    """A share of the saved bytes (Yuan et al. 2024, section 4) and how far copies run ahead; by default none."""

    ratio: float = 0.0  #: of saved bytes, 0 to 1
    window_bytes: int = 0
    """Bytes on their way to the host at once, still held on the device, or back early; 0: each copy is waited for."""
    host_bytes: int = 0  #: of host memory, at the most

    def __bool__(self) -> bool:
        return self.ratio > 0

    def as_json(self) -> dict[str, Any]:
        """Plain values (JSON) for a file."""
        return asdict(self)


def activations_from_json(told: Any) -> ActivationSettings:
    """The settings that `as_json` wrote; a field added later has its default. Raises ValueError for anything else."""
    default = ActivationSettings().as_json()
    if not isinstance(told, dict) or "ratio" not in told or not set(told) <= set(default):
        raise ValueError("what it keeps of activations in host memory is damaged")
    told = default | told
    if not all(type(told[name]) is int and 0 <= told[name] < _MOST for name in ("window_bytes", "host_bytes")):
        raise ValueError("what it keeps of activations in host memory is no number of bytes")
    if type(told["ratio"]) not in (int, float) or not 0 <= told["ratio"] <= 1:
        raise ValueError("what it keeps of activations in host memory is no share")
    return ActivationSettings(**{**told, "ratio": float(told["ratio"])})
