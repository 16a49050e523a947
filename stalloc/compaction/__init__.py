"""Moving what lives in torch's storages, through the kernels, so that free memory is in one piece.

Contract: whatever cannot be done is one error before the first byte moves. Importing this package imports neither
torch nor CuPy nor Triton.
"""

from typing import TYPE_CHECKING

from stalloc.lazy import loaded_on_use

if TYPE_CHECKING:
    from stalloc.compaction.adopting import adopt, compact, compact_when_full, contiguous_buffers
    from stalloc.compaction.automatic import Allowance, allow_compaction
    from stalloc.compaction.emptying import Relocation

__all__ = [
    "Allowance",
    "Relocation",
    "adopt",
    "allow_compaction",
    "compact",
    "compact_when_full",
    "contiguous_buffers",
]

_MODULES = {
    "Allowance": ".automatic",
    "Relocation": ".emptying",
    "allow_compaction": ".automatic",
    "adopt": ".adopting",
    "compact": ".adopting",
    "compact_when_full": ".adopting",
    "contiguous_buffers": ".adopting",
}

__getattr__ = loaded_on_use(__name__, _MODULES)
