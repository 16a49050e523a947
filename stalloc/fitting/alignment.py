"""Two sequences that are nearly the same, side by side.

Contract: pairs ascend in both sequences, and their values are equal. Where the sequences part, they are joined at the
nearest place from which a few values agree again, and as many values as possible between are paired; if there is no
such place near, as many as possible of a longer piece of both are paired.
"""

from collections.abc import Iterator, Sequence

_AGREE, _MOST_APART = 6, 64  # values that have to agree again; values that may have no pair before they do
_PIECE = 2048  # values of each that are compared where none agree again


def aligned(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The places of equal values in two sequences, pair by pair."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            yield i, j
            i, j = i + 1, j + 1
            continue
        gap = _gap(one, other, i, j)
        a, b = gap or (_PIECE, _PIECE)
        pairs = _most_pairs(one[i : i + a], other[j : j + b])
        if gap is None and (i + a < len(one) or j + b < len(other)):  # the end of a piece is paired with what is left
            a, b = a // 2, b // 2
            pairs = [pair for pair in pairs if pair[0] < a and pair[1] < b]
            a, b = (pairs[-1][0] + 1, pairs[-1][1] + 1) if pairs else (a, b)
        yield from ((i + k, j + m) for k, m in pairs)
        i, j = i + a, j + b


def _gap(one: Sequence[int], other: Sequence[int], i: int, j: int) -> tuple[int, int] | None:
    """How many values to leave out of each sequence, as few as possible, so that the sequences agree again."""
    for total in range(1, _MOST_APART):
        for left_out in range(total, -1, -1):
            a, b = i + left_out, j + total - left_out
            if a < len(one) and b < len(other) and one[a : a + _AGREE] == other[b : b + _AGREE]:
                return left_out, total - left_out
    return None


def _most_pairs(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    """The longest common subsequence of two sequences, by places (Hyyrö 2004, a column of the table in each number).

    A bit of a column is 0 where the subsequence becomes longer with that value of `one`.
    """
    all_places = (1 << len(one)) - 1
    places: dict[int, int] = {}
    for place, value in enumerate(one):
        places[value] = places.get(value, 0) | 1 << place
    columns = [all_places]
    for value in other:
        longer = columns[-1] & places.get(value, 0)
        columns.append(((columns[-1] + longer) | (columns[-1] - longer)) & all_places)
    pairs = []
    i, j = len(one) - 1, len(other)
    while i >= 0 and j > 0:
        if columns[j] >> i & 1:
            i -= 1
        else:
            j -= 1
            if columns[j] >> i & 1:
                pairs.append((i, j))
                i -= 1
    return pairs[::-1]
