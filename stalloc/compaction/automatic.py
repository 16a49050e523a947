"""Compaction that happens by itself, where the user allows it: at a mark of a step, when memory was short.

Contract: off until `allow_compaction` is called. Nothing moves in the middle of a step, since kernels may hold
addresses there: stalloc notes what it lacked (room for a plan's arena, a request that was refused, or for which all
that was unused had to be given back) and makes room for it at the next mark. A request that was refused stays refused;
what comes after the mark finds the room. Nothing here keeps a module, an optimizer or a tensor alive.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from stalloc.compaction.adopting import compact_device
from stalloc.compaction.emptying import Relocation
from stalloc.compaction.execution import Copy
from stalloc.errors import BadInputError, SetupError, StallocError


@dataclass(eq=False)
class Allowance:
    """What may be moved, and what was."""

    relocations: list[Relocation] = field(default_factory=list)  #: one for each time that something moved
    refusals: list[str] = field(default_factory=list)  #: why room could not be made, the last ones

    def stop(self) -> None:
        """Stop making room by moving memory."""
        from stalloc.runtime import current

        runtime = current()
        if runtime is not None and runtime.room_maker == self._make_room:
            runtime.allow_moving(None)

    def _begin(
        self, objects: tuple[Any, ...], exclude: Iterable[Any], gradients: bool, copy: Copy | None, runtime: Any
    ) -> None:
        self._objects = [_weak(thing) for thing in objects]
        self._exclude = [_weak(thing) for thing in exclude]
        self._gradients, self._copy = gradients, copy
        runtime.allow_moving(self._make_room)

    def _make_room(self, index: int, needed_bytes: int, as_far_as_it_goes: bool) -> None:
        import torch

        objects = [thing for thing in (kept() for kept in self._objects) if thing is not None]
        exclude = [thing for thing in (kept() for kept in self._exclude) if thing is not None]
        device, result = torch.device("cuda", index), Relocation()
        for needed in (needed_bytes, None) if as_far_as_it_goes else (needed_bytes,):
            try:
                compact_device(device, objects, exclude, self._gradients, needed, result, self._copy)
                break
            except (StallocError, RuntimeError) as error:  # the program only marked a step
                self.refusals[:] = [*self.refusals[-9:], str(error)]
        if result.num_moved:
            self.relocations.append(result)


def allow_compaction(
    *objects: Any, exclude: Iterable[Any] = (), gradients: bool = True, copy: Copy | None = None
) -> Allowance:
    """Let stalloc compact by itself, at marks of steps, what lives in modules, optimizers and tensors.

    A function among `objects` is called each time, for what it returns (a list of tensors that changes, say). A later
    call takes the place of an earlier one. `exclude`, `gradients`, `copy`: as in `compact`.

    Raises SetupError before stalloc is installed, BadInputError for a container.
    """
    from stalloc.runtime import needed

    runtime = needed()
    if runtime is None:
        raise SetupError("stalloc is not installed in this process: call stalloc.install() first.")
    allowed = Allowance()
    allowed._begin(objects, exclude, gradients, copy, runtime)
    return allowed


def _weak(thing: Any) -> Callable[[], Any]:
    """A function that returns a thing as long as others keep it, then None."""
    import torch

    if isinstance(thing, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return weakref.ref(thing)
    if callable(thing):
        return thing
    raise BadInputError(
        f"a {type(thing).__name__} cannot be watched: give modules, optimizers and tensors one by one, or a function "
        "that returns it."
    )
