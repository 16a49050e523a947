"""Packing what lives in several segments into some of them, where there is no room for a copy beside.

Contract: the order of all copies is known before a byte moves, or nothing is done. The segments stay reserved while
bytes move, whoever else gives memory back meanwhile, and are held as blocks of ours, so that nobody else is served from
them. Should they be served to somebody in the moment between, no copy is made: what lives is then read through host
memory from where it was. To be used only where no other thread allocates on the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stalloc.compaction.execution import Copy, execute
from stalloc.compaction.heap_view import HeapView
from stalloc.compaction.move_order import order_moves
from stalloc.compaction.relocation import (
    copy_for,
    free_memory,
    packed,
    point_into,
    read_to_host,
    release,
    wait_for,
    write_one_by_one,
)
from stalloc.compaction.schedule import Schedule
from stalloc.compaction.torch_storages import Candidate, borrowed_storage
from stalloc.core.constants import PRIVATE_KINDS, SMALL_KIND
from stalloc.errors import BadInputError
from stalloc.sizes import ALIGNMENT_BYTES, aligned

_MAX_WAVES = 10_000  # launches; beyond, host memory is faster
_MAX_TRIES = 16  # numbers of segments that are kept


@dataclass(eq=False)
class Segment:
    """A segment whose live blocks are storages that may move, each one block."""

    base: int
    size_bytes: int
    members: list[Candidate]  #: by address

    @property
    def live_bytes(self) -> int:
        """What it takes when nothing is between its blocks."""
        return packed([member.size_bytes for member in self.members], ALIGNMENT_BYTES)[1]


@dataclass(frozen=True, eq=False)
class Slide:
    """Where everything goes, and in which order."""

    segments: list[Segment]  #: those that keep something first, then those that become empty
    contents: list[list[Candidate]]  #: of each segment that keeps something, from its beginning on
    schedule: Schedule


def whole_segments(view: HeapView, groups: Sequence[list[Candidate]], stream: int) -> list[Segment]:
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
        base, size = int(view.segment_base[row]), int(view.segment_bytes[row])
        members = sorted(group, key=lambda member: member.address)
        inside = (view.address >= base) & (view.address < base + size)
        blocks = list(zip(view.address[inside].tolist(), view.block_bytes[inside].tolist(), strict=True))
        if blocks == [(member.address, aligned(member.size_bytes)) for member in members]:
            found.append(Segment(base, size, members))
    return found


def plan_slide(segments: Sequence[Segment], bounce_bytes: int) -> Slide | None:
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
        offset, _ = packed([member.size_bytes for member in members], ALIGNMENT_BYTES)
        source += [member.address for member in members]
        size += [member.size_bytes for member in members]
        target += (segment.base + offset).tolist()
    try:
        schedule = order_moves(source, target, size, bounce_bytes=bounce_bytes)
    except BadInputError:  # too many copies
        return None
    return Slide(waiting, contents, schedule) if schedule.num_waves <= _MAX_WAVES else None


def _least(segments: Sequence[Segment]) -> int:
    """How many of the segments have as many bytes as live in all of them."""
    live = sum(segment.live_bytes for segment in segments)
    return int(np.searchsorted(np.cumsum([segment.size_bytes for segment in segments]), live)) + 1


def _packed_into(kept: Sequence[Segment], emptied: Sequence[Segment]) -> list[list[Candidate]] | None:
    """The contents of the segments that are kept, with those of the others; None if they do not fit."""
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


def slide(view: HeapView, found: Slide, bounce: Any, copy: Copy | None) -> list[list[Candidate]]:
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
                places, total = packed([member.size_bytes for member in everything], ALIGNMENT_BYTES)
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
            point_into(members, block, packed([member.size_bytes for member in members], ALIGNMENT_BYTES)[0])
    return [[replace(member, address=member.storage.data_ptr()) for member in members] for members in found.contents]


@contextmanager
def _kept_reserved(view: HeapView, segments: Sequence[Segment]) -> Iterator[None]:
    """Keep segments reserved although nothing lives in them, and let no other thread ask the device for memory."""
    memory = view.controller.memory
    with memory.lock:
        memory.save()  # holes are used, whatever a new block is for
        kept = [memory.segments.get(segment.base) for segment in segments]
        yield
        kept.clear()


def _hold(segments: Sequence[Segment], device: Any) -> list[Any] | None:
    """Each segment as one block, a uint8 tensor; None if one of them is not to be had."""
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
