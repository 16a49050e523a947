"""What an out-of-memory error says: what was asked for, what was free and why it did not serve, who holds most, and
what to type next.

Contract: sizes are those that people read elsewhere; the text is one line, and is made without asking for memory of the
device. It begins as PyTorch's does, since programs that go on with smaller batches tell the error by these words
(accelerate by "out of memory.", Lightning by "CUDA" too, detectron2 by the sentence). `full_tables.py` has the text for
a lack of anything but memory.
"""

from collections import Counter
from typing import TYPE_CHECKING

from stalloc.core import constants
from stalloc.core.constants import BLOCK_FREE, BLOCK_UNMAPPED
from stalloc.core.snapshot import HeapBlock, segments
from stalloc.core.state import DeviceState
from stalloc.device import Device
from stalloc.device.known_gpus import shown_with_memory
from stalloc.device.mapped_pages import PAGE_BYTES
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.runtime.call_sites import CallSites, this_call_site
from stalloc.trace.sites import UNKNOWN

if TYPE_CHECKING:
    from stalloc.core.state import DeviceState


_MAX_HOLDERS = 3
_NEXT = (
    "Next: `stalloc record -o run.trace.npz SCRIPT` and `stalloc top run.trace.npz` show who holds it; "
    "`stalloc dryrun SCRIPT` says on a virtual GPU what the program needs."
)


def out_of_memory_text(
    device: Device,
    state: DeviceState,
    size_bytes: int,
    free_bytes: int,
    *,
    limit_bytes: int = 0,
    by_pages: bool = False,
    call_sites: CallSites | None = None,
) -> str:
    """The sentences for a request of `size_bytes`, made from this thread, with `free_bytes` left on the device.

    The program may have `limit_bytes`, or 0: all there is. `call_sites` names those who hold memory, if it is on.
    """
    record = state.record
    asked_by = this_call_site()
    blocks = [block for segment in segments(state) for block in segment.blocks]
    pieces = [block.size_bytes for block in blocks if block.state == BLOCK_FREE]
    name = shown_with_memory(device.kind, device.name, device.total_bytes)
    limit = f", limited to {human_bytes(limit_bytes)}" if limit_bytes else ""
    arena = f" ({human_bytes(record.plan.arena_bytes)} of it the plan's arena)" if record.plan.arena_bytes else ""
    return (
        f"CUDA out of memory. Tried to allocate {human_bytes(size_bytes)} ({size_bytes} bytes)"
        f"{f' at {asked_by}' if asked_by != UNKNOWN else ''}. "
        f"stalloc: out of memory on device {device.index} ({name}{limit}). "
        f"Allocated {human_bytes(record.total.allocated_bytes)}, "
        f"reserved {human_bytes(record.statistics.reserved_bytes)}{arena}. "
        f"{_why(size_bytes, free_bytes, pieces, PAGE_BYTES if by_pages else 1)} "
        f"{_holders(state, blocks, call_sites)}{_NEXT}"
    )


def _why(size_bytes: int, free: int, pieces: list[int], page_bytes: int) -> str:
    inside, usable = sum(pieces), free // page_bytes * page_bytes
    found = f"Free: {human_bytes(free)} on the device"
    if free and not usable:
        found += f" (less than a page of {human_bytes(page_bytes)})"
    if pieces:
        parts = plural(len(pieces), "piece")
        found += f", {human_bytes(inside)} in {parts} of what is reserved, the largest {human_bytes(max(pieces))}"
    if usable + inside < size_bytes:
        missing = human_bytes(size_bytes - usable - inside)
        return f"{found}: {missing} too little, whatever the allocator does."
    return f"{found}: enough together, but not in one piece."


def largest_holders(
    state: DeviceState, call_sites: CallSites | None, most: int, blocks: list[HeapBlock] | None = None
) -> list[tuple[str, int, int]]:
    """Name, bytes and number of blocks of those who hold most: call sites if they are noted, else sizes.

    Live blocks of one size are mostly of one kind. `blocks` are those of the device, if they are known.
    """
    if blocks is None:
        blocks = [block for segment in segments(state) for block in segment.blocks]
    live = [block for block in blocks if block.state not in (BLOCK_FREE, BLOCK_UNMAPPED) and block.requested_bytes]
    if call_sites is not None and call_sites.is_on:
        names = call_sites.names_at(state.address, [block.address for block in live])
    else:
        names = [human_bytes(block.requested_bytes) for block in live]
    count, held = Counter(names), Counter[str]()
    for block, name in zip(live, names, strict=True):
        held[name] += block.requested_bytes
    return [(name, held[name], count[name]) for name in sorted(held, key=lambda name: (-held[name], name))[:most]]


def _holders(state: DeviceState, blocks: list[HeapBlock], call_sites: CallSites | None) -> str:
    sited = call_sites is not None and call_sites.is_on

    def by(name: str, count: int) -> str:
        if sited:
            return f"{plural(count, 'block')} of {printable(name)}"
        return f"{count:,} of {name}" if count > 1 else "one block"

    found = largest_holders(state, call_sites, _MAX_HOLDERS, blocks)
    told = ", ".join(f"{human_bytes(held)} by {by(name, count)}" for name, held, count in found)
    return f"Most is held: {told}. " if told else ""


FULL_TABLES = {constants.FULL_STREAMS: "streams", constants.FULL_POOLS: "pools", constants.FULL_LIVE: "live blocks"}

_ADVICE = {
    "streams": "it holds {most:,}, which all have memory: free what was allocated on streams that are done with",
    "pools": (
        "it holds {most:,}, some for each stream and some for each pool of CUDA graphs: "
        "use the same streams again, and let graphs share a pool"
    ),
    "live blocks": "{live:,} blocks are live: free some, or allocate fewer and larger ones",
    "blocks": (
        "it holds {most:,}, with {live:,} blocks that are live and the free ones between them: "
        "free some, or allocate fewer and larger ones"
    ),
    "segments": "it holds {most:,}: free what is no longer used, so that segments go back to the device",
}


def full_table_text(state: "DeviceState", name: str, size_bytes: int) -> str:
    """The sentence for a request of `size_bytes` that the table called `name` has no row for."""
    most = {
        "streams": constants.MAX_STREAMS,
        "pools": state.record.heap.pools_used,
        "blocks": state.record.heap.blocks_capacity,
        "segments": state.record.heap.segments_capacity,
    }.get(name, 0)
    return (
        f"stalloc: a request of {size_bytes} bytes on device {state.device} was not served, since stalloc's table of "
        f"{name} is full, not the device: {_ADVICE[name].format(most=most, live=state.record.lookup.live_count)}."
    )
