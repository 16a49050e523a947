"""The orders in which placement considers requests: each is a ranking by a few keys, largest first.

Contract: the same problem, order and seed give the same permutation; ties are broken by row.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.planner.problem import Problem

#: keys by letter: E latest end, S earliest start, W longest lifespan, A largest area, Z largest size
GUIDED = ("EW", "SW", "WA", "AW", "ZW", "ZE")
PLAIN = ("Z", "A", "W")
#: orders that can be asked for by name
SINGLE = {"size": "ZW", "area": "A", "lifetime": "WZ", "birth": "SW", "death": "EW"}
#: every method by name; the last two are the groups of groups.py
METHODS = ("auto", "greedy", "search", "colouring", "annealing", *SINGLE, "homophase", "homosize")


def ranks(problem: Problem, order: str, noise: float = 0.0, seed: int = 0, span: Column | None = None) -> Column:
    """(n,) rank of each request, 0 first. `noise` stretches W, A and Z by random factors up to e**noise.

    `span` is (n,) how long each is live, if that is not end - start.
    """
    span = (problem.end - problem.start if span is None else span).astype(np.float64)
    if noise:
        factor = np.exp(np.random.default_rng(seed).uniform(-noise, noise, len(span)))
    else:
        factor = np.ones(len(span))
    keys = {
        "E": lambda: problem.end.astype(np.float64),
        "S": lambda: -problem.start.astype(np.float64),
        "W": lambda: span * factor,
        "A": lambda: span * problem.size * factor,
        "Z": lambda: problem.size * factor,
    }
    by_rank = np.lexsort([-keys[letter]() for letter in reversed(order)])
    rank = np.empty(len(span), np.int64)
    rank[by_rank] = np.arange(len(span))
    return rank
