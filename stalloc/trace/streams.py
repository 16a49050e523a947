"""Streams: raw ids become indices in order of first appearance, so that equal programs have equal columns."""

import numpy as np

from stalloc.columns import Column


def index_streams(raw: Column) -> tuple[tuple[int, ...], Column]:
    """The distinct ids in order of first appearance, and for each of the (n,) ids its index among them."""
    distinct, first, inverse = np.unique(raw, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first)
    rank = np.argsort(by_appearance)
    return tuple(int(value) for value in distinct[by_appearance]), rank[inverse.reshape(-1)].astype(np.int64)
