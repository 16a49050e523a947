"""Where along a row of runs something stops being enough.

Contract: a run showed that the answer is enough, and a run showed that the next place is not. The answer is the last
place that is enough if no place after one that is not enough is enough again, which holds for tokens in a cache whose
program's weights and activations grow with the value, or for cards in the order of their memory.
"""

from collections.abc import Callable, Sequence


def last_enough(num: int, enough: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """The last of `num` places that is enough, -1 if the first is not; `enough` tries several places side by side."""
    low, high = -1, num
    while high - low > 1:
        third = max((high - low) // 3, 1)
        places = sorted({low + third, high - third} - {low, high})
        for place, is_enough in zip(places, enough(places), strict=True):
            if is_enough:
                low = max(low, place)
            else:
                high = min(high, place)
                break
    return low
