"""Hooks of the program on modules inside a block, which a second forward pass would call a second time."""

from typing import Any

_OF_TRANSFORMERS = "transformers.utils.output_capturing"
"""Hooks of this module note results while its model's forward pass collects them; in backward they do nothing."""


def hooked_inside(block: Any) -> str | None:
    """The name of a module below a block whose hooks must not be called twice; None if there is none.

    Hooks of the block itself are not called by its forward pass.
    """
    for name, module in block.named_modules():
        if name and (module._forward_hooks or module._forward_pre_hooks):
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if not all(_may_be_called_twice(hook) for hook in hooks):
                return str(name)
    return None


def _may_be_called_twice(hook: Any) -> bool:
    """Whether a hook only notes results, or is torch's own hook that computes a weight before its use."""
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    return type(hook) in (SpectralNorm, WeightNorm) or getattr(hook, "__module__", "") == _OF_TRANSFORMERS
