"""What a trace means: load, periods, the fold of many steps into one schedule, phases, classes and their graph."""

from typing import TYPE_CHECKING

from stalloc.lazy import loaded_on_use

if TYPE_CHECKING:
    from stalloc.lifespans.classes import Classes, LifespanClass, Regularity, Total, classify
    from stalloc.lifespans.graph import cut_events, lifespan_graph
    from stalloc.lifespans.load_curves import fullest, load_curve, lower_bound, peak_load
    from stalloc.lifespans.operation_dependencies import crossing_bytes, cut_operations, operation_graph
    from stalloc.lifespans.operation_modules import RepeatedBlocks, module_of_requests, repeated_blocks
    from stalloc.lifespans.operation_order import Reordered, reorder
    from stalloc.lifespans.periods import (
        Period,
        find_period,
        find_step_period,
        may_repeat,
        sequence_keys,
        sequence_rows,
    )
    from stalloc.lifespans.phases import Phases, find_phases
    from stalloc.lifespans.repeating_schedule import Schedule, expand, fold
    from stalloc.lifespans.roles import find_roles
    from stalloc.lifespans.steady_step import SteadyStep, find_steady_step, last_repetition, recorded_step

__all__ = [
    "Classes",
    "LifespanClass",
    "Period",
    "Phases",
    "Regularity",
    "Reordered",
    "RepeatedBlocks",
    "Schedule",
    "SteadyStep",
    "Total",
    "classify",
    "crossing_bytes",
    "cut_events",
    "cut_operations",
    "expand",
    "find_period",
    "find_phases",
    "find_roles",
    "find_steady_step",
    "find_step_period",
    "fold",
    "fullest",
    "last_repetition",
    "lifespan_graph",
    "load_curve",
    "lower_bound",
    "may_repeat",
    "module_of_requests",
    "operation_graph",
    "peak_load",
    "recorded_step",
    "reorder",
    "repeated_blocks",
    "sequence_keys",
    "sequence_rows",
]

# a program that runs on its plan needs none of what is told of a trace
_MODULES = {
    "Classes": ".classes",
    "LifespanClass": ".classes",
    "Period": ".periods",
    "Phases": ".phases",
    "Regularity": ".classes",
    "Reordered": ".operation_order",
    "RepeatedBlocks": ".operation_modules",
    "SteadyStep": ".steady_step",
    "Schedule": ".repeating_schedule",
    "Total": ".classes",
    "classify": ".classes",
    "crossing_bytes": ".operation_dependencies",
    "cut_events": ".graph",
    "cut_operations": ".operation_dependencies",
    "expand": ".repeating_schedule",
    "find_period": ".periods",
    "find_phases": ".phases",
    "find_roles": ".roles",
    "find_steady_step": ".steady_step",
    "find_step_period": ".periods",
    "fold": ".repeating_schedule",
    "fullest": ".load_curves",
    "last_repetition": ".steady_step",
    "lifespan_graph": ".graph",
    "load_curve": ".load_curves",
    "lower_bound": ".load_curves",
    "may_repeat": ".periods",
    "module_of_requests": ".operation_modules",
    "operation_graph": ".operation_dependencies",
    "peak_load": ".load_curves",
    "recorded_step": ".steady_step",
    "reorder": ".operation_order",
    "repeated_blocks": ".operation_modules",
    "sequence_keys": ".periods",
    "sequence_rows": ".periods",
}

__getattr__ = loaded_on_use(__name__, _MODULES, {"Tape": "Schedule"})
