"""Which of the ranks that share a link swap a tensor, so that their sets have as little in common as can be.

Source: Lin et al., "Tensor Movement Orchestration in Multi-GPU Training Systems" (TMO), HPCA 2023: GPUs on one host
link swap disjoint sets of tensors, so that their copies come at different moments.
Contract: order and sizes alone decide, so ranks that save the same decide the same without a word between them. At no
moment more than `ratio` of the saved bytes went to the host from any rank, and a tensor goes from no more ranks than
`ratio` of them, rounded up: with a ratio of 1 / ranks, or less, no two ranks swap the same. This module loads no torch.
"""

import math

LEAST_BYTES = 64 << 10  #: of a tensor that is worth swapping: a copy of less takes as long to begin as it takes
_ROUNDING = 1e-9


class DisjointSets:
    """The decisions of one pass; ranks are numbered from 0."""

    def __init__(self, ratio: float, num_ranks: int) -> None:
        self._ratio = ratio
        self._most_takers = math.ceil(ratio * num_ranks - _ROUNDING)
        self._saved_bytes = 0
        self._left_bytes = [0] * num_ranks

    def takers(self, size_bytes: int) -> list[int]:
        """The ranks that swap what is saved next, those first that lag behind most; `left` is to be told of each."""
        self._saved_bytes += size_bytes
        allowed = self._ratio * self._saved_bytes
        ranks = [rank for rank, left in enumerate(self._left_bytes) if left + size_bytes <= allowed]
        return sorted(ranks, key=lambda rank: self._left_bytes[rank])[: self._most_takers]

    def left(self, rank: int, size_bytes: int) -> None:
        """So much goes to the host from a rank."""
        self._left_bytes[rank] += size_bytes

    def restart(self) -> None:
        """The pass is over."""
        self._saved_bytes = 0
        self._left_bytes = [0] * len(self._left_bytes)
