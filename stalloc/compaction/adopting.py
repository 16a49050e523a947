"""What programs call: adopt what already lives, compact what has holes, lay tensors out in contiguous buffers.

Contract: values never change, only addresses; every tensor on a moved storage follows. What may not move is left alone
and listed with its reason. To be called between steps: a pointer that somebody took from `data_ptr()` and keeps (NCCL's
registered buffers, CUDA graphs outside torch, a kernel of the user's) has to be named in `exclude`.

Where `allow_compaction` is called, it happens by itself: stalloc notes what it lacked (room for a plan's arena, a
request that was refused, or for which all that was unused had to be given back) and makes room for it at the next mark
of a step. A request that was refused stays refused. Nothing here keeps a module, an optimizer or a tensor alive.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stalloc.compaction.emptying import (
    HeapView,
    Relocation,
    by_segment,
    heap_view,
    move,
    move_in_rounds,
    segments_to_empty,
)
from stalloc.compaction.schedule import Copy
from stalloc.compaction.torch_storages import Candidate, candidates, move_together, release, tensors_of
from stalloc.errors import BadInputError, SetupError, StallocError


def adopt(
    *objects: Any,
    exclude: Iterable[Any] = (),
    gradients: bool = False,
    cap_bytes: int | None = None,
    copy: Copy | None = None,
) -> Relocation:
    """Move what lives in modules, optimizers and tensors into buffers without gaps; give the old segments back.

    Buffers are filled segment by segment, so that reserved memory never exceeds `cap_bytes` (default: what the device
    has); with no room at all the bytes go through host memory. `gradients`: move those too, which is of use only if
    they are kept from step to step. `copy` replaces the batched kernel.

    Raises BadInputError if reserved memory is above the cap already, in which case nothing moves.
    """
    result = Relocation()
    for device, group in _by_device(objects, exclude, gradients, result).items():
        view = heap_view(device)
        held_bytes = _reserved_bytes(view)
        result.reserved_before_bytes += held_bytes
        if cap_bytes is not None and held_bytes > cap_bytes:
            raise BadInputError(
                f"device {device.index} holds {held_bytes} bytes already, above the cap of {cap_bytes}: ask for "
                "more, or free memory first."
            )
        if view is None:
            move(group, result, copy)
        else:
            contents = by_segment(view, sorted(group, key=lambda member: member.address)).values()
            with view.controller.full_device.moving():
                move_in_rounds(view, list(contents), cap_bytes, result, copy, slides=False)
        result.reserved_after_bytes += _reserved_bytes(view)
    return result


def compact(
    *objects: Any,
    needed_bytes: int | None = None,
    exclude: Iterable[Any] = (),
    gradients: bool = True,
    copy: Copy | None = None,
) -> Relocation:
    """Empty segments that have holes, those that give back the most for the fewest bytes moved first.

    Stops as soon as the device can give `needed_bytes` in one piece; None: all that pays. Only segments whose every
    live block is among `objects` (modules, optimizers, tensors, containers) and may move are emptied. Where the device
    has no room for a copy of even one of them, blocks are packed inside the segments first; no other thread may
    allocate on the device meanwhile.

    Raises BadInputError, and moves nothing, if `needed_bytes` cannot be reached.
    """
    result = Relocation()
    groups = _by_device(objects, exclude, gradients, result)
    if needed_bytes is not None and not any(device.type == "cuda" for device in groups):
        raise BadInputError(f"{needed_bytes} bytes cannot be freed: none of the objects has memory on a GPU.")
    for device, group in groups.items():
        _compact(device, group, needed_bytes, result, copy, slides=True)
    return result


def _compact(
    device: Any, group: list[Candidate], needed: int | None, result: Relocation, copy: Copy | None, *, slides: bool
) -> None:
    release(device)
    view = heap_view(device)
    if view is None:
        return
    result.reserved_before_bytes += _reserved_bytes(view)
    chosen = segments_to_empty(view, group, needed, result)
    with view.controller.full_device.moving():
        move_in_rounds(view, chosen, None, result, copy, slides=slides)
    result.reserved_after_bytes += _reserved_bytes(view)


def compact_when_full(function: Callable[..., Any], *objects: Any, **options: Any) -> Callable[..., Any]:
    """`function`, which is called once more, after `compact(*objects, **options)`, if the device runs out of memory.

    It has to be something that can begin anew: a forward pass, an evaluation, the building of a buffer. In the middle
    of an operation nothing can be moved, since its kernels may hold addresses already. A second failure is raised.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's and CuPy's
                raise
            error.__traceback__ = None  # its frames hold what the function had allocated
        compact(*objects, **options)
        return function(*args, **kwargs)

    return call


def contiguous_buffers(tensors: Sequence[Any], *, copy: Copy | None = None) -> list[Any]:
    """Move tensors into one flat tensor for each device and type, in the order given and without gaps; return those.

    The tensors keep their values and become parts of the flat ones (ZeRO's contiguous memory for parameters,
    gradients and checkpoints): what is written to one is seen in the other.

    Raises BadInputError, and moves nothing, for a tensor that does not fill its storage or that may not move.
    """
    groups: dict[tuple[Any, Any], list[Candidate]] = {}
    for nth, tensor in enumerate(tensors):
        found = next(iter(candidates([tensor])), None)
        if found is None or not tensor.is_contiguous() or found.size_bytes != tensor.numel() * tensor.element_size():
            raise BadInputError(f"tensor {nth} does not fill a storage of its own: clone it first.")
        if found.reason:
            raise BadInputError(f"tensor {nth} cannot move: {found.reason}.")
        groups.setdefault((tensor.device, tensor.dtype), []).append(found)
    if len({member.storage._cdata for group in groups.values() for member in group}) < len(tensors):
        raise BadInputError("two of the tensors share one storage: give each once.")
    return [move_together(group, alignment=1, copy=copy).view(dtype) for (_, dtype), group in groups.items()]


def _by_device(
    objects: Sequence[Any], exclude: Iterable[Any], gradients: bool, result: Relocation
) -> dict[Any, list[Candidate]]:
    """The storages that may move, by device; the others are counted."""
    groups: dict[Any, list[Candidate]] = {}  # also of devices on which nothing may move
    views: dict[Any, HeapView | None] = {}
    for found in candidates(tensors_of(*objects, gradients=gradients), exclude):
        device = found.storage.device
        if device not in views:
            views[device] = heap_view(device)
        view = views[device]
        groups.setdefault(device, [])
        reason = found.reason or (view.reason(found.address) if view is not None else "")
        if reason:
            result.kept[reason] += 1
        else:
            groups[device].append(found)
    # counters of an optimizer and the like: host memory is moved only where there is nothing else
    on_gpu = {device: group for device, group in groups.items() if device.type != "cpu"}
    return on_gpu or groups


def _reserved_bytes(view: HeapView | None) -> int:
    return view.controller.state.record.statistics.reserved_bytes if view is not None else 0


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
                groups = _by_device(objects, exclude, self._gradients, result)
                _compact(device, groups.get(device, []), needed, result, self._copy, slides=False)
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
