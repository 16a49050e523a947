"""Threads that allocate beside the steps of a program: a loader, a logger, a server of requests.

Contract: a thread is left out of the steps only if these recur without it, and do not with it. What it asks for is
served from the heap then, like every request that no plan knows of.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from stalloc.columns import Column
from stalloc.core.constants import ACTION_ALLOC
from stalloc.runtime.kind_names import name_of


def irregular_threads(steps: Sequence[tuple[Column, Column, Column]]) -> set[int]:
    """Threads without which most steps recur; none if they do with all of them, or with none left out.

    `steps` are the sizes, streams and threads of each step's requests, three columns of one length.
    """
    counts: Counter[int] = Counter()
    for _, _, thread in steps:
        counts.update(thread.tolist())
    regular: list[int] = []
    for number, _ in counts.most_common():
        if _recur(steps, [*regular, number]):
            regular.append(number)
    is_most = 2 * sum(counts[number] for number in regular) > counts.total()
    return counts.keys() - set(regular) if is_most else set()


def _recur(steps: Sequence[tuple[Column, Column, Column]], threads: list[int]) -> bool:
    """Whether more than half of the steps occur twice, as far as these threads go."""
    chosen = [np.isin(thread, threads) for _, _, thread in steps]
    times = Counter(name_of(size[of], stream[of]) for (size, stream, _), of in zip(steps, chosen, strict=True))
    return 2 * sum(count for count in times.values() if count > 1) > len(steps)


def events_of_others(action: Column, address: Column, thread: Column, left_out: set[int]) -> Column:
    """(m,) bool: the events of a record that are no request of threads that are left out, nor the end of one.

    `action` (ACTION_ALLOC and so on), `address` and `thread` are the columns (m,) of the events.
    """
    of_them = (action == ACTION_ALLOC) & np.isin(thread, list(left_out))
    if not of_them.any():
        return ~of_them
    order = np.argsort(address, kind="stable")
    place = np.arange(len(order))
    begins = (action[order] == ACTION_ALLOC) | np.r_[True, np.diff(address[order]) != 0]
    born = np.maximum.accumulate(np.where(begins, place, 0))  # what lived at the address then began here
    kept = np.empty(len(order), bool)
    kept[order] = ~of_them[order][born]
    return kept
