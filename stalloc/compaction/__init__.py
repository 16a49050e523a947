"""Moving what lives: where to, in which order, and doing it through the kernels.

Contract: whatever cannot be done is one error before the first byte moves. Importing this package imports neither
torch nor CuPy nor Triton.
"""

from typing import TYPE_CHECKING

from stalloc.lazy import loaded_on_use

if TYPE_CHECKING:
    from stalloc.compaction.adopting import (
        Allowance,
        adopt,
        allow_compaction,
        compact,
        compact_when_full,
        contiguous_buffers,
    )
    from stalloc.compaction.emptying import Relocation
    from stalloc.compaction.layouts import ArenaRun, Layout, largest_hole, run_in_arena, slide, to_plan
    from stalloc.compaction.move_order import order_moves
    from stalloc.compaction.schedule import BOUNCE, Schedule, execute

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
    ".adopting": ("Allowance", "adopt", "allow_compaction", "compact", "compact_when_full", "contiguous_buffers"),
    ".emptying": ("Relocation",),
    ".layouts": ("ArenaRun", "Layout", "largest_hole", "run_in_arena", "slide", "to_plan"),
    ".move_order": ("order_moves",),
    ".schedule": ("BOUNCE", "Schedule", "execute"),
}

__getattr__ = loaded_on_use(__name__, {name: module for module, names in _MODULES.items() for name in names})
