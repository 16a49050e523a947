"""Chunks that come to the device when they are needed, and go when others need their place: by Belady, or least used.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: whatever is needed latest goes
first, which moves least where all are of one size. PatrickStar knows a step from the one before, so it can do that.
Contract: what a moment needs is there at that moment, all at once; nothing goes that need not. A step begins with
nothing on the device.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stalloc.cost.swapping.patrickstar import Moment
from stalloc.errors import BadInputError

Policy = Literal["belady", "lru"]


@dataclass(frozen=True)
class Moved:
    """Chunks that a step moves."""

    to_device: int
    to_host: int

    @property
    def chunks(self) -> int:
        """Both ways."""
        return self.to_device + self.to_host


def least_capacity(moments: Sequence[Moment]) -> int:
    """Chunks that have to be on the device at once."""
    return max(map(len, moments), default=0)


def replay_chunks(moments: Sequence[Moment], capacity: int, policy: Policy) -> Moved:
    """What is moved if so many chunks have room. Raises BadInputError if a moment needs more."""
    if capacity < least_capacity(moments):
        raise BadInputError(
            f"{capacity} chunks have room on the device, and {least_capacity(moments)} are needed at once: "
            "give a larger budget, or smaller chunks."
        )
    used_at: dict[int, list[int]] = {}
    for now, needed in enumerate(moments):
        for chunk in needed:
            used_at.setdefault(chunk, []).append(now)
    last: dict[int, int] = {}  # of what is here: when it was used

    def next_use(chunk: int, now: int) -> int:
        later = bisect_right(used_at[chunk], now)
        return used_at[chunk][later] if later < len(used_at[chunk]) else len(moments)

    to_device = to_host = 0
    for now, needed in enumerate(moments):
        missing = [chunk for chunk in needed if chunk not in last]
        surplus = len(last) + len(missing) - capacity
        if surplus > 0:
            others = (chunk for chunk in last if chunk not in needed)
            if policy == "lru":
                goes = sorted(others, key=lambda chunk: (last[chunk], chunk))
            else:
                goes = sorted(others, key=lambda chunk, now=now: (-next_use(chunk, now), chunk))  # type: ignore[misc]
            for chunk in goes[:surplus]:
                del last[chunk]
            to_host += surplus
        to_device += len(missing)
        last.update(dict.fromkeys(needed, now))
    return Moved(to_device, to_host)
