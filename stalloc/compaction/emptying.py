"""Emptying segments of torch's heap: which of them, and their contents into new buffers, as much at a time as fits.

Contract: what is not moved is untouched and counted with its reason; buffers are never put into what is to be emptied,
nor into what the plan's arena lends. It is meant for the boundary of a step, when no other thread allocates; blocks are
only ever allocated and freed in the usual way, so what is moved is judged again by the allocator itself.

Where memory comes by pages a segment may be as long as the device, so it is seen as spans that can be emptied one by
one, each from a block that lives to the end of one that lives. Where there is no room for a copy beside, what lives in
several segments is packed into some of them: the order of all copies is known before a byte moves, and the segments
stay reserved meanwhile, whoever else gives memory back, and are held as blocks of ours. Should one be served to
somebody in the moment between, no copy is made: what lives is then read through host memory from where it was.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.compaction.move_order import order_moves
from stalloc.compaction.schedule import Copy, Schedule, execute
from stalloc.compaction.torch_storages import (
    Candidate,
    borrowed_storage,
    copy_for,
    free_memory,
    move_together,
    new_buffer,
    num_slices,
    packed,
    point_into,
    read_to_host,
    release,
    wait_for,
    write_one_by_one,
)
from stalloc.core.constants import BLOCK_FREE, BLOCK_LIVE, GRANULE, PRIVATE_KINDS, SMALL_KIND, SMALL_LIMIT
from stalloc.core.snapshot import ARENA_KIND, HeapSegment, segments
from stalloc.errors import BadInputError, SetupError
from stalloc.runtime import Controller, current
from stalloc.sizes import ALIGNMENT_BYTES, PAGE_BYTES, aligned, whole_pages

_SPAN_BYTES = 256 << 20  # of a segment by pages, or one block, are emptied at once: there is to be room for a copy
_MAX_WAVES = 10_000  # launches; beyond, host memory is faster
_MAX_TRIES = 16  # numbers of segments that are kept
_OWN_SEGMENT = 10 << 20  # bytes; from here on a block has a segment of its own (runtime/shortage.py)
_MAX_STORAGES = 4_000  # moved by one copy, so that its table is at most 1 MiB, which comes from a segment of 2 MiB
_MAX_BOUNCE_BYTES = 32 << 20
_ROUNDING = 16 << 20  # bytes that several buffers, where one has no room, may lose to rounding


@dataclass(frozen=True, eq=False)
class HeapView:
    """The heap of one device."""

    controller: Controller
    segment_base: Column  #: (s,) addresses, ascending, of segments or spans; leases are parts of the arena
    segment_bytes: Column  #: (s,)
    segment_gain: Column  #: (s,) bytes that go back to the device once a segment alone is empty
    segment_kind: Column  #: (s,) kind of the pool
    segment_stream: Column  #: (s,) raw stream of the pool
    address: Column  #: (b,) of live blocks, ascending
    block_bytes: Column  #: (b,) rounded
    free_to_move: np.ndarray  #: (b,) False: other streams use it, it waits for them, or a CUDA graph owns it
    arena: tuple[int, int]  #: [low, high) of the plan in force, whose blocks lie where they should

    def segment_of(self, address: int) -> int:
        """The row of the segment that holds an address; -1 if none does."""
        row = int(np.searchsorted(self.segment_base, address, side="right")) - 1
        inside = row >= 0 and address < self.segment_base[row] + self.segment_bytes[row]
        return row if inside else -1

    def blocks_in(self, row: int) -> list[tuple[int, int]]:
        """Where live blocks are in a segment, and their bytes."""
        low, high = int(self.segment_base[row]), int(self.segment_base[row] + self.segment_bytes[row])
        inside = (self.address >= low) & (self.address < high)
        return list(zip(self.address[inside].tolist(), self.block_bytes[inside].tolist(), strict=True))

    def reason(self, address: int) -> str:
        """Why the block at an address must stay; empty if it may move."""
        if self.arena[0] <= address < self.arena[1]:
            return "it lies where the plan wants it"
        row = int(np.searchsorted(self.address, address))
        if row == len(self.address) or self.address[row] != address:
            return "" if self.segment_of(address) >= 0 else "its memory is not stalloc's"
        return "" if self.free_to_move[row] else "another stream or a CUDA graph uses it"


def heap_view(device: Any) -> HeapView | None:
    """The heap of a torch device; None where stalloc does not serve it. Raises SetupError while some of it sleeps."""
    runtime = current()
    if runtime is None or device.type != "cuda":
        return None
    controller = runtime.controllers[device.index]
    if controller.memory.asleep_bytes:
        raise SetupError(
            f"memory of device {device.index} is asleep, and nothing moves meanwhile: call stalloc.wake() first."
        )
    state = controller.state
    found = sorted((one for one in segments(state) if one.kind != ARENA_KIND), key=lambda segment: segment.address)
    live = [(block, segment.kind) for segment in found for block in segment.blocks if block.state != BLOCK_FREE]
    if controller.memory.source.paged:
        spans = [(*span, segment) for segment in found for span in _spans(segment)]
    else:
        spans = [(segment.address, segment.size_bytes, segment.size_bytes, segment) for segment in found]
    arena, arena_bytes = state.record.plan.arena, state.record.plan.arena_bytes
    return HeapView(
        controller,
        np.array([base for base, _, _, _ in spans], np.int64),
        np.array([size_bytes for _, size_bytes, _, _ in spans], np.int64),
        np.array([gain_bytes for _, _, gain_bytes, _ in spans], np.int64),
        np.array([segment.kind for _, _, _, segment in spans], np.int64),
        np.array([segment.stream for _, _, _, segment in spans], np.uint64),
        np.array([block.address for block, _ in live], np.int64),
        aligned(np.array([block.requested_bytes for block, _ in live], np.int64)),
        np.array([block.state == BLOCK_LIVE and kind < PRIVATE_KINDS for block, kind in live], bool),
        (arena, arena + arena_bytes),
    )


def _spans(segment: HeapSegment) -> list[tuple[int, int, int]]:
    """What lives in a segment by pages, in spans: address, bytes, and bytes of the pages that are of no other span."""
    spans: list[tuple[int, int]] = []
    for block in segment.blocks:
        end = block.address + block.size_bytes
        if block.state != BLOCK_FREE:
            begin = spans.pop()[0] if spans and end - spans[-1][0] <= _SPAN_BYTES else block.address
            spans.append((begin, end))
    pages_end = segment.address + segment.size_bytes
    lows = [segment.address, *(whole_pages(end) for _, end in spans[:-1])]
    highs = [*(begin // GRANULE * GRANULE for begin, _ in spans[1:]), pages_end]
    gains = (max(0, high - low) for low, high in zip(lows, highs, strict=True))
    return [(begin, end - begin, gain) for (begin, end), gain in zip(spans, gains, strict=False)]


@dataclass(eq=False)
class _Segment:
    """A segment whose live blocks are storages that may move, each one block."""

    base: int
    size_bytes: int
    members: list[Candidate]  #: by address

    @property
    def live_bytes(self) -> int:
        """What it takes when nothing is between its blocks."""
        return packed(self.members, ALIGNMENT_BYTES)[1]


@dataclass(frozen=True, eq=False)
class _Slide:
    """Where everything goes, and in which order."""

    segments: list[_Segment]  #: those that keep something first, then those that become empty
    contents: list[list[Candidate]]  #: of each segment that keeps something, from its beginning on
    schedule: Schedule


def _whole_segments(view: HeapView, groups: Sequence[list[Candidate]], stream: int) -> list[_Segment]:
    """The segments for large requests of a stream in which nothing lives but the candidates of one group."""
    memory = view.controller.memory
    if memory.poison is not None or memory.source.paged:
        return []  # freed memory is written to, or has no pages any more
    found = []
    for group in groups:
        row = view.segment_of(group[0].address)
        if row < 0 or view.segment_stream[row] != stream:
            continue
        if view.segment_kind[row] == SMALL_KIND or view.segment_kind[row] >= PRIVATE_KINDS:
            continue
        members = sorted(group, key=lambda member: member.address)
        if view.blocks_in(row) == [(member.address, aligned(member.size_bytes)) for member in members]:
            found.append(_Segment(int(view.segment_base[row]), int(view.segment_bytes[row]), members))
    return found


def _plan_slide(segments: Sequence[_Segment], bounce_bytes: int) -> _Slide | None:
    """How to pack what lives in some segments into as few of them as first fit finds; None if none becomes empty.

    What is in a segment that is kept slides to its beginning, what comes from others goes behind that.
    """
    waiting = sorted(segments, key=lambda segment: (-segment.size_bytes, -segment.live_bytes, segment.base))
    step = max(1, len(waiting) // _MAX_TRIES)
    for num_kept in range(_least(waiting), len(waiting), step):
        contents = _packed_into(waiting[:num_kept], waiting[num_kept:])
        if contents is not None:
            break
    else:
        return None
    source, target, size = [], [], []
    for segment, members in zip(waiting, contents, strict=False):
        offset, _ = packed(members, ALIGNMENT_BYTES)
        source += [member.address for member in members]
        size += [member.size_bytes for member in members]
        target += (segment.base + offset).tolist()
    try:
        schedule = order_moves(source, target, size, bounce_bytes=bounce_bytes)
    except BadInputError:  # too many copies
        return None
    return _Slide(waiting, contents, schedule) if schedule.num_waves <= _MAX_WAVES else None


def _least(segments: Sequence[_Segment]) -> int:
    """How many of the segments have as many bytes as live in all of them."""
    live = sum(segment.live_bytes for segment in segments)
    return int(np.searchsorted(np.cumsum([segment.size_bytes for segment in segments]), live)) + 1


def _packed_into(kept: Sequence[_Segment], emptied: Sequence[_Segment]) -> list[list[Candidate]] | None:
    contents = [list(segment.members) for segment in kept]
    left = [segment.size_bytes - segment.live_bytes for segment in kept]
    moved = [member for segment in emptied for member in segment.members]
    for member in sorted(moved, key=lambda member: (-member.size_bytes, member.address)):
        need = aligned(member.size_bytes)
        at = next((i for i, free in enumerate(left) if free >= need), None)
        if at is None:
            return None
        contents[at].append(member)
        left[at] -= need
    return contents


def _slide(view: HeapView, found: _Slide, bounce: Any, copy: Copy | None) -> list[list[Candidate]]:
    """Carry it out; the contents of the segments that keep something, at their new addresses.

    `bounce` is a uint8 tensor with the bytes that the schedule wants. If it cannot be carried out, everything is in new
    memory afterwards, and nothing is returned.
    """
    import torch

    device = found.contents[0][0].storage.device
    everything = [member for members in found.contents for member in members]
    one_wave = copy or copy_for(device)
    nothing = np.zeros(0, np.int64)
    with torch.cuda.device(device):
        one_wave(nothing, nothing, nothing)  # whatever is missing for copies is missed now
        wait_for(device)
        with _kept_reserved(view, found.segments):
            free_memory(everything)
            blocks = _hold(found.segments, device)
            if blocks is None:
                places, total = packed(everything, ALIGNMENT_BYTES)
                before = [borrowed_storage(member.address, member.size_bytes, device) for member in everything]
                host = read_to_host(before, places, total)
            else:
                execute(found.schedule, copy=one_wave, bounce=bounce.data_ptr() if bounce is not None else 0)
                wait_for(device)
        if blocks is None:
            release(device)
            write_one_by_one(everything, host, places)
            return []
        for block, members in zip(blocks, found.contents, strict=False):
            point_into(members, block, packed(members, ALIGNMENT_BYTES)[0])
    return [[replace(member, address=member.storage.data_ptr()) for member in members] for members in found.contents]


@contextmanager
def _kept_reserved(view: HeapView, segments: Sequence[_Segment]) -> Iterator[None]:
    """Keep segments reserved although nothing lives in them, and let no other thread ask the device for memory."""
    memory = view.controller.memory
    with memory.lock:
        memory.save()  # holes are used, whatever a new block is for
        kept = [memory.segments.get(segment.base) for segment in segments]
        yield
        kept.clear()


def _hold(segments: Sequence[_Segment], device: Any) -> list[Any] | None:
    import torch

    wanted: dict[int, int] = {segment.base: nth for nth, segment in enumerate(segments)}
    blocks: list[Any] = [None] * len(segments)
    others = []
    for segment in segments:
        while blocks[wanted[segment.base]] is None:
            try:
                block = torch.empty(segment.size_bytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                return None
            nth = wanted.get(block.data_ptr())
            if nth is not None and segments[nth].size_bytes == segment.size_bytes:
                blocks[nth] = block
                continue
            others.append(block)  # another free segment of this size
            if len(others) > len(segments):
                return None
    return blocks


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
    total = packed(group, ALIGNMENT_BYTES)[1]
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
        room = view.controller.memory.source.free_bytes()
        if cap_bytes is not None:
            room = min(room, cap_bytes - view.controller.state.record.statistics.reserved_bytes)
        room -= PAGE_BYTES  # for the table of the copy
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
    segments = _whole_segments(view, waiting, torch.cuda.current_stream(device).cuda_stream)
    found, bounce = _plan_slide(segments, max(0, min(room, _MAX_BOUNCE_BYTES))), None
    if found is not None and found.schedule.bounce_bytes:
        try:
            bounce = new_buffer(found.schedule.bounce_bytes, device, _inside(ranges))
        except torch.OutOfMemoryError:
            found = _plan_slide(segments, 0)
    if found is None:
        return None
    contents = _slide(view, found, bounce, copy)
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
    leaving, device = sorted(member.address for member in members), members[0].storage.device
    for address, num_bytes in view.blocks_in(row):
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
