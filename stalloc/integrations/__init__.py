"""One way in for programs: install stalloc under torch and CuPy, mark steps, read statistics.

Contract: importing this package imports neither numba nor NumPy nor torch nor CuPy; a program that marks its steps
and is run without stalloc pays for nothing else.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing would hold up every start of Python under STALLOC=1
    from typing import Any

    from stalloc.integrations.allocator_settings import alloc_conf
    from stalloc.integrations.flight_record import flight_recorder
    from stalloc.integrations.installing import install, scope, statistics, step, uninstall
    from stalloc.integrations.torch_pool import mem_pool
    from stalloc.runtime import Report, Runtime, Settings

_OF_INSTALLING = ("install", "scope", "statistics", "step", "uninstall")
_OF_RUNTIME = ("Report", "Runtime", "Settings")

__all__ = [
    "Report",
    "Runtime",
    "Settings",
    "alloc_conf",
    "flight_recorder",
    "install",
    "mem_pool",
    "scope",
    "statistics",
    "step",
    "uninstall",
]


def __getattr__(name: str) -> "Any":
    if name in _OF_RUNTIME:
        from stalloc import runtime

        return getattr(runtime, name)
    if name in _OF_INSTALLING:
        from stalloc.integrations import installing

        return getattr(installing, name)
    if name == "alloc_conf":
        from stalloc.integrations.allocator_settings import alloc_conf

        return alloc_conf
    if name == "flight_recorder":
        from stalloc.integrations.flight_record import flight_recorder

        return flight_recorder
    if name == "mem_pool":
        from stalloc.integrations.torch_pool import mem_pool

        return mem_pool
    raise AttributeError(f"module 'stalloc.integrations' has no attribute {name!r}")
