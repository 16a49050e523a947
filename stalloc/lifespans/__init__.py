"""What a trace means: load, periods, the fold of many steps into one tape, lifespan classes and their graph."""

from stalloc.lifespans.load import load_curve, lower_bound, peak_load
from stalloc.lifespans.periods import Period, find_period, find_step_period, sequence_keys, sequence_rows
from stalloc.lifespans.tape import Tape, expand, fold

__all__ = [
    "Period",
    "Tape",
    "expand",
    "find_period",
    "find_step_period",
    "fold",
    "load_curve",
    "lower_bound",
    "peak_load",
    "sequence_keys",
    "sequence_rows",
]
