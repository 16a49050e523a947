"""Emptying segments of torch's heap: which of them, and their contents into new buffers, as much at a time as fits.

Contract: what is not moved is untouched and counted with its reason; buffers are never put into what is to be emptied,
nor into what the plan's arena lends.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stalloc.compaction.execution import Copy
from stalloc.compaction.heap_view import HeapView
from stalloc.compaction.relocation import move_together, new_buffer, packed, release
from stalloc.compaction.sliding import plan_slide, slide, whole_segments
from stalloc.compaction.torch_storages import Candidate, num_slices
from stalloc.core.constants import SMALL_LIMIT
from stalloc.errors import BadInputError
from stalloc.sizes import ALIGNMENT_BYTES, PAGE_BYTES, whole_pages

_OWN_SEGMENT = 10 << 20  # bytes; from here on a block has a segment of its own (runtime/shortage.py)
_MAX_STORAGES = 4_000  # moved by one copy, so that its table is at most 1 MiB, which comes from a segment of 2 MiB
_MAX_BOUNCE_BYTES = 32 << 20
_ROUNDING = 16 << 20  # bytes that several buffers, where one has no room, may lose to rounding


@dataclass(kw_only=True)
class Relocation:
    """What one call moved."""

    num_moved: int = 0  #: storages
    moved_bytes: int = 0
    num_launches: int = 0  #: batched copies, one for each new buffer
    through_host_bytes: int = 0  #: of moved_bytes, those that waited in host memory for lack of room
    slid_bytes: int = 0  #: of moved_bytes, those that were packed inside their segments first, for lack of room
    reserved_before_bytes: int = 0  #: by stalloc's heaps on the devices concerned
    reserved_after_bytes: int = 0
    kept: Counter[str] = field(default_factory=Counter)  #: storages that stayed, by reason


def move(
    group: list[Candidate],
    result: Relocation,
    copy: Copy | None,
    *,
    through_host: bool = False,
    unwanted: Callable[[int], bool] = lambda address: False,
) -> None:
    """Move storages of one device into one new buffer and count them."""
    if not group:
        return
    on_gpu = group[0].storage.device.type == "cuda"
    least = _OWN_SEGMENT if on_gpu and _buffer_bytes(group) == _OWN_SEGMENT else 0
    move_together(
        group, alignment=ALIGNMENT_BYTES, copy=copy, through_host=through_host, least_bytes=least, unwanted=unwanted
    )
    count = _live_bytes(group)
    result.num_moved += len(group)
    result.moved_bytes += count
    result.num_launches += not through_host
    result.through_host_bytes += count if through_host else 0


def _live_bytes(group: Iterable[Candidate]) -> int:
    return sum(member.size_bytes for member in group)


def _buffer_bytes(group: list[Candidate]) -> int:
    """What a buffer for some storages takes from the device.

    One of a middling size would be given a segment for several such, so it is made as large as those that get their
    own.
    """
    total = packed([member.size_bytes for member in group], ALIGNMENT_BYTES)[1]
    return whole_pages(total) if total <= SMALL_LIMIT else whole_pages(max(total, _OWN_SEGMENT))


def move_in_rounds(
    view: HeapView,
    segments: list[list[Candidate]],
    cap_bytes: int | None,
    result: Relocation,
    copy: Copy | None,
    *,
    slides: bool,
) -> None:
    """Move the contents of segments, as many at a time as there is room for beside them.

    Where there is room for none, those of several are packed into some of the segments, if `slides`; else they go
    through host memory.
    """
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
            if _buffer_bytes(more) > room or (taken and len(more) > _MAX_STORAGES):
                break
            taken = more
            waiting.pop(0)
        if slides and not taken:
            slid = _pack(view, waiting, room, ranges, result, copy)
            if slid is not None:
                waiting, ranges = slid
                continue
            slides = False  # nor will what is left of it
        through_host = not taken
        while through_host and waiting and _buffer_bytes(taken or waiting[0]) <= _OWN_SEGMENT:
            taken += waiting.pop(0)
        if through_host and not taken:
            taken = waiting.pop(0)
        if through_host and _buffer_bytes(taken) > room + PAGE_BYTES + _freed(view, taken):
            result.kept["there is no room for it elsewhere"] += len(taken)
            continue
        move(taken, result, copy, through_host=through_host, unwanted=_inside(ranges))
        release(device)
        # what is empty now has gone back to the device, which may give the same addresses again
        gone = sorted(member.address for member in taken)
        ranges = [span for span in ranges if bisect_left(gone, span[0]) == bisect_left(gone, span[1])]


def _pack(
    view: HeapView,
    waiting: list[list[Candidate]],
    room: int,
    ranges: list[tuple[int, int]],
    result: Relocation,
    copy: Copy | None,
) -> tuple[list[list[Candidate]], list[tuple[int, int]]] | None:
    """Pack what waits into some of its segments: what waits then, and where; None, and nothing done, if that is none.

    There is room for a copy then. `ranges` are those that no buffer may begin in.
    """
    import torch

    device = waiting[0][0].storage.device
    segments = whole_segments(view, waiting, torch.cuda.current_stream(device).cuda_stream)
    found, bounce = plan_slide(segments, max(0, min(room, _MAX_BOUNCE_BYTES))), None
    if found is not None and found.schedule.bounce_bytes:
        try:
            bounce = new_buffer(found.schedule.bounce_bytes, device, _inside(ranges))
        except torch.OutOfMemoryError:
            found = plan_slide(segments, 0)
    if found is None:
        return None
    contents = slide(view, found, bounce, copy)
    moved = sum(_live_bytes(members) for members in found.contents)
    if contents:
        result.slid_bytes += moved
        result.num_launches += found.schedule.num_waves
    else:
        result.num_moved += sum(len(members) for members in found.contents)
        result.moved_bytes += moved
        result.through_host_bytes += moved
    del bounce
    release(device)
    gone = {segment.base for segment in found.segments[len(contents) :]}
    done = {segment.base for segment in found.segments}
    rest = [group for group in waiting if int(view.segment_base[view.segment_of(group[0].address)]) not in done]
    return [*contents, *rest], [span for span in ranges if span[0] not in gone]


def _inside(ranges: list[tuple[int, int]]) -> Callable[[int], bool]:
    return lambda address: any(low <= address < high for low, high in ranges)


def _room(view: HeapView, cap_bytes: int | None) -> int:
    """How many bytes a new buffer may have, beside the table of the copy, which is a page."""
    free = view.controller.memory.source.free_bytes()
    if cap_bytes is not None:
        free = min(free, cap_bytes - view.controller.state.record.statistics.reserved_bytes)
    return free - PAGE_BYTES


def by_segment(view: HeapView, group: Iterable[Candidate]) -> dict[int, list[Candidate]]:
    """The storages of each segment, by its row; -1: of none."""
    found: dict[int, list[Candidate]] = {}
    for member in group:
        found.setdefault(view.segment_of(member.address), []).append(member)
    return found


def _freed(view: HeapView, taken: list[Candidate]) -> int:
    """The bytes that go back to the device for sure once some storages have no memory."""
    groups = by_segment(view, taken).items()
    return sum(int(view.segment_gain[row]) for row, members in groups if row >= 0 and _empties(view, row, members))


def _empties(view: HeapView, row: int, members: list[Candidate]) -> bool:
    """Whether nothing lives in a segment once some storages have left it.

    A block of storages that were moved before is free with the last of them, of which the first may be gone.
    """
    base, size = int(view.segment_base[row]), int(view.segment_bytes[row])
    inside = (view.address >= base) & (view.address < base + size)
    leaving, device = sorted(member.address for member in members), members[0].storage.device
    for address, num_bytes in zip(view.address[inside].tolist(), view.block_bytes[inside].tolist(), strict=True):
        num_leaving = bisect_left(leaving, address + num_bytes) - bisect_left(leaving, address)
        num_alive = num_slices(address, device)
        if num_leaving != (num_alive if num_alive is not None else 1):
            return False
    return True


def segments_to_empty(
    view: HeapView, group: list[Candidate], needed_bytes: int | None, result: Relocation
) -> list[list[Candidate]]:
    """The contents of the segments that are to be emptied."""
    mine: dict[int, dict[int, Candidate]] = {}
    for member in group:
        mine.setdefault(view.segment_of(member.address), {})[member.address] = member
    choices = []
    for row, members in mine.items():
        base = int(view.segment_base[row])
        if not _empties(view, row, list(members.values())):
            result.kept["its segment holds blocks that may not move"] += len(members)
            continue
        moved, gain = _live_bytes(members.values()), int(view.segment_gain[row])
        choices.append((gain / moved, base, gain, list(members.values())))
    choices.sort(key=lambda choice: (-choice[0], choice[1]))
    free = view.controller.memory.source.free_bytes()
    chosen: list[list[Candidate]] = []
    moving: list[Candidate] = []
    best = emptied = gained = 0
    for _, _, gain, contents in choices:
        spare = _ROUNDING if _live_bytes(moving) > free else 0
        if needed_bytes is not None and whole_pages(needed_bytes) + spare <= free + gained:
            break
        moving, emptied = moving + contents, emptied + gain
        chosen.append(contents)
        if emptied - _buffer_bytes(moving) > gained:
            best, gained = len(chosen), emptied - _buffer_bytes(moving)
    if needed_bytes is not None and free + gained < whole_pages(needed_bytes):
        raise BadInputError(
            f"{needed_bytes} bytes cannot be freed in one piece on device {view.controller.device.index}: {free} are "
            f"free and moving everything that may move gives {gained} more."
        )
    return chosen[:best]
