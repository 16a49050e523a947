"""Made-up steps that repeat, and places for their requests: first fit, so that nothing waits for a planner.

Contract: a cycle turns for ever; entry i is allocated in each pass and dies right before entry i + lifespan[i], counted
on into the next pass. No two entries of a cycle that are ever live together share a byte, and no byte is used by two
streams.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from stalloc.compiled import njit

ALIGNMENT = 512
MIB = 1 << 20


@njit(nogil=True)
def _place(size, stream, lifespan, order, offset):
    """First fit in the order given; stream after stream. The end of all."""
    n = len(size)
    placed = np.zeros(n, np.int64)
    base = top = 0
    for wanted in range(stream.max() + 1):
        count = 0
        for i in order:
            if stream[i] != wanted:
                continue
            at = base
            for k in range(count):  # by offset
                j = placed[k]
                if (j - i) % n < lifespan[i] or (i - j) % n < lifespan[j]:
                    if at + size[i] <= offset[j]:
                        break
                    at = max(at, offset[j] + size[j])
            offset[i] = at
            k = count
            while k > 0 and offset[placed[k - 1]] > at:
                placed[k] = placed[k - 1]
                k -= 1
            placed[k] = i
            count += 1
            top = max(top, at + size[i])
        base = top
    return top


@dataclass(frozen=True, eq=False)
class Cycle:
    size: np.ndarray  #: (n,) requested bytes
    stream: np.ndarray  #: (n,) index of the stream
    lifespan: np.ndarray  #: (n,) in entries, 1 to n
    offset: np.ndarray  #: (n,) bytes
    peak_bytes: int
    dying: np.ndarray  #: (n,) entries in the order in which they die
    first_dying: np.ndarray  #: (n + 1,) where those that die before each entry begin in `dying`

    def __len__(self) -> int:
        return len(self.size)


def rounded(size: np.ndarray) -> np.ndarray:
    return (size + (ALIGNMENT - 1)) & -ALIGNMENT


def from_requests(size: np.ndarray, stream: np.ndarray, lifespan: np.ndarray, order: np.ndarray | None = None) -> Cycle:
    """Place requests, the largest first or in an order, and put their deaths in order."""
    n = len(size)
    offset = np.zeros(n, np.int64)
    whole = rounded(size)
    order = np.argsort(-whole, kind="stable") if order is None else order
    peak_bytes = int(_place(whole, stream, lifespan, order, offset))
    due = (np.arange(n) + lifespan) % n
    dying = np.argsort(due, kind="stable")
    return Cycle(size, stream, lifespan, offset, peak_bytes, dying, np.searchsorted(due[dying], np.arange(n + 1)))


def make_cycle(
    rng: np.random.Generator, length: int, *, streams: int = 1, num_sizes: int = 12, largest: int = 3 * MIB
) -> Cycle:
    sizes = np.exp(rng.uniform(np.log(513), np.log(largest), num_sizes)).astype(np.int64)
    lifespan = np.minimum(rng.geometric(rng.choice([0.05, 0.15, 0.5]), length), length).astype(np.int64)
    lasting = rng.random(length) < rng.choice([0.0, 0.05])  # gradients, which live until the next pass
    lifespan[lasting] = length - rng.integers(0, max(1, length // 4), int(lasting.sum()))
    return from_requests(rng.choice(sizes, length), rng.integers(0, streams, length), np.maximum(lifespan, 1))


def not_zero(record: Any, *names: str) -> list[str]:
    return [f"{name} is {value}" for name in names if (value := attrgetter(name)(record))]
