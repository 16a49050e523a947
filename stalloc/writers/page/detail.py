"""How much detail a request is: at which zoom it is still drawn, so that a million of them stay fluid.

At zoom L a column of pixels shows about 2^L events. A request is drawn there if it lives as long as that, or if it is
among the largest that begin within the same 2^L events: what is drawn then depends on the width of the picture, not on
the length of the record.
"""

import numpy as np

from stalloc.columns import Column

LARGEST_IN_COLUMN = 16  #: requests of one column that are drawn however short they live


def detail_levels(start: Column, end: Column, size: Column) -> Column:
    """(n,) uint8: the highest zoom level at which each request is drawn.

    `start`, `end` (n,) are event indices, `size` (n,) bytes. A request of level l lives less than 2^(l+1) events, so
    that those around an event are found by their start.
    """
    level = np.frexp(np.maximum(end - start, 1).astype(float))[1] - 1  # floor(log2(duration))
    begin = np.maximum(start, 0)
    rows = np.flatnonzero(size > 0)
    for zoom in range(1, int(end.max(initial=1)).bit_length() + 1):
        column = begin[rows] >> zoom
        order = np.lexsort((-size[rows], column))
        sorted_column = column[order]
        first = np.searchsorted(sorted_column, sorted_column)
        rows = rows[order[np.arange(len(rows)) - first < LARGEST_IN_COLUMN]]
        level[rows] = np.maximum(level[rows], zoom)
    return level.astype(np.uint8)
