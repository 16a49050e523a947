"""stalloc: watch one step of a GPU program, plan where every allocation will live, run on the plan.

Importing this package imports neither torch nor cupy nor numba: each name below loads what it needs when used.
For pytest: PYTEST_DONT_REWRITE, since a program under stalloc has imported it before pytest could.
"""

from stalloc.lazy import loaded_on_use

__version__ = "0.2.0.dev0"

_NAMES = {
    ".errors": "BadInputError CorruptionError DiskError GraphMemoryError OffloadError PlanError RecomputeError "
    "SetupError StallocError StreamError",
    ".trace": "Trace load_traces save_traces",
    ".planner": "Plan load_plans save_plans plan plan_joint replan validate",
    ".integrations": "install uninstall scope mem_pool step statistics flight_recorder alloc_conf",
    ".integrations.graph_pools": "exclusive_graphs borrow_graph_memory",
    ".integrations.sleep_and_wake": "sleep tag wake",
    ".integrations.memory_figures": "watch memory_scalars",
    ".integrations.notebook": "load_ipython_extension",
    ".compaction": "adopt allow_compaction compact compact_when_full contiguous_buffers",
    ".techniques": "checkpoint SharedLink offload_activations chunked_cross_entropy page_optimizer commit committed "
    "stream_layers cache_experts",
    ".writers.reporting": "report",
    ".fitting": "budget cap fit",
    ".sizing.sweep": "sweep",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_MODULES]

__getattr__ = loaded_on_use(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
