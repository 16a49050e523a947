"""Where it goes: offsets for the requests of a trace or a tape, the Plan record, and the naive validator.

Importing this package does not import numba; the first plan does.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stalloc.planner.effort import Progress
    from stalloc.planner.joint import plan_joint
    from stalloc.planner.kinds_check import validate_kinds
    from stalloc.planner.layout import plan_arrays
    from stalloc.planner.line import Layout
    from stalloc.planner.moving import Moves, plan_moving_least
    from stalloc.planner.orders import METHODS
    from stalloc.planner.pieces import decomposition
    from stalloc.planner.planning import plan, plan_tape
    from stalloc.planner.record import Plan, load_plans, plans_from_bytes, plans_to_bytes, save_plans
    from stalloc.planner.replanning import replan
    from stalloc.planner.validator import validate
    from stalloc.planner.verdict import Verdict

__all__ = [
    "METHODS",
    "Layout",
    "Moves",
    "Plan",
    "Progress",
    "Verdict",
    "decomposition",
    "load_plans",
    "plan",
    "plan_arrays",
    "plan_joint",
    "plan_moving_least",
    "plan_tape",
    "plans_from_bytes",
    "plans_to_bytes",
    "replan",
    "save_plans",
    "validate",
    "validate_kinds",
]

_LAZY = {
    "METHODS": "orders",
    "Layout": "line",
    "decomposition": "pieces",
    "plan_arrays": "layout",
    "plan": "planning",
    "plan_joint": "joint",
    "Moves": "moving",
    "plan_moving_least": "moving",
    "plan_tape": "planning",
    "replan": "replanning",
    "Plan": "record",
    "Progress": "effort",
    "load_plans": "record",
    "plans_from_bytes": "record",
    "plans_to_bytes": "record",
    "save_plans": "record",
    "Verdict": "verdict",
    "validate": "validator",
    "validate_kinds": "kinds_check",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"stalloc.planner.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'stalloc.planner' has no attribute {name!r}")
