"""Moving what lives: where to, in which order, and doing it through the kernels.

Contract: whatever cannot be done is one error before the first byte moves. Importing this package imports neither
torch nor CuPy nor Triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stalloc.compaction.adopting import adopt, compact, compact_when_full, contiguous_buffers
    from stalloc.compaction.automatic import Allowance, allow_compaction
    from stalloc.compaction.capped_arena import ArenaRun, run_in_arena
    from stalloc.compaction.emptying import Relocation
    from stalloc.compaction.execution import execute
    from stalloc.compaction.layouts import Layout, largest_hole, slide, to_plan
    from stalloc.compaction.move_order import order_moves
    from stalloc.compaction.schedule import BOUNCE, Schedule

_LAZY: dict[str, str] = {
    "Allowance": "stalloc.compaction.automatic",
    "ArenaRun": "stalloc.compaction.capped_arena",
    "BOUNCE": "stalloc.compaction.schedule",
    "Layout": "stalloc.compaction.layouts",
    "Relocation": "stalloc.compaction.emptying",
    "Schedule": "stalloc.compaction.schedule",
    "allow_compaction": "stalloc.compaction.automatic",
    "adopt": "stalloc.compaction.adopting",
    "compact": "stalloc.compaction.adopting",
    "compact_when_full": "stalloc.compaction.adopting",
    "contiguous_buffers": "stalloc.compaction.adopting",
    "execute": "stalloc.compaction.execution",
    "largest_hole": "stalloc.compaction.layouts",
    "order_moves": "stalloc.compaction.move_order",
    "run_in_arena": "stalloc.compaction.capped_arena",
    "slide": "stalloc.compaction.layouts",
    "to_plan": "stalloc.compaction.layouts",
}

__all__ = [
    "BOUNCE",
    "Allowance",
    "ArenaRun",
    "Layout",
    "Relocation",
    "Schedule",
    "adopt",
    "allow_compaction",
    "compact",
    "compact_when_full",
    "contiguous_buffers",
    "execute",
    "largest_hole",
    "order_moves",
    "run_in_arena",
    "slide",
    "to_plan",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'stalloc.compaction' has no attribute {name!r}")
