"""XLA's heap simulator: global decreasing size, best fit.

Source: the XLA project, xla/service/heap_simulator, GlobalDecreasingSizeBestFitHeap as its comments describe it, and
the choice of the better of the two orders in buffer assignment: buffers by size, or by the length of their live range;
each into the smallest free chunk that holds it during its whole live range, else at the end.
"""

import numpy as np

from .placing import Column, fit_in_order


def place(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets, the better of the two orders."""
    spatial = fit_in_order(start, end, size, np.lexsort([start - end, -size]), True)
    temporal = fit_in_order(start, end, size, np.lexsort([-size, start - end]), True)
    return min((spatial, temporal), key=lambda offset: int((offset + size).max(initial=0)))
