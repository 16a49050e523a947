"""What a trace means: load, periods, the fold of many steps into one tape, phases, classes and their graph."""

from stalloc.lifespans.classes import Classes, LifespanClass, Regularity, Total, classify
from stalloc.lifespans.graph import cut_events, lifespan_graph
from stalloc.lifespans.load_curves import fullest, load_curve, lower_bound, peak_load
from stalloc.lifespans.periods import Period, find_period, find_step_period, may_repeat, sequence_keys, sequence_rows
from stalloc.lifespans.phases import Phases, find_phases
from stalloc.lifespans.tape import Tape, expand, fold

__all__ = [
    "Classes",
    "LifespanClass",
    "Period",
    "Phases",
    "Regularity",
    "Tape",
    "Total",
    "classify",
    "cut_events",
    "expand",
    "find_period",
    "find_phases",
    "find_step_period",
    "fold",
    "fullest",
    "lifespan_graph",
    "load_curve",
    "lower_bound",
    "may_repeat",
    "peak_load",
    "sequence_keys",
    "sequence_rows",
]
