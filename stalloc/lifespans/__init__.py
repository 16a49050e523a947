"""What a trace means: load, periods, the fold of many steps into one schedule, phases, classes and their graph."""

from typing import TYPE_CHECKING

from stalloc.lazy import loaded_on_use

if TYPE_CHECKING:
    from stalloc.lifespans.classes import (
        Classes,
        LifespanClass,
        Phases,
        Regularity,
        Total,
        classify,
        cut_events,
        find_phases,
        lifespan_graph,
    )
    from stalloc.lifespans.load_curves import fullest, load_curve, lower_bound, peak_load
    from stalloc.lifespans.operation_order import Reordered, crossing_bytes, cut_operations, operation_graph, reorder
    from stalloc.lifespans.periods import (
        Period,
        find_period,
        find_step_period,
        may_repeat,
        sequence_keys,
        sequence_rows,
    )
    from stalloc.lifespans.repeating_schedule import Schedule, expand, fold
    from stalloc.lifespans.roles import RepeatedBlocks, find_roles, module_of_requests, repeated_blocks
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
_NAMES = {
    ".classes": "Classes LifespanClass Phases Regularity Total classify cut_events find_phases lifespan_graph",
    ".load_curves": "fullest load_curve lower_bound peak_load",
    ".operation_order": "Reordered crossing_bytes cut_operations operation_graph reorder",
    ".periods": "Period find_period find_step_period may_repeat sequence_keys sequence_rows",
    ".repeating_schedule": "Schedule expand fold",
    ".roles": "RepeatedBlocks find_roles module_of_requests repeated_blocks",
    ".steady_step": "SteadyStep find_steady_step last_repetition recorded_step",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__getattr__ = loaded_on_use(__name__, _MODULES, {"Tape": "Schedule"})
