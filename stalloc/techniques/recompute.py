"""Recomputation: the forward pass of a block is run again when backward needs what it would have saved.

Contract: the block's `forward` is wrapped, not the block, so that names, state_dict and hooks stay; a saved or copied
model is without the wrapping or with its own. torch's checkpoint does the work (autocast and torch's random state are
its part); BlockTape sees to it that what is kept and what has effects comes out the same. Without gradients, under
torch.compile, in transforms of torch.func, while tracing, in a checkpoint of the program's own and with hooks of the
program inside, a block runs as it is. What a block changes in the program's own checkpoint (statistics, counts) is
changed twice in the unmodified program, and would change once in ours. TorchScript in a block is refused: it computes
the first calls of a function operation by operation, and later ones with derivatives of its own, which save other
tensors for backward.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from stalloc.errors import RecomputeError
from stalloc.techniques.block_tape import BlockTape, Wanted, current_block
from stalloc.techniques.forward_rows import ExchangedForward
from stalloc.techniques.module_state import ModuleState, as_it_is_now
from stalloc.techniques.repeated_blocks import Block, hooked_inside, why_not

_HOOKS = torch._C._autograd
_OF_CHECKPOINTS = ("_checkpoint_hook.", "_recomputation_hook.")  # torch's classes for the two runs of a checkpoint

MakeTape = Callable[[str, Wanted, Sequence[Any]], BlockTape]
"""Makes the tape of one call, given the block's name, what is to be kept, and the tensors that it was called with."""


class Checkpoint:
    """A way to drop what the first run of a block would save, and to make the second run when it is needed. Here that
    of torch: everything is dropped at once, and recomputed when backward first asks for any of it."""

    def is_wanted(self, block: Any) -> bool:
        """Whether a block (a module) that is about to run is to run in this way."""
        return True

    def __call__(self, run: Callable[..., Any], values: list[Any], tape: BlockTape) -> Any:
        """The results of `run(*values)`, recorded on the tape, which a later run repeats."""
        contexts = tape.recording(), tape.repeating()
        return torch_checkpoint(run, *values, use_reentrant=False, context_fn=lambda: contexts)


class RecomputedForward(ExchangedForward):
    """What takes the place of the `forward` of a block that is recomputed."""

    def __init__(self, name: str, block: Any, wanted: Wanted, make_tape: MakeTape, checkpoint: Checkpoint) -> None:
        super().__init__(block)
        self._name, self._wanted, self._make_tape, self._checkpoint = name, wanted, make_tape, checkpoint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the block, with nothing saved but its inputs and what is kept."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing() or in_transform():
            return self.original(*args, **kwargs)
        if in_program_checkpoint() or not self._checkpoint.is_wanted(self._module) or self._is_hooked():
            return self.original(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs), is_leaf=lambda one: type(one) not in (tuple, list, dict))
        values, places = _distinct([one if isinstance(one, torch.Tensor) else as_it_is_now(one) for one in leaves])
        given = [(args, kwargs)]  # gone after the forward pass, so that nothing is held for longer than by the program
        del args, kwargs
        tape = self._make_tape(self._name, self._wanted, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        state = ModuleState(self._name, self._module)
        tape.watch(state)

        def run(*held_now: Any) -> Any:
            if given:
                positional, named = given.pop()
                with _ours():
                    outputs = self.original(*positional, **named)
                tape.finish(outputs)
                return outputs
            tape.begin_again()
            positional, named = tree_unflatten([as_it_is_now(held_now[place]) for place in places], structure)
            with _ours(), state.as_before():
                return self.original(*positional, **named)

        return self._checkpoint(run, values, tape)

    def _is_hooked(self) -> bool:
        """Whether the program has put hooks into the block since it was wrapped; says so once."""
        if (hooked := hooked_inside(self._module)) is not None:
            warnings.warn(
                f"stalloc: {self._name} is not recomputed: {self._name}.{hooked} has got forward hooks, which would be "
                "called twice.",
                stacklevel=3,
            )
        return hooked is not None


def _distinct(leaves: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """What a block is given, each tensor once, and the place of each leaf in that: blocks ask whether two are the same
    one, and hooks on what is saved (to the host and back) make another tensor of each."""
    values: list[Any] = []
    places: list[int] = []
    place_of: dict[int, int] = {}  # of tensors
    for leaf in leaves:
        place = place_of.get(id(leaf), len(values))
        if place == len(values):
            values.append(leaf)
        if isinstance(leaf, torch.Tensor):
            place_of[id(leaf)] = place
        places.append(place)
    return values, places


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
    _refuse_scripts_in_blocks()
    done, left, how = {}, {}, checkpoint or Checkpoint()
    for block, keep in zip(blocks, wanted, strict=True):
        reason = why_not(block)
        if isinstance(vars(block.module).get("forward"), RecomputedForward):
            reason = f"{block.name} is recomputed already"
        if reason:
            left[block.name] = reason
        else:
            done[block.name] = RecomputedForward(block.name, block.module, keep, make_tape, how)
            block.module.forward = done[block.name]
    return Recomputation(tuple(done), left, tuple(done.values()))


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap) is active, in which saved tensors cannot be exchanged."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class _Place(threading.local):
    """Where the innermost run of one of our blocks began: how many checkpoints, and which backward pass (-1: none)."""

    mark = (0, -1)


_place = _Place()


def in_program_checkpoint() -> bool:
    """Whether what is called now is in a checkpoint of the program's, in its forward pass or its second one. Our own
    checkpoints, in which blocks within a block of ours run, and hooks of other kinds are told apart."""
    return _here() != _place.mark


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """A context for a run of one of our blocks, within our checkpoint."""
    before, _place.mark = _place.mark, _here()
    try:
        yield
    finally:
        _place.mark = before


def _here() -> tuple[int, int]:
    return _num_checkpoints(), torch._C._current_graph_task_id()


def _num_checkpoints() -> int:
    """The number of checkpoints whose hooks on saved tensors are in force; torch shows only the uppermost hooks."""
    above, found = [], 0
    try:
        while (hooks := _uppermost()) is not None:
            above.append(hooks)
            _HOOKS._pop_saved_tensors_default_hooks()
            pack = hooks[0]
            is_torchs = getattr(pack, "__module__", "") == "torch.utils.checkpoint"
            found += is_torchs and getattr(pack, "__qualname__", "").startswith(_OF_CHECKPOINTS)
    finally:
        for hooks in reversed(above):
            _HOOKS._push_saved_tensors_default_hooks(*hooks)
    return found


def _uppermost() -> Any:
    try:
        return _HOOKS._top_saved_tensors_default_hooks(False)
    except TypeError:  # older releases take no argument
        return _HOOKS._top_saved_tensors_default_hooks()


@functools.cache
def _refuse_scripts_in_blocks() -> None:
    """Check each call of TorchScript from here on, and refuse those in blocks whose results have gradients."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _watched(kind.__call__)


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_and_look(script: Any, *args: Any, **kwargs: Any) -> Any:
        results = call(script, *args, **kwargs)
        has_gradients = any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(results))
        if has_gradients and (block := current_block()):
            raise RecomputeError(
                f"{block} cannot be computed twice: it calls {script.name}, which is TorchScript and saves other "
                "tensors for backward from its second call on. Leave this block as it is."
            )
        return results

    return call_and_look
