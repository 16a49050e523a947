"""What programs call: adopt what already lives, compact what has holes, lay tensors out in contiguous buffers.

Contract: values never change, only addresses; every tensor on a moved storage follows. What may not move is left alone
and listed with its reason. To be called between steps: a pointer that somebody took from `data_ptr()` and keeps (NCCL's
registered buffers, CUDA graphs outside torch, a kernel of the user's) has to be named in `exclude`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stalloc.compaction.emptying import Relocation, by_segment, move, move_in_rounds, segments_to_empty
from stalloc.compaction.execution import Copy
from stalloc.compaction.heap_view import HeapView, heap_view
from stalloc.compaction.relocation import move_together, release
from stalloc.compaction.torch_storages import Candidate, candidates, tensors_of
from stalloc.errors import BadInputError


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
        _count_reserved(view, result, before=True)
        held_bytes = view.controller.state.record.statistics.reserved_bytes if view is not None else 0
        if cap_bytes is not None and held_bytes > cap_bytes:
            raise BadInputError(
                f"device {device.index} holds {held_bytes} bytes already, above the cap of {cap_bytes}: ask for "
                "more, or free memory first."
            )
        if view is None:
            move(group, result, copy)
        else:
            _adopt_by_segment(view, group, cap_bytes, result, copy)
        _count_reserved(view, result, before=False)
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


def compact_device(
    device: Any,
    objects: Sequence[Any],
    exclude: Iterable[Any],
    gradients: bool,
    needed_bytes: int | None,
    result: Relocation,
    copy: Copy | None,
) -> None:
    """`compact` on one device only, while other threads may allocate there; adds to `result`."""
    group = _by_device(objects, exclude, gradients, result).get(device, [])
    _compact(device, group, needed_bytes, result, copy, slides=False)


def _compact(
    device: Any,
    group: list[Candidate],
    needed_bytes: int | None,
    result: Relocation,
    copy: Copy | None,
    *,
    slides: bool,
) -> None:
    release(device)
    view = heap_view(device)
    if view is None:
        return
    _count_reserved(view, result, before=True)
    chosen = segments_to_empty(view, group, needed_bytes, result)
    with view.controller.full_device.moving():
        move_in_rounds(view, chosen, None, result, copy, slides=slides)
    _count_reserved(view, result, before=False)


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


def _count_reserved(view: HeapView | None, result: Relocation, *, before: bool) -> None:
    if view is None:
        return
    reserved = view.controller.state.record.statistics.reserved_bytes
    if before:
        result.reserved_before_bytes += reserved
    else:
        result.reserved_after_bytes += reserved


def _adopt_by_segment(
    view: HeapView, group: list[Candidate], cap_bytes: int | None, result: Relocation, copy: Copy | None
) -> None:
    """Everything of a device, segment by segment."""
    segments = by_segment(view, sorted(group, key=lambda member: member.address))
    with view.controller.full_device.moving():
        move_in_rounds(view, list(segments.values()), cap_bytes, result, copy, slides=False)
