"""The models of a program that was not written for it, as they appear: when each is called for the first time.

Contract: a model is a module with parameters that is called by the program itself, not by another module; models are
numbered in the order of their first call, which is that of every run of the program. Modules are watched
until the first step of an optimizer has ended: until then each call of any module costs a look, later none does.
"""

import weakref
from collections.abc import Callable
from typing import Any

from stalloc.techniques.module_calls import Call, ModuleCalls
from stalloc.techniques.recompute import MakeTape, wrap
from stalloc.techniques.recompute_settings import BlockSettings, RecomputeSettings
from stalloc.techniques.repeated_blocks import Block, find_blocks, held_modules, is_replicated

Appeared = Callable[[int, list[Block], Any], None]
"""Called with the number of a model, its repeated blocks and itself, before its first forward pass; before the second
of one with lazy layers, which have no parameters before."""


_ASKED: list[Callable[[Any], None]] = []
"""The functions that are told of each call of a module before it is made, in the order in which they asked."""


def when_models_appear(appeared: Appeared) -> None:
    """Call `appeared` for each model of the program, in time for its own `forward` to be exchanged.

    Of several, the one that asked first is called first, so what a later one puts around a `forward` has what the
    earlier one made of it inside. torch is imported by now.
    """
    known: weakref.WeakSet[Any] = weakref.WeakSet()
    unfinished: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose layers get their shapes in their first call
    num_models = 0

    def about_to_call(module: Any) -> None:
        nonlocal num_models
        if module in unfinished and not _is_unfinished(module):
            unfinished.discard(module)
            known.difference_update(held_modules(module))
        if module in known:
            return
        if _is_unfinished(module):
            unfinished.add(module)
            known.update(held_modules(module))
            return
        blocks = [block for block in find_blocks(module) if block.module not in known and not is_replicated(module)]
        known.update(held_modules(module))
        if any(True for _ in module.parameters()):
            num_models += 1
            appeared(num_models - 1, blocks, module)

    _ASKED.append(about_to_call)
    if len(_ASKED) == 1:
        _watch()


def _is_unfinished(model: Any) -> bool:
    """Whether a model has parameters or buffers that the first call of their layer will make."""
    from torch.nn.parameter import is_lazy

    return any(is_lazy(one) for held in (model.parameters(), model.buffers()) for one in held)


def _watch() -> None:
    """Tell those who asked of each call, until the first step of an optimizer has ended."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def make(call: Call) -> Call:
        def look_and_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # torch.compile looks into calls too
                for about_to_call in _ASKED:
                    about_to_call(module)
            return call(module, *args, **kwargs)

        return look_and_call

    watching = ModuleCalls(make)  # as a model's hooks are called after its forward has been looked up

    def stop(*_: Any) -> None:
        _ASKED.clear()
        watching.remove()  # later, where somebody else watches in front of this

    register_optimizer_step_post_hook(stop)  # stays, as it must not go while hooks are called


def recompute_as_models_appear(
    settings: RecomputeSettings, say: Callable[[str], None], make_tape: Callable[[int], MakeTape]
) -> None:
    """Recompute the blocks that the settings name in this program's models as they appear; `say` what does not fit.

    `make_tape` gives, for the number of a model, what makes the tapes of its blocks.
    """

    def appeared(model: int, blocks: list[Block], module: Any) -> None:
        wanted = settings.of_model(model)
        known = {**_modules_of(module), **{block.name: block for block in blocks}} if wanted else {}
        found = {name: known[name] for name in wanted if name in known}
        strange = [name for name, one in wanted.items() if name not in found or found[name].kind != one.kind]
        if strange:
            say(
                f"the program has no block {strange[0]} of class {wanted[strange[0]].kind} any more: its blocks stay "
                "as they are. Fit it anew with stalloc fit."
            )
            return
        chosen = list(found.values())
        done = wrap(chosen, [_keeping(wanted[block.name]) for block in chosen], make_tape(model))
        for reason in list(done.left.values())[:1]:
            say(f"{len(done.left)} of {len(chosen)} blocks stay as they are: {reason}.")

    when_models_appear(appeared)


def _modules_of(model: Any) -> dict[str, Block]:
    """A model, by its class, and what lies in it: a fit may have found any of them to be called several times."""
    named = [(name or type(model).__name__, module) for name, module in model.named_modules()]
    return {name: Block(name, module) for name, module in named}


def _keeping(block: BlockSettings) -> Callable[[int, str], bool]:
    kept = frozenset(block.keep)
    return lambda position, name: (position, name) in kept
