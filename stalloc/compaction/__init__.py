"""Moving what lives: where to, in which order, and doing it through the kernels.

Contract: whatever cannot be done is one error before the first byte moves. Importing this package imports neither
torch nor CuPy nor Triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stalloc.compaction.ordering import order_moves
    from stalloc.compaction.schedule import BOUNCE, Schedule

_LAZY: dict[str, str] = {
    "BOUNCE": "stalloc.compaction.schedule",
    "Schedule": "stalloc.compaction.schedule",
    "order_moves": "stalloc.compaction.ordering",
}

__all__ = ["BOUNCE", "Schedule", "order_moves"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'stalloc.compaction' has no attribute {name!r}")
