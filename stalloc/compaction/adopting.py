"""What programs call: adopt what already lives, compact what has holes, lay tensors out in contiguous buffers.

Contract: values never change, only addresses; every tensor on a moved storage follows. What may not move is left alone
and listed with its reason. To be called between steps: a pointer that somebody took from `data_ptr()` and keeps (NCCL's
registered buffers, CUDA graphs outside torch, a kernel of the user's) has to be named in `exclude`.
"""

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stalloc.compaction.execution import Copy
from stalloc.compaction.heap_view import HeapView, heap_view
from stalloc.compaction.relocation import move_together, packed, release
from stalloc.compaction.torch_storages import Candidate, candidates, tensors_of
from stalloc.core.constants import SMALL_LIMIT
from stalloc.errors import BadInputError
from stalloc.runtime.segments import GRANULE, round_up

ALIGNMENT = 512
_OWN_SEGMENT = 10 << 20  # bytes; from here on a block has a segment of its own (runtime/segments.py)
_STORAGES = 4_000  # moved by one copy, so that its table is at most 1 MiB, which comes from a segment of 2 MiB
_ROUNDING = 16 << 20  # bytes that several buffers, where one has no room, may lose to rounding


@dataclass(kw_only=True)
class Relocation:
    """What one call moved."""

    num_moved: int = 0  #: storages
    moved_bytes: int = 0
    num_launches: int = 0  #: batched copies, one for each new buffer
    through_host_bytes: int = 0  #: of moved_bytes, those that waited in host memory for lack of room
    reserved_before_bytes: int = 0  #: by stalloc's heaps on the devices concerned
    reserved_after_bytes: int = 0
    kept: Counter[str] = field(default_factory=Counter)  #: storages that stayed, by reason


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
        held_bytes = view.controller.state.record.reserved_bytes if view is not None else 0
        if cap_bytes is not None and held_bytes > cap_bytes:
            raise BadInputError(
                f"device {device.index} holds {held_bytes} bytes already, above the cap of {cap_bytes}: ask for "
                "more, or free memory first."
            )
        if view is None:
            _move(group, result, copy)
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
    live block is among `objects` (modules, optimizers, tensors, containers) and may move are emptied.

    Raises BadInputError, and moves nothing, if `needed_bytes` cannot be reached.
    """
    result = Relocation()
    groups = _by_device(objects, exclude, gradients, result)
    if needed_bytes is not None and not any(device.type == "cuda" for device in groups):
        raise BadInputError(f"{needed_bytes} bytes cannot be freed: none of the objects has memory on a GPU.")
    for device, group in groups.items():
        _compact(device, group, needed_bytes, result, copy)
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
    """`compact` on one device only; adds to `result`."""
    group = _by_device(objects, exclude, gradients, result).get(device, [])
    _compact(device, group, needed_bytes, result, copy)


def _compact(
    device: Any, group: list[Candidate], needed_bytes: int | None, result: Relocation, copy: Copy | None
) -> None:
    release(device)
    view = heap_view(device)
    if view is None:
        return
    _count_reserved(view, result, before=True)
    chosen = _segments_to_empty(view, group, needed_bytes, result)
    _in_rounds(view, chosen, None, result, copy)
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
    reserved = view.controller.state.record.reserved_bytes
    if before:
        result.reserved_before_bytes += reserved
    else:
        result.reserved_after_bytes += reserved


def _move(
    group: list[Candidate],
    result: Relocation,
    copy: Copy | None,
    *,
    through_host: bool = False,
    unwanted: Callable[[int], bool] = lambda address: False,
) -> None:
    if not group:
        return
    on_gpu = group[0].storage.device.type == "cuda"
    least = _OWN_SEGMENT if on_gpu and _buffer_bytes(group) == _OWN_SEGMENT else 0
    move_together(
        group, alignment=ALIGNMENT, copy=copy, through_host=through_host, least_bytes=least, unwanted=unwanted
    )
    count = sum(member.size_bytes for member in group)
    result.num_moved += len(group)
    result.moved_bytes += count
    result.num_launches += not through_host
    result.through_host_bytes += count if through_host else 0


def _buffer_bytes(group: list[Candidate]) -> int:
    """What a buffer for some storages takes from the device.

    One of a middling size would be given a segment for several such, so it is made as large as those that get their
    own.
    """
    total = packed([member.size_bytes for member in group], ALIGNMENT)[1]
    return round_up(total) if total <= SMALL_LIMIT else round_up(max(total, _OWN_SEGMENT))


def _adopt_by_segment(
    view: HeapView, group: list[Candidate], cap_bytes: int | None, result: Relocation, copy: Copy | None
) -> None:
    """Everything of a device, segment by segment."""
    segments: dict[int, list[Candidate]] = {}
    for member in sorted(group, key=lambda member: member.address):
        segments.setdefault(view.segment_of(member.address), []).append(member)
    _in_rounds(view, list(segments.values()), cap_bytes, result, copy)


def _in_rounds(
    view: HeapView, segments: list[list[Candidate]], cap_bytes: int | None, result: Relocation, copy: Copy | None
) -> None:
    """Move the contents of segments, as many at a time as there is room for beside them."""
    waiting = list(segments)
    # the buffers must not be put into the holes of what is to be emptied, nor into what the plan's arena lends
    emptied = {view.segment_of(member.address) for members in segments for member in members} - {-1}
    bases, ends = view.segment_base, view.segment_base + view.segment_bytes
    ranges = [view.arena, *((int(bases[row]), int(ends[row])) for row in sorted(emptied))]
    while waiting:
        device = waiting[0][0].storage.device
        room = _room(view, cap_bytes)
        taken: list[Candidate] = []
        while waiting:
            more = [*taken, *waiting[0]]
            if _buffer_bytes(more) > room or (taken and len(more) > _STORAGES):
                break
            taken = more
            waiting.pop(0)
        through_host = not taken
        while through_host and waiting and _buffer_bytes(taken or waiting[0]) <= _OWN_SEGMENT:
            taken += waiting.pop(0)
        if through_host and not taken:
            taken = waiting.pop(0)
        _move(taken, result, copy, through_host=through_host, unwanted=_inside(ranges))
        release(device)
        # what is empty now has gone back to the device, which may give the same addresses again
        gone = sorted(member.address for member in taken)
        ranges = [span for span in ranges if bisect_left(gone, span[0]) == bisect_left(gone, span[1])]


def _inside(ranges: list[tuple[int, int]]) -> Callable[[int], bool]:
    return lambda address: any(low <= address < high for low, high in ranges)


def _room(view: HeapView, cap_bytes: int | None) -> int:
    """How many bytes a new buffer may have, beside the table of the copy."""
    free = view.controller.memory.source.free_bytes()
    if cap_bytes is not None:
        free = min(free, cap_bytes - view.controller.state.record.reserved_bytes)
    return free - GRANULE


def _segments_to_empty(
    view: HeapView, group: list[Candidate], needed_bytes: int | None, result: Relocation
) -> list[list[Candidate]]:
    """The contents of the segments that are to be emptied."""
    mine: dict[int, dict[int, Candidate]] = {}
    for member in group:
        mine.setdefault(view.segment_of(member.address), {})[member.address] = member
    choices = []
    for row, members in mine.items():
        base, size = int(view.segment_base[row]), int(view.segment_bytes[row])
        inside = (view.address >= base) & (view.address < base + size)
        if set(view.address[inside].tolist()) - set(members):
            result.kept["its segment holds blocks that may not move"] += len(members)
            continue
        moved = sum(member.size_bytes for member in members.values())
        choices.append((size / moved, base, size, list(members.values())))
    choices.sort(key=lambda choice: (-choice[0], choice[1]))
    free = view.controller.memory.source.free_bytes()
    chosen: list[list[Candidate]] = []
    moving: list[Candidate] = []
    best = emptied = gained = 0
    for _, _, size, contents in choices:
        spare = _ROUNDING if sum(member.size_bytes for member in moving) > free else 0
        if needed_bytes is not None and round_up(needed_bytes) + spare <= free + gained:
            break
        moving, emptied = moving + contents, emptied + size
        chosen.append(contents)
        if emptied - _buffer_bytes(moving) > gained:
            best, gained = len(chosen), emptied - _buffer_bytes(moving)
    if needed_bytes is not None and free + gained < round_up(needed_bytes):
        raise BadInputError(
            f"{needed_bytes} bytes cannot be freed in one piece on device {view.controller.device.index}: {free} are "
            f"free and moving everything that may move gives {gained} more."
        )
    return chosen[:best]
