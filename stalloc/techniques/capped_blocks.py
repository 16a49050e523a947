"""Which calls of a program's modules are blocks that a cap may drop: repeated blocks, and modules beside them.

Contract: blocks do not lie within each other. A module that is called several times in a step, such as the cell of a
recurrent network or of a tree, is one block a call.
"""

import functools
import warnings
from typing import Any

from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.block_tape import keeps_nothing
from stalloc.techniques.late_checkpoint import LateCheckpoint
from stalloc.techniques.recompute import wrap
from stalloc.techniques.repeated_blocks import Block, held_modules, is_compiled, is_leaf


def drop_blocks_of_models(checkpoint: LateCheckpoint) -> None:
    """Make the blocks of the models of this program droppable, as they appear."""

    def appeared(number: int, blocks: list[Block], model: Any) -> None:
        if is_compiled(model):
            name = type(getattr(model, "_orig_mod", model)).__name__
            warnings.warn(
                f"stalloc: {name} is compiled as a whole, so nothing that it saves can be evicted before its forward "
                "pass is over. Where the cap cannot be kept, compile its blocks one by one (block.compile()).",
                stacklevel=2,
            )
        chosen = blocks + _beside(model, blocks)
        wrap(chosen, [keeps_nothing] * len(chosen), functools.partial(checkpoint.make_tape, number), checkpoint)

    when_models_appear(appeared)


def _beside(model: Any, blocks: list[Block]) -> list[Block]:
    """The outermost modules with layers that hold no block, lie in none and are not the model itself."""
    taken = {id(one) for block in blocks for one in held_modules(block.module)}
    found: list[Block] = []
    for name, module in model.named_modules():
        if is_compiled(module):
            taken.update(map(id, held_modules(module)))
        if module is model or is_leaf(module) or id(module) in taken or type(module).forward is _without_forward():
            continue
        below = held_modules(module)
        if not any(id(one) in taken for one in below):
            taken.update(map(id, below))
            found.append(Block(name, module))
    return found


def _without_forward() -> Any:
    """What a module that is never called (a list of modules) has for its forward pass."""
    from torch.nn import Module

    return Module.forward
