"""What the runtime's heap looks like right now: segments, live blocks, which of them may move.

Contract: only reads. Where memory comes by pages a segment may be as long as the device, so it is shown as spans that
can be emptied one by one, each from a block that lives to the end of one that lives. It is meant for the boundary of a
step, when no other thread allocates; what is moved afterwards is judged again by the allocator itself, since blocks are
only ever allocated and freed in the usual way.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.core.constants import BLOCK_FREE, BLOCK_LIVE, GRANULE, PRIVATE_KINDS
from stalloc.core.snapshot import ARENA_KIND, HeapSegment, segments
from stalloc.errors import SetupError
from stalloc.runtime import Controller, current
from stalloc.sizes import aligned, whole_pages

_SPAN_BYTES = 256 << 20  # of a segment by pages, or one block, are emptied at once: there is to be room for a copy


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
