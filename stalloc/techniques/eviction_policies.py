"""Which evictable memory goes first: a score of its bytes, of how long nothing used it, and of the seconds it costs.

Contract: the lowest score goes first; scores are functions of what a program does, never of the clock or of addresses,
so that a step that does the same evicts the same. Units are bytes, uses of saved memory, and estimated seconds.
"""

import random
from collections.abc import Callable

from stalloc.errors import BadInputError

Score = Callable[[float, float, float], float]
"""Of bytes, of staleness (at least 1), and of the seconds until the bytes are back."""

_draw = random.Random(0)  # its own, so that the program's numbers stay its own

POLICIES: dict[str, Score] = {
    "dtr": lambda size_bytes, stale, seconds: seconds / (size_bytes * stale),
    "lru": lambda size_bytes, stale, seconds: 1 / stale,
    "size": lambda size_bytes, stale, seconds: 1 / size_bytes,
    "msps": lambda size_bytes, stale, seconds: seconds / size_bytes,
    "random": lambda size_bytes, stale, seconds: _draw.random(),
}
"""By name: DTR's score without neighbours (Kirisame et al., Dynamic Tensor Rematerialization, 2021, section 4.1: what is
evicted together is one region here), least recently used, largest first, fewest seconds a byte (Peng et al., Capuchin,
2020, section 4.4), and at random."""


def policy_named(name: str) -> Score:
    """The score of a name. Raises BadInputError for one that is none."""
    if name not in POLICIES:
        raise BadInputError(f"there is no policy {name!r:.42} for a cap: give one of {', '.join(POLICIES)}.")
    return POLICIES[name]
