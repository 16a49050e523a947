"""Batches of data loaders, dealt out to ranks in turn, in a program that knows nothing of ranks.

Contract: rank R of N gets batches R, R + N, R + 2N, … of what a loader would give a single process, so that all ranks
together train on the same data once, on N batches in each step; what is left at the end of an epoch, fewer than N
batches, is dropped, as ranks must make the same number of steps. Samplers that shuffle draw alike where the program
sets a seed; a seed is set here if it does not. Loaders of iterable data sets are dealt out too, each batch being read.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any


def deal_batches(rank: int, num_ranks: int) -> None:
    """Deal the batches of every loader made from here on; torch has to be imported."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    whole, length = DataLoader.__iter__, DataLoader.__len__

    def is_dealt(loader: Any) -> bool:
        return not isinstance(loader.sampler, DistributedSampler)

    @functools.wraps(whole)
    def dealt(self: Any) -> Iterator[Any]:
        if not is_dealt(self):
            yield from whole(self)
            return
        batches = whole(self)
        while len(turn := list(itertools.islice(batches, num_ranks))) == num_ranks:
            yield turn[rank]

    @functools.wraps(length)
    def dealt_length(self: Any) -> int:
        return length(self) // num_ranks if is_dealt(self) else length(self)

    DataLoader.__iter__, DataLoader.__len__ = dealt, dealt_length
