"""stalloc: watch one step of a GPU program, plan where every allocation will live, run on the plan.

Importing this package imports neither torch nor cupy nor numba: each name below loads what it needs when used.
For pytest: PYTEST_DONT_REWRITE, since a program under stalloc has imported it before pytest could.
"""

from stalloc.errors import (
    BadInputError,
    CorruptionError,
    DiskError,
    GraphMemoryError,
    OffloadError,
    PlanError,
    RecomputeError,
    SetupError,
    StallocError,
    StreamError,
)
from stalloc.lazy import loaded_on_use

__version__ = "0.2.0.dev0"

_MODULES = {
    "Trace": ".trace",
    "load_traces": ".trace",
    "save_traces": ".trace",
    "Plan": ".planner",
    "load_plans": ".planner",
    "save_plans": ".planner",
    "plan": ".planner",
    "plan_joint": ".planner",
    "replan": ".planner",
    "validate": ".planner",
    "install": ".integrations",
    "uninstall": ".integrations",
    "scope": ".integrations",
    "exclusive_graphs": ".integrations.graph_pools",
    "borrow_graph_memory": ".integrations.graph_pools",
    "sleep": ".integrations.sleep_and_wake",
    "tag": ".integrations.sleep_and_wake",
    "wake": ".integrations.sleep_and_wake",
    "mem_pool": ".integrations",
    "step": ".integrations",
    "statistics": ".integrations",
    "flight_recorder": ".integrations",
    "alloc_conf": ".integrations",
    "watch": ".integrations.memory_figures",
    "memory_scalars": ".integrations.memory_figures",
    "load_ipython_extension": ".integrations.notebook",
    "adopt": ".compaction",
    "allow_compaction": ".compaction",
    "compact": ".compaction",
    "compact_when_full": ".compaction",
    "contiguous_buffers": ".compaction",
    "checkpoint": ".techniques",
    "SharedLink": ".techniques",
    "offload_activations": ".techniques",
    "chunked_cross_entropy": ".techniques",
    "page_optimizer": ".techniques",
    "commit": ".techniques",
    "committed": ".techniques",
    "stream_layers": ".techniques",
    "cache_experts": ".techniques",
    "report": ".writers.reporting",
    "budget": ".fitting",
    "cap": ".fitting",
    "fit": ".fitting",
    "sweep": ".sizing.sweep",
}

__all__ = [
    "BadInputError",
    "CorruptionError",
    "DiskError",
    "GraphMemoryError",
    "OffloadError",
    "PlanError",
    "RecomputeError",
    "SetupError",
    "StallocError",
    "StreamError",
    "__version__",
    *_MODULES,
]

__getattr__ = loaded_on_use(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
