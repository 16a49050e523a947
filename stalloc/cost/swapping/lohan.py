"""How many bytes of activations to swap to the host, and how many to compute again: what makes a step shortest.

Source: Liao et al., "LoHan", 2024: parameters are streamed, gradients leave in backward, where the processor updates at
once; what takes longest to compute again for a byte is swapped first, so a step's time is convex in the amount.
Contract: no other amount takes less by this model. Of a layer that is swapped in part the same part of its forward pass
is not recomputed. The host has room for all; a disk behind it is not in the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.cost.host_rates import ADAM_PARAMETERS_PER_SECOND
from stalloc.cost.swapping.layers import LayerCost, LinkCost

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class SwapAmount:
    """The best amount, of all that could be swapped."""

    swapped_bytes: int
    saved_bytes: int  #: by all layers, what each is given included, which always leaves
    moved_bytes: int  #: by a step, parameters and gradients included
    recomputed_seconds: float
    seconds: float  #: of a step


def best_amount(layers: Sequence[LayerCost], link: LinkCost) -> SwapAmount:
    """Which amount makes a step shortest, to the byte; of those that do the least."""
    low, high = 0, sum(map(_optional_bytes, layers))
    while low < high:
        middle = (low + high) // 2
        if step_seconds(layers, link, middle + 1) < step_seconds(layers, link, middle):
            low = middle + 1
        else:
            high = middle
    low = min(0, low, key=lambda amount: step_seconds(layers, link, amount))  # a first copy has to begin
    swapped = _given_bytes(layers) + low
    return SwapAmount(
        swapped_bytes=swapped,
        saved_bytes=sum(max(one.saved_bytes, one.boundary_bytes) for one in layers),
        moved_bytes=2 * swapped + 3 * sum(one.parameter_bytes for one in layers),
        recomputed_seconds=_recomputed_seconds(layers, low),
        seconds=step_seconds(layers, link, low),
    )


def step_seconds(layers: Sequence[LayerCost], link: LinkCost, amount_bytes: int) -> float:
    """Seconds of a step that swaps so many bytes beyond the layers' inputs, first what takes longest to recompute."""
    return passes_seconds(layers, link, _given_bytes(layers) + amount_bytes, _recomputed_seconds(layers, amount_bytes))


def passes_seconds(layers: Sequence[LayerCost], link: LinkCost, swapped_bytes: int, recomputed: float) -> float:
    """Seconds of both passes, each as long as its slowest part: computing, one way of the link, or the processor."""
    parameters = sum(one.parameter_bytes for one in layers)
    forward = max(sum(one.forward_seconds for one in layers), link.seconds(swapped_bytes), link.seconds(parameters))
    computed = sum(one.backward_seconds for one in layers) + recomputed
    updated = parameters / _FLOAT_BYTES / ADAM_PARAMETERS_PER_SECOND
    return forward + max(computed, link.seconds(swapped_bytes + parameters), link.seconds(parameters), updated)


def _given_bytes(layers: Sequence[LayerCost]) -> int:
    return sum(min(one.boundary_bytes, one.saved_bytes) for one in layers)


def _optional_bytes(layer: LayerCost) -> int:
    return max(0, layer.saved_bytes - layer.boundary_bytes)


def _recomputed_seconds(layers: Sequence[LayerCost], amount_bytes: int) -> float:
    seconds = 0.0
    for one in sorted(layers, key=lambda one: -one.forward_seconds / max(1, _optional_bytes(one))):
        taken = min(amount_bytes, _optional_bytes(one))
        amount_bytes -= taken
        seconds += one.forward_seconds * (1 - taken / _optional_bytes(one)) if _optional_bytes(one) else 0.0
    return seconds
