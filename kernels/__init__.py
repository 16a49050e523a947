"""Triton kernels that move, fill and check many blocks in one launch; imported as `stalloc.kernels`.

Contract: importing this package imports neither Triton nor torch; each name loads what it needs when used.
"""

from stalloc.lazy import loaded_on_use

_NAMES = {
    ".launch": ("batched_copy", "batched_fill", "batched_copy_fill", "batched_mismatches"),
    ".configs": ("Config", "config_for"),
    ".driver_tables": ("Tables",),
    ".reference": (
        *("host_copy", "host_fill", "host_copy_fill", "host_mismatches"),
        *("torch_copy", "torch_fill", "torch_copy_fill", "torch_mismatches"),
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_MODULES)

__getattr__ = loaded_on_use(__name__, _MODULES)
