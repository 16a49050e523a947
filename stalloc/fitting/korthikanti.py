"""What a layer of a transformer saves for its backward pass: the formulas of Korthikanti et al., and what is measured.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, sections 4.1 and 5.
Contract: formulas are of a layer as in their figure 2, in half precision, with dropout and attention written out,
without parallelism; what is measured is what the layer leaves allocated, its result instead of its input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalloc.errors import BadInputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of activations that one transformer layer saves, by the formula and as measured."""

    formula_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """How far the formula is off, relative to it."""
        return self.measured_bytes / self.formula_bytes - 1


def layer_bytes(sequence: int, batch: int, width: int, heads: int, *, selective: bool = False) -> int:
    """s·b·h·(34 + 5·a·s/h) bytes, or s·b·h·34 where the core of attention is recomputed."""
    core = 0 if selective else 5 * heads * sequence * sequence * batch
    return 34 * sequence * batch * width + core


def compare_layer(
    layer: "Callable[[torch.Tensor], Any]", inputs: "torch.Tensor", heads: int, *, selective: bool = False
) -> LayerBytes:
    """The formula for inputs (s, b, h), and what a call of the layer leaves allocated on their device.

    A first call, which may make workspaces, is not counted. Raises BadInputError for inputs that are not of that form.
    """
    import torch

    if inputs.dim() != 3 or not inputs.is_cuda or inputs.element_size() != 2:
        raise BadInputError("the formulas are for inputs (sequence, batch, width) in half precision on a GPU.")
    sequence, batch, width = inputs.shape
    warm = layer(inputs)
    del warm
    before = torch.cuda.memory_allocated(inputs.device)
    kept = layer(inputs)
    measured = torch.cuda.memory_allocated(inputs.device) - before
    del kept
    return LayerBytes(layer_bytes(sequence, batch, width, heads, selective=selective), measured)
