"""The repeated blocks of a model: modules of a class that occurs more than once, such as the layers of a transformer.

Contract: blocks do not lie within each other, and come in the order in which the model holds them; only the module
tree is looked at, and lists, tuples and dictionaries of modules that are attributes of one without torch knowing them;
nothing is called or changed; what torch.compile runs is left out. The outermost is taken, but for one that itself holds
layers in a row (an encoder). A module without children of its own, such as a linear layer, is no block: what it would
recompute is what it reads. A long sequence of layers, unlike all beside it, is cut into rows, which are blocks; and
where nothing else is found, so is a forward pass that calls layers statement by statement, if the user asks for it by
STALLOC_CUT_FORWARD=1: its source is compiled anew.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_OF_TORCH, _MOST_LISTED = ("_parameters", "_buffers", "_modules"), 10_000
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
_NOT_CALLED = _CONTAINERS[1:]  #: which have no forward pass
_OF_TRANSFORMERS = "transformers.utils.output_capturing"
"""Hooks of this module note results while its model's forward pass collects them; in backward they do nothing."""


@dataclass(frozen=True)
class Block:
    """One repeated module of a model."""

    name: str  #: within the model, such as "layers.3"
    module: Any

    @property
    def kind(self) -> str:
        return type(self.module).__name__


def find_blocks(model: Any) -> list[Block]:
    modules = held_modules(model)
    unseen = {id(module) for module in modules} - {id(module) for module in model.modules()}
    found = list(_below("", model, Counter(type(module) for module in modules), unseen))
    return found or ([] if is_compiled(model) else _rows("", model) or _parts(model))


def held_modules(model: Any) -> list[Any]:
    """A model, a torch module, and all that it holds, those in plain lists included, each once."""
    found, rest = {}, [model]
    while rest:
        module = rest.pop()
        if id(module) not in found:
            found[id(module)] = module
            rest += [child for _, child in reversed([*module.named_children(), *_in_lists(module)])]
    return list(found.values())


def _in_lists(parent: Any) -> Iterator[tuple[str, Any]]:
    from torch.nn import Module

    for name, value in vars(parent).items():
        if name in _OF_TORCH or type(value) not in (list, tuple, dict) or len(value) > _MOST_LISTED:
            continue
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(child, Module):
                yield f"{name}.{key}", child


def _below(prefix: str, parent: Any, counts: Counter[type], unseen: set[int]) -> Iterator[Block]:
    """Children that are blocks, and the blocks below other children; `unseen` are modules that torch does not know."""
    if is_compiled(parent):
        return
    in_lists = [(name, child) for name, child in _in_lists(parent) if id(child) in unseen]
    unseen = unseen - {id(child) for _, child in in_lists}  # one may hold its parent
    children = [
        (f"{prefix}{name}", child) for name, child in (*parent.named_children(), *in_lists) if not is_leaf(child)
    ]
    siblings = Counter(type(child) for _, child in children)
    alike = Counter(layers_of(child) for _, child in children)
    for name, child in children:
        inner = list(_below(f"{name}.", child, counts, unseen))
        if _is_container(child):
            if not inner and alike[layers_of(child)] == 1 and not is_compiled(child):
                inner = _rows(f"{name}.", child)
            is_block = not inner and siblings[type(child)] > 1 and type(child).__name__ not in _NOT_CALLED
        else:
            is_block = counts[type(child)] > 1 and not holds_layers(child)
        if not is_block:
            yield from inner
        elif any(True for _ in child.parameters()):
            yield Block(name, child)


def _rows(prefix: str, sequence: Any) -> list[Block]:
    from stalloc.techniques.forward_rows import rows_of

    return [Block(f"{prefix}{row.name}", row) for row in rows_of(sequence)]


def _parts(model: Any) -> list[Block]:
    """Rows of statements of the outermost modules, of the program's own classes, whose forward can be cut, if asked."""
    if os.environ.get("STALLOC_CUT_FORWARD") != "1":
        return []
    from stalloc.techniques.forward_rows import rows_of_statements

    found: list[Block] = []
    done: list[str] = []  # names of modules below which nothing is looked at
    for name, module in model.named_modules():
        if name.startswith(tuple(done)):
            continue
        is_own = not type(module).__module__.startswith("torch.")
        rows = rows_of_statements(module) if is_own and not is_compiled(module) else []
        prefix = f"{name}." if name else ""
        found += [Block(f"{prefix}{row.name}", row) for row in rows]
        if rows or is_compiled(module):
            done.append(prefix)
    return found


def layers_of(module: Any) -> tuple[type, ...]:
    return (type(module), *(type(child) for child in module.children()))


def is_leaf(module: Any) -> bool:
    return next(module.children(), None) is None


def holds_layers(module: Any) -> bool:
    """Whether modules of one class lie in a row below a module."""
    rows = (one for one in module.modules() if _is_container(one))
    kinds = ([type(child) for child in _called_of(row) if not is_leaf(child)] for row in rows)
    return any(len(set(found)) < len(found) for found in kinds)


def _called_of(row: Any) -> Iterator[Any]:
    """The modules of a row that are called: its children, or the children of lists and dictionaries among them."""
    for child in row.children():
        if _is_container(child) and type(child).__name__ in _NOT_CALLED:
            yield from _called_of(child)
        else:
            yield child


def _is_container(module: Any) -> bool:
    """Whether a module only holds others in a row, so that what repeats lies in it rather than is it."""
    return type(module).__module__ == "torch.nn.modules.container" and type(module).__name__ in _CONTAINERS


def is_compiled(module: Any) -> bool:
    """Whether torch.compile runs a module, and so decides what is recomputed."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def is_replicated(model: Any) -> bool:
    """Whether a model is copied to several GPUs at each call (nn.DataParallel), so that its blocks are not its own."""
    return type(model).__name__ == "DataParallel" and len(getattr(model, "device_ids", ())) > 1


def why_not(block: Block) -> str:
    """Why the forward pass of a block cannot be run a second time by us; empty if it can."""
    import torch

    if (hooked := hooked_inside(block.module)) is not None:
        return f"{block.name}.{hooked} has forward hooks of the program, which would be called twice"
    is_sharded = _is_sharded_whole(block.module)
    for name, module in block.module.named_modules():
        where = f"{block.name}.{name}" if name else block.name
        if is_compiled(module):
            return f"{where} is compiled by torch.compile, which decides itself what is recomputed"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{where} is a TorchScript module"
        if isinstance(module, torch.nn.RNNBase) and module.dropout > 0:
            return f"{where} drops values by numbers of cuDNN's own, which are not drawn again"
        for part, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if type(tensor) not in (torch.nn.Parameter, torch.Tensor) and not is_sharded:
                return f"{where}.{part} is a {type(tensor).__name__}, a kind of tensor that was not tried"
    return ""


def _is_sharded_whole(module: Any) -> bool:
    """Whether FSDP2 gathers all parameters of a module as plain tensors before its forward and its backward pass."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    if type(module).__name__[:4] != "FSDP" or state is None:
        return False
    group = getattr(state, "_fsdp_param_group", None)
    managed = {id(one.sharded_param) for one in group.fsdp_params if not one.is_dtensor} if group is not None else set()
    return all(id(one) in managed or type(one).__name__ == "Parameter" for one in module.parameters())


def hooked_inside(block: Any) -> str | None:
    """The name of a module below a block with hooks of the program, which a second forward pass would call again. None
    if there is none. Hooks of the block itself are not called by its forward pass."""
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
