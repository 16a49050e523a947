"""Moving what lives: where to, in which order, and doing it through the kernels.

Contract: whatever cannot be done is one error before the first byte moves. Importing this package imports neither
torch nor CuPy nor Triton.
"""

from typing import TYPE_CHECKING

from stalloc.lazy import loaded_on_use

if TYPE_CHECKING:
    from stalloc.compaction.adopting import adopt, compact, compact_when_full, contiguous_buffers
    from stalloc.compaction.automatic import Allowance, allow_compaction
    from stalloc.compaction.capped_arena import ArenaRun, run_in_arena
    from stalloc.compaction.emptying import Relocation
    from stalloc.compaction.execution import execute
    from stalloc.compaction.layouts import Layout, largest_hole, slide, to_plan
    from stalloc.compaction.move_order import order_moves
    from stalloc.compaction.schedule import BOUNCE, Schedule

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

_MODULES = {
    "Allowance": ".automatic",
    "ArenaRun": ".capped_arena",
    "BOUNCE": ".schedule",
    "Layout": ".layouts",
    "Relocation": ".emptying",
    "Schedule": ".schedule",
    "allow_compaction": ".automatic",
    "adopt": ".adopting",
    "compact": ".adopting",
    "compact_when_full": ".adopting",
    "contiguous_buffers": ".adopting",
    "execute": ".execution",
    "largest_hole": ".layouts",
    "order_moves": ".move_order",
    "run_in_arena": ".capped_arena",
    "slide": ".layouts",
    "to_plan": ".layouts",
}

__getattr__ = loaded_on_use(__name__, _MODULES)
