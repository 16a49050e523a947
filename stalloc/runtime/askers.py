"""For whom the requests of a record were made: by which of several threads that each make steps of their own.

Contract: a thread waits while another one works for it, as for its backward pass, so a piece of such work is of a
thread that asked for nothing meanwhile. Where that is so of several, it is of the one whose blocks it frees, or that
frees its own; failing that, of the one that had pieces like it before.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from stalloc.columns import Column
from stalloc.core.constants import ACTION_ALLOC, ACTION_FREE_COMPLETED, ACTION_FREE_REQUESTED, TINY
from stalloc.runtime.kind_names import name_of


def strands_of(events: np.ndarray, threads: Sequence[int]) -> dict[int, int]:
    """Which of `threads` each asker of recorded events worked for, as an index; none of them: it is left out."""
    tags = events["action"]
    sizable = np.flatnonzero(((tags & 0xFF) == ACTION_ALLOC) & (events["requested_bytes"] > TINY))
    asker, size, stream = events["thread"][sizable], events["requested_bytes"][sizable], tags[sizable] >> 8
    order = np.argsort(asker, kind="stable")
    numbers, firsts = np.unique(asker[order], return_index=True)
    rows = dict(zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True))
    own = [rows.get(thread, order[:0]) for thread in threads]
    found = {thread: index for index, thread in enumerate(threads)}
    guests = sorted(rows.keys() - found.keys(), key=lambda number: int(rows[number][0]))
    shared = _freed_between(tags & 0xFF, events["address"], events["thread"])
    waited: dict[int, dict[int, int]] = {}  # guest -> index of a thread -> its requests before that
    for guest in guests:
        begin, end = int(rows[guest][0]), int(rows[guest][-1])
        before = [(int(np.searchsorted(of, begin)), int(np.searchsorted(of, end))) for of in own]
        waited[guest] = {index: first for index, (first, last) in enumerate(before) if first == last}
    like: defaultdict[bytes, Counter[int]] = defaultdict(Counter)  # the sizes of a guest's -> for whom there were such
    served: set[tuple[int, int]] = set()
    for guest in sorted(guests, key=lambda number: len(waited[number])):  # the clear ones first
        name = name_of(size[rows[guest]], stream[rows[guest]])
        freed = {index: shared[guest, threads[index]] + shared[threads[index], guest] for index in waited[guest]}
        best = max(
            waited[guest].items(),
            key=lambda place: (freed[place[0]], like[name][place[0]], place not in served),
            default=None,
        )
        if best is not None:
            found[guest] = best[0]
            like[name][best[0]] += 1
            served.add(best)
    return found


def _freed_between(action: Column, address: Column, asker: Column) -> Counter[tuple[int, int]]:
    """How many blocks of an asker another one freed: (who made it, who freed it) -> blocks."""
    rows = np.flatnonzero(np.isin(action, (ACTION_ALLOC, ACTION_FREE_REQUESTED, ACTION_FREE_COMPLETED)))
    rows = rows[np.argsort(address[rows], kind="stable")]
    first, then = rows[:-1], rows[1:]  # a block's free comes next among the events of its address
    is_free = (action[first] == ACTION_ALLOC) & (action[then] != ACTION_ALLOC) & (address[first] == address[then])
    return Counter(zip(asker[first[is_free]].tolist(), asker[then[is_free]].tolist(), strict=True))
