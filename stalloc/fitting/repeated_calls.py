"""Blocks that only the calls of a program show: one that is called again and again, or those the script calls itself.

Contract: calls are looked at until `blocks` is asked for; nothing is kept alive, and nothing of the device is used.
What is found in the tree of modules comes first, unless the script calls a model piece by piece.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from stalloc.techniques.repeated_blocks import Block, holds_layers, is_compiled, is_leaf, is_replicated, layers_of

Model = tuple[int, list[Block], "weakref.ref[Any]"]
"""The number of a model, its blocks as the tree of modules has them, and the model."""


class RepeatedCalls:
    """Finds blocks that only the calls of a program show; to be made before the program begins."""

    def __init__(self) -> None:
        self._open: list[int] = []  # modules that are being called, by id
        self._counts: Counter[int] = Counter()  # calls within one that the script itself has made
        self._repeated: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks = [
            register_module_forward_pre_hook(self._called),
            register_module_forward_hook(self._returned, always_call=True),
        ]

    def blocks(self, models: Sequence[Model]) -> list[tuple[int, Block]]:
        """The blocks of all models, each with the number of its model; watching ends here."""
        for hook in self._hooks:
            hook.remove()
        alive = [(number, blocks, model) for number, blocks, one in models if (model := one()) is not None]
        pieces = Counter(layers_of(model) if type(model) is torch.nn.Sequential else type(model) for *_, model in alive)
        found = []
        for number, blocks, model in alive:
            is_piece = pieces[layers_of(model) if type(model) is torch.nn.Sequential else type(model)] > 1
            if is_piece and _can_be(model) and not holds_layers(model):
                blocks = [Block(type(model).__name__, model)]
            elif not is_replicated(model) and not is_compiled(model):
                blocks = [*blocks, *self._within(model, blocks)]
            found += [(number, block) for block in blocks]
        return found

    def _within(self, model: Any, blocks: Sequence[Block]) -> Iterator[Block]:
        """Modules that one call of a model calls several times, outside of its other blocks."""
        taken = {id(module) for block in blocks for module in block.module.modules()}
        for name, module in model.named_modules():
            parts = {id(one) for one in module.modules()}
            if name and module in self._repeated and _can_be(module) and not parts & taken:
                taken |= parts
                yield Block(name, module)

    def _called(self, module: Any, _: Any) -> None:
        if _is_ours():
            if not self._open:
                self._counts.clear()
            elif torch.is_grad_enabled():
                self._counts[id(module)] += 1
                if self._counts[id(module)] > 1:
                    self._repeated.add(module)
            self._open.append(id(module))

    def _returned(self, module: Any, *_: Any) -> None:
        if _is_ours() and id(module) in self._open:
            while self._open.pop() != id(module):
                pass


def _is_ours() -> bool:
    """Whether a call is the program's own, not one of a backward pass or of a compiler."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1


def _can_be(module: Any) -> bool:
    """Whether a module, as it is, can be a block."""
    is_wrapper = type(module).__module__.startswith(("torch.nn.parallel", "torch.nn.modules.container"))
    is_wrapper = is_wrapper and type(module) is not torch.nn.Sequential
    return not (is_leaf(module) or is_wrapper or is_compiled(module)) and any(True for _ in module.parameters())
