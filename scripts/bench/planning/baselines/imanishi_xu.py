"""Simulated annealing over the order of placement.

Source: Imanishi and Xu, "A Heuristic for Periodic Memory Allocation with Little Fragmentation to Train Neural
Networks", ISMM 2024, which joins an existing placement heuristic with simulated annealing. What we could read is the
abstract, so the rest is ours: an order is decoded by first fit, a move shifts one request among the highest or a
random one to an earlier place, and the temperature falls from 1% of the peak by a fixed number of moves, fewer for
more requests so that the whole takes seconds. The figures are of this file, not of theirs.
"""

import numpy as np

from stalloc.compiled import njit

from .gaps import Column, fit_in_order

#: pairs of requests that all decodings together may look at
EFFORT = 3_000_000_000
MOVES = 4_000
FIRST_TEMPERATURE, LAST_TEMPERATURE = 0.01, 0.00001


def place(start: Column, end: Column, size: Column, seed: int = 0) -> Column:
    """(n,) offsets."""
    life = end - start
    orders = [np.lexsort(keys) for keys in ([-life, -size], [-size, -life], [-size * life])]
    decoded = [fit_in_order(start, end, size, order, False) for order in orders]
    peaks = [int((offset + size).max(initial=0)) for offset in decoded]
    first = int(np.argmin(peaks))
    moves = min(MOVES, int(EFFORT / max(len(size), 1) ** 2))
    change = np.zeros(2 * len(size), np.int64)
    change[: len(size)], change[len(size) :] = size, -size
    events = np.lexsort([np.repeat([1, 0], len(size)), np.concatenate([start, end])])
    bound = int(np.cumsum(change[events]).max(initial=0))
    return _anneal(start, end, size, orders[first], decoded[first], bound, moves, seed)


@njit(nogil=True)
def _anneal(start, end, size, order, offset, bound, moves, seed):
    np.random.seed(seed)
    count = len(order)
    best, best_peak = offset, (offset + size).max() if count else 0
    now, now_peak = offset, best_peak
    for move in range(moves):
        if best_peak <= bound:
            break
        temperature = FIRST_TEMPERATURE * (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** (move / moves)
        source = np.random.randint(count)
        if np.random.randint(4):  # one that ends in the highest twentieth, if a few draws meet one
            for _ in range(200):
                if now[order[source]] + size[order[source]] > now_peak - now_peak // 20:
                    break
                source = np.random.randint(count)
        target = np.random.randint(source + 1)
        row = order[source]
        order[target + 1 : source + 1] = order[target:source].copy()
        order[target] = row
        tried = fit_in_order(start, end, size, order, False)
        peak = (tried + size).max()
        if peak <= now_peak or np.random.random() < np.exp((now_peak - peak) / (temperature * now_peak)):
            now, now_peak = tried, peak
            if peak < best_peak:
                best, best_peak = tried, peak
        else:
            order[target:source] = order[target + 1 : source + 1].copy()
            order[source] = row
    return best
