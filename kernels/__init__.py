"""Triton kernels that move, fill and check many blocks in one launch; imported as `stalloc.kernels`.

Contract: importing this package imports neither Triton nor torch; each name loads what it needs when used.
"""

import importlib
from typing import Any

_LAZY: dict[str, str] = {
    "batched_copy": "stalloc.kernels.launch",
    "batched_fill": "stalloc.kernels.launch",
    "batched_copy_fill": "stalloc.kernels.launch",
    "batched_mismatches": "stalloc.kernels.launch",
    "Config": "stalloc.kernels.configs",
    "Tables": "stalloc.kernels.driver_tables",
    "config_for": "stalloc.kernels.configs",
    "host_copy": "stalloc.kernels.reference",
    "host_fill": "stalloc.kernels.reference",
    "host_copy_fill": "stalloc.kernels.reference",
    "host_mismatches": "stalloc.kernels.reference",
    "torch_copy": "stalloc.kernels.reference",
    "torch_fill": "stalloc.kernels.reference",
    "torch_copy_fill": "stalloc.kernels.reference",
    "torch_mismatches": "stalloc.kernels.reference",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'stalloc.kernels' has no attribute {name!r}")
