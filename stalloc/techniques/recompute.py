"""Recomputation: the forward pass of a block is run again when backward needs what it would have saved.

Contract: the block's `forward` is wrapped, not the block, so that names, state_dict and hooks stay; a saved or copied
model is without the wrapping or with its own. torch's checkpoint does the work (autocast and torch's random state are
its part); BlockTape sees to it that what is kept and what has effects comes out the same. Without gradients, under
torch.compile, in transforms of torch.func, while tracing, in a checkpoint of the program's own and with hooks of the
program inside, a block runs as it is.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from stalloc.techniques.block_tape import BlockTape, Wanted
from stalloc.techniques.inner_hooks import hooked_inside
from stalloc.techniques.module_state import ModuleState, as_it_is_now
from stalloc.techniques.program_checkpoints import in_program_checkpoint, ours
from stalloc.techniques.repeated_blocks import Block, why_not
from stalloc.techniques.script_calls import refuse_scripts_in_blocks

MakeTape = Callable[[str, Wanted, Sequence[Any]], BlockTape]
"""Makes the tape of one call, given the block's name, what is to be kept, and the tensors that it was called with."""


class Checkpoint(Protocol):
    """A way to drop what the first run of a block would save, and to make the second run when it is needed."""

    def is_wanted(self, block: Any) -> bool:
        """Whether a block (a module) that is about to run is to run in this way."""

    def __call__(self, run: Callable[..., Any], values: list[Any], tape: BlockTape, /) -> Any:
        """The results of `run(*values)`, recorded on the tape, which a later run repeats."""


class AlwaysRecomputed:
    """torch's checkpoint: everything is dropped at once, and recomputed when backward first asks for any of it."""

    def is_wanted(self, block: Any) -> bool:
        """Always true."""
        return True

    def __call__(self, run: Callable[..., Any], values: list[Any], tape: BlockTape) -> Any:
        """See `Checkpoint`."""
        contexts = tape.recording(), tape.repeating()
        return torch_checkpoint(run, *values, use_reentrant=False, context_fn=lambda: contexts)


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap) is active, in which saved tensors cannot be exchanged."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class RecomputedForward:
    """What takes the place of a block's `forward`."""

    def __init__(self, name: str, block: Any, wanted: Wanted, make_tape: MakeTape, checkpoint: Checkpoint) -> None:
        functools.update_wrapper(self, block.forward)
        self._name, self._block, self._wanted, self._make_tape = name, block, wanted, make_tape
        self._checkpoint = checkpoint
        self._instance_forward = vars(block).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the block, with nothing saved but its inputs and what is kept."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing() or in_transform():
            return self.original(*args, **kwargs)
        if in_program_checkpoint() or not self._checkpoint.is_wanted(self._block) or self._is_hooked():
            return self.original(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs), is_leaf=lambda one: type(one) not in (tuple, list, dict))
        held = _Held([one if isinstance(one, torch.Tensor) else as_it_is_now(one) for one in leaves])
        given = [(args, kwargs)]  # gone after the forward pass, so that nothing is held for longer than by the program
        del args, kwargs
        tape = self._make_tape(self._name, self._wanted, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        state = ModuleState(self._name, self._block)
        tape.watch(state)

        def run(*held_now: Any) -> Any:
            if given:
                positional, named = given.pop()
                with ours():
                    outputs = self.original(*positional, **named)
                tape.finish(outputs)
                return outputs
            tape.begin_again()
            inputs = held.as_given(held_now)
            positional, named = tree_unflatten([as_it_is_now(one) for one in inputs], structure)
            with ours(), state.as_before():
                return self.original(*positional, **named)

        return self._checkpoint(run, held.take(), tape)

    def _is_hooked(self) -> bool:
        """Whether the program has put hooks into the block since it was wrapped; says so once."""
        hooked = hooked_inside(self._block)
        if hooked is not None:
            warnings.warn(
                f"stalloc: {self._name} is not recomputed: {self._name}.{hooked} has got forward hooks, which would be "
                "called twice.",
                stacklevel=3,
            )
        return hooked is not None

    @property
    def original(self) -> Any:
        """The forward pass as it was."""
        return self._instance_forward or type(self._block).forward.__get__(self._block)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RecomputedForward":
        """The forward of a copy of the block, which recomputes that copy."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    def __reduce__(self) -> Any:
        """A saved model is as the program made it, and is read without stalloc."""
        return getattr, (self._block, "forward")

    def undo(self) -> None:
        """Put the block's own forward back."""
        if vars(self._block).get("forward") is not self:
            return
        if self._instance_forward is None:
            del self._block.forward
        else:
            self._block.forward = self._instance_forward


class _Held:
    """What a block was given, each tensor once: blocks ask whether two are the same one, and hooks on what is saved (to
    the host and back) make another tensor of each."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.values: list[Any] = []
        self._places: list[int] = []  # among these, of each leaf
        places: dict[int, int] = {}
        for leaf in leaves:
            place = places.get(id(leaf), len(self.values))
            if place == len(self.values):
                self.values.append(leaf)
            if isinstance(leaf, torch.Tensor):
                places[id(leaf)] = place
            self._places.append(place)

    def take(self) -> list[Any]:
        """The values, which are no longer held here."""
        values, self.values = self.values, []
        return values

    def as_given(self, values: Sequence[Any]) -> list[Any]:
        """All leaves of the nested values, with the values as they are now."""
        return [values[place] for place in self._places]


@dataclass(frozen=True)
class Recomputation:
    """What `checkpoint` did to a model."""

    names: tuple[str, ...]  #: the blocks that are recomputed
    left: dict[str, str]  #: blocks that stay as they are, and why
    forwards: tuple[RecomputedForward, ...]

    def undo(self) -> None:
        """Give every block its own forward back."""
        for forward in self.forwards:
            forward.undo()


def wrap(
    blocks: Sequence[Block],
    wanted: Sequence[Wanted],
    make_tape: MakeTape = BlockTape,
    checkpoint: Checkpoint | None = None,
) -> Recomputation:
    """Recompute blocks, keeping of each what is wanted; blocks that cannot be recomputed are left as they are."""
    refuse_scripts_in_blocks()
    names, left, forwards, how = [], {}, [], checkpoint or AlwaysRecomputed()
    for block, keep in zip(blocks, wanted, strict=True):
        reason = why_not(block)
        if isinstance(vars(block.module).get("forward"), RecomputedForward):
            reason = f"{block.name} is recomputed already"
        if reason:
            left[block.name] = reason
            continue
        block.module.forward = RecomputedForward(block.name, block.module, keep, make_tape, how)
        names.append(block.name)
        forwards.append(block.module.forward)
    return Recomputation(tuple(names), left, tuple(forwards))
