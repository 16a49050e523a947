"""What a trace means: load, periods, the fold of many steps into one tape, phases, classes and their graph."""

from stalloc.lifespans.classes import Classes, LifespanClass, Regularity, Total, classify
from stalloc.lifespans.graph import cut_events, lifespan_graph
from stalloc.lifespans.load_curves import fullest, load_curve, lower_bound, peak_load
from stalloc.lifespans.operation_graph import crossing_bytes, cut_operations, operation_graph
from stalloc.lifespans.operation_modules import RepeatedBlocks, module_of_requests, repeated_blocks
from stalloc.lifespans.operation_order import Reordered, reorder
from stalloc.lifespans.periods import Period, find_period, find_step_period, may_repeat, sequence_keys, sequence_rows
from stalloc.lifespans.phases import Phases, find_phases
from stalloc.lifespans.roles import find_roles
from stalloc.lifespans.steady_step import SteadyStep, find_steady_step, recorded_step
from stalloc.lifespans.tape import Tape, expand, fold

__all__ = [
    "Classes",
    "LifespanClass",
    "Period",
    "Phases",
    "Regularity",
    "Reordered",
    "RepeatedBlocks",
    "SteadyStep",
    "Tape",
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
