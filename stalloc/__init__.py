"""stalloc: watch one step of a GPU program, plan where every allocation will live, run on the plan.

Importing this package imports neither torch nor cupy nor numba: each name below loads what it needs when used.
"""

import importlib

from stalloc.errors import (
    BadInputError,
    CorruptionError,
    DiskError,
    PlanError,
    RecomputeError,
    SetupError,
    StallocError,
    StreamError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing would cost every start of Python under STALLOC=1 as much as all the rest
    from typing import Any

__version__ = "0.1.0.dev0"

_LAZY: dict[str, str] = {
    "Trace": "stalloc.trace",
    "load_traces": "stalloc.trace",
    "save_traces": "stalloc.trace",
    "Plan": "stalloc.planner",
    "load_plans": "stalloc.planner",
    "save_plans": "stalloc.planner",
    "plan": "stalloc.planner",
    "plan_joint": "stalloc.planner",
    "replan": "stalloc.planner",
    "validate": "stalloc.planner",
    "install": "stalloc.integrations",
    "uninstall": "stalloc.integrations",
    "scope": "stalloc.integrations",
    "sleep": "stalloc.integrations.sleep_and_wake",
    "tag": "stalloc.integrations.sleep_and_wake",
    "wake": "stalloc.integrations.sleep_and_wake",
    "mem_pool": "stalloc.integrations",
    "step": "stalloc.integrations",
    "statistics": "stalloc.integrations",
    "flight_recorder": "stalloc.integrations",
    "alloc_conf": "stalloc.integrations",
    "watch": "stalloc.integrations.showing",
    "memory_scalars": "stalloc.integrations.memory_scalars",
    "load_ipython_extension": "stalloc.integrations.notebook",
    "adopt": "stalloc.compaction",
    "allow_compaction": "stalloc.compaction",
    "compact": "stalloc.compaction",
    "compact_when_full": "stalloc.compaction",
    "contiguous_buffers": "stalloc.compaction",
    "checkpoint": "stalloc.techniques",
    "page_optimizer": "stalloc.techniques",
    "commit": "stalloc.techniques",
    "committed": "stalloc.techniques",
    "stream_layers": "stalloc.techniques",
    "report": "stalloc.writers.reporting",
    "budget": "stalloc.fitting",
    "fit": "stalloc.fitting",
}

__all__ = [
    "BadInputError",
    "CorruptionError",
    "DiskError",
    "PlanError",
    "RecomputeError",
    "SetupError",
    "StallocError",
    "StreamError",
    "__version__",
    *_LAZY,
]


def __getattr__(name: str) -> "Any":
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'stalloc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
