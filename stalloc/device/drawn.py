"""Numbers that are drawn on the virtual GPU, and places that a kernel would have chosen there.

Contract: others stand for them, so that what they choose is about as large as on a real GPU; none counts as known.
Drawn numbers are as many, as far apart and as different. Chosen places lie in between, and differ from each other: the
first one, which zeros would give, is often a token that ends a text or pads it, and nothing chooses an expert twice.
The requests are those of torch's own functions.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from stalloc.device.values import MAX_ELEMENTS, Values

_AMONG = 0.382  # of the places: no simple fraction, as beam search has several vocabularies in a row


def drawer(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """What draws numbers."""
    generator = values.torch.Generator()  # the host's numbers are the program's own

    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if type(result) in values.plain and values.is_small(result) and not result.requires_grad:
            computed = values.compute(function, args, kwargs | {"generator": generator}, makes=True)
            values.learn_drawn(result, None if computed is None else computed[0])
        return result

    return draw


def chooser(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """What chooses places by scores: `argmax` and `max` along a dimension, `multinomial` and `topk` of the last one."""
    arange, several = values.torch.arange, function.__name__ in ("multinomial", "topk")

    def stand_in(scores: Any, result: Any) -> None:
        chosen = result[1] if isinstance(result, tuple) else result
        if type(chosen) not in values.plain or not values.is_followed(chosen) or not 0 < chosen.numel() <= MAX_ELEMENTS:
            return
        if scores.dtype in values.kinds or values.keeps(scores):
            return  # the function was followed
        if several and chosen.shape[:-1] != scores.shape[:-1]:
            return
        num_places = scores.shape[-1] if several else scores.numel() // chosen.numel()
        with contextlib.suppress(NotImplementedError), values.unseen():  # under vmap a tensor has no memory
            first = int(_AMONG * num_places)
            picks = arange(first, first + (chosen.shape[-1] if several else 1), device="cpu") % num_places
            values.learn_drawn(chosen, (picks if several else picks[0]).expand(chosen.shape).contiguous())

    @functools.wraps(function)
    def choose(a: Any = None, *more: Any, **named: Any) -> Any:
        if a is None:
            result = function(**named)
            stand_in(named["input"], result)
        else:
            result = function(a, *more, **named)
            stand_in(a, result)
        return result

    return choose
