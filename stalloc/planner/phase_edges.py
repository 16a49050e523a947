"""Where the load of a problem turns, from the forward to the backward pass and back: phases lie between these."""

import numpy as np

from stalloc.columns import Column
from stalloc.planner.problem import load_curve

#: share of the load's height by which it has to turn for a phase to end
TURN = 0.2


def phase_edges(start: Column, end: Column, size: Column) -> Column:
    """(k,) epochs at which the load turns by a good part of its height: from forward to backward, and back."""
    load = load_curve(start, end, size, int(end.max(initial=1)))
    swing = TURN * float(load.max(initial=0) - load.min(initial=0))
    edges, low, high, low_at, high_at, rising = [], load[0], load[0], 0, 0, True
    for epoch, level in enumerate(load.tolist()):
        if level > high:
            high, high_at = level, epoch
        if level < low:
            low, low_at = level, epoch
        if rising and level < high - swing:
            edges.append(high_at)
            rising, low, low_at = False, level, epoch
        elif not rising and level > low + swing:
            edges.append(low_at)
            rising, high, high_at = True, level, epoch
    return np.array(edges, np.int64)
