"""The repeated blocks of a model: modules of one class that lie side by side, such as the layers of a transformer.

Contract: blocks do not lie within each other, and come in the order in which the model holds them; only the module tree
is looked at, nothing is called or changed. A module without children of its own, such as a linear layer, is no block:
what it would recompute is what it reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


@dataclass(frozen=True)
class Block:
    """One repeated module of a model."""

    name: str  #: within the model, such as "layers.3"
    module: Any

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.module).__name__


def find_blocks(model: Any) -> list[Block]:
    """The repeated blocks below `model`, a torch module."""
    return list(_below("", model))


def _below(prefix: str, parent: Any) -> Iterator[Block]:
    """Children that are blocks, and of the others what lies below them."""
    children = [(f"{prefix}{name}", child) for name, child in parent.named_children()]
    counts: dict[type, int] = {}
    for _, child in children:
        counts[type(child)] = counts.get(type(child), 0) + 1
    for name, child in children:
        is_leaf = next(child.children(), None) is None
        if is_leaf:
            continue
        inner = list(_below(f"{name}.", child)) if _is_container(child) or counts[type(child)] == 1 else []
        if inner or counts[type(child)] == 1:
            yield from inner  # a stage of layers is no block: its layers are
        elif any(True for _ in child.parameters()):
            yield Block(name, child)


def _is_container(module: Any) -> bool:
    """Whether a module only holds others in a row, so that what repeats lies in it rather than is it."""
    return type(module).__module__ == "torch.nn.modules.container" and type(module).__name__ in _CONTAINERS


def why_not(block: Block) -> str:
    """Why the forward pass of a block cannot be run a second time by us; empty if it can."""
    import torch

    for name, module in block.module.named_modules():
        where = f"{block.name}.{name}" if name else block.name
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return f"{where} is compiled by torch.compile, which decides itself what is recomputed"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{where} is a TorchScript module"
        if isinstance(module, torch.nn.RNNBase) and module.dropout > 0:
            return f"{where} drops values by numbers of cuDNN's own, which are not drawn again"
        if name and (module._forward_hooks or module._forward_pre_hooks):
            return f"{where} has forward hooks of the program, which would be called twice"
        for part, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if type(tensor) not in (torch.nn.Parameter, torch.Tensor):
                return f"{where}.{part} is a {type(tensor).__name__}, a kind of tensor that was not tried"
    return ""
