"""Two sequences that are nearly the same, side by side.

Contract: pairs ascend in both, and their values are equal. Where the sequences part, the nearest place from which a few
of each agree again is taken, and of what lies between as many as can be have a pair.
"""

from collections.abc import Iterator, Sequence

_AGREE, _MOST_APART = 6, 64  # values that have to agree again; values that may have no pair before they do


def aligned(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Places of equal values, pair by pair."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            yield i, j
            i, j = i + 1, j + 1
            continue
        gap = _gap(one, other, i, j)
        if gap is None:
            return
        yield from ((i + a, j + b) for a, b in _most_pairs(one[i : i + gap[0]], other[j : j + gap[1]]))
        i, j = i + gap[0], j + gap[1]


def _gap(one: Sequence[int], other: Sequence[int], i: int, j: int) -> tuple[int, int] | None:
    """How many values to leave out of each, as few as possible, so that they agree again."""
    for total in range(1, _MOST_APART):
        for left_out in range(total, -1, -1):
            a, b = i + left_out, j + total - left_out
            if a < len(one) and b < len(other) and one[a : a + _AGREE] == other[b : b + _AGREE]:
                return left_out, total - left_out
    return None


def _most_pairs(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The longest common subsequence of two short sequences, by places."""
    longest = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]  # of what is left from each place on
    for i in reversed(range(len(one))):
        for j in reversed(range(len(other))):
            same = one[i] == other[j]
            longest[i][j] = longest[i + 1][j + 1] + 1 if same else max(longest[i + 1][j], longest[i][j + 1])
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            yield i, j
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            i += 1
        else:
            j += 1
