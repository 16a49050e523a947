"""One way in for programs: install stalloc under torch and CuPy, mark steps, read statistics.

Contract: importing this package imports neither numba nor NumPy nor torch nor CuPy; a program that marks its steps
and is run without stalloc pays for nothing else.
"""

from stalloc.lazy import loaded_on_use

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing would hold up every start of Python under STALLOC=1
    from stalloc.integrations.flight_record import flight_recorder
    from stalloc.integrations.installing import install, scope, statistics, step, uninstall
    from stalloc.integrations.torch_conf import alloc_conf
    from stalloc.integrations.torch_pools import mem_pool
    from stalloc.runtime import Report, Runtime, Settings

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

_MODULES = (
    dict.fromkeys(("Report", "Runtime", "Settings"), "stalloc.runtime")
    | dict.fromkeys(("install", "scope", "statistics", "step", "uninstall"), ".installing")
    | {"alloc_conf": ".torch_conf", "flight_recorder": ".flight_record", "mem_pool": ".torch_pools"}
)
__getattr__ = loaded_on_use(__name__, _MODULES)
