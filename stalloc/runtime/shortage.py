"""What happens when a request finds no memory: a segment from the device, eviction, or the reason why there is none.

Contract: memory is refused only after everything that holds no live block was given back, cycles of garbage were
collected, and what the program can do without for now was evicted, if anything may be. The text of the error is one
line, made without asking for memory of the device. It begins as PyTorch's does, since programs that go on with smaller
batches tell the error by these words (accelerate by "out of memory.", Lightning by "CUDA" too, detectron2 by the
sentence). Segments are multiples of 2 MiB, the granularity in which the driver hands out memory.
"""

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial

from stalloc.core import constants
from stalloc.core.snapshot import HeapBlock, segments
from stalloc.core.state import DeviceState
from stalloc.device.known_gpus import shown_with_memory
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.runtime import decisions, thresholds
from stalloc.runtime.arenas import Arenas
from stalloc.runtime.call_sites import CallSites, this_call_site
from stalloc.runtime.interruptions import driver_status
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import Phase, Status
from stalloc.sizes import PAGE_BYTES, whole_pages
from stalloc.trace.sites import UNKNOWN


def segment_bytes(kind: int, size_bytes: int) -> int:
    """The size of a new segment for a pool of `kind` that lacks room for a request of `size_bytes` (rounded)."""
    if kind >= constants.PRIVATE_KINDS:
        kind = constants.SMALL_KIND if size_bytes <= constants.SMALL_LIMIT else constants.GENERAL_KIND
    if kind == constants.SMALL_KIND:
        return PAGE_BYTES
    if size_bytes >= thresholds.LARGE_BYTES:
        return whole_pages(size_bytes)
    if kind != constants.PERSISTENT_KIND:
        return thresholds.GENERAL_SEGMENT_BYTES
    return _for_several(size_bytes, thresholds.SLAB_BYTES, thresholds.SLAB_WASTE)


def tight_segment_bytes(size_bytes: int) -> int:
    """The size of a new segment for a large request where memory is short: little is lost to rounding."""
    return _for_several(size_bytes, max(size_bytes, constants.MAX_SHARED_SEGMENT), 1 / (1 << constants.WASTE_SHIFT))


def _for_several(size_bytes: int, most_bytes: int, waste: float) -> int:
    """The smallest segment for equal requests of which no more than `waste` is lost, else the one that loses least."""
    counts = range(1, most_bytes // size_bytes + 1)
    slabs = [(1 - n * size_bytes / whole_pages(n * size_bytes), n) for n in counts]
    _, count = next((slab for slab in slabs if slab[0] <= waste), min(slabs))
    return whole_pages(count * size_bytes)


_MAX_HOLDERS = 3
_NEXT = (
    "Next: `stalloc record -o run.trace.npz SCRIPT` and `stalloc top run.trace.npz` show who holds it; "
    "`stalloc dryrun SCRIPT` says on a virtual GPU what the program needs."
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
    live = [
        block
        for block in blocks
        if block.state not in (constants.BLOCK_FREE, constants.BLOCK_UNMAPPED) and block.requested_bytes
    ]
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


_FULL = {constants.FULL_STREAMS: "streams", constants.FULL_POOLS: "pools", constants.FULL_LIVE: "live blocks"}

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


def full_table_text(state: DeviceState, name: str, size_bytes: int) -> str:
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


Evict = Callable[[int], int]
"""Lets go of at least so many bytes, if it can; how many."""


class Eviction:
    """Evicts what a program can do without from the memory of one device; before `begin`, nothing is evicted.

    Contract: who lets go is called with the lock of its device's memory held, and without that of the core: it may free
    and copy, wait for streams and enter torch, but asks for no memory of the device. It is never called while a graph
    is captured. What is allocated decides first, which is the same in each step that does the same, so that steps with
    evictions can be planned. Where the device ran out before, by fragmentation, less may be allocated from then on.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._evict: Evict | None = None
        self._cap_bytes = self._most_bytes = 0  # that are held; that are allocated before something has to go
        self._is_busy = False

    def begin(self, cap_bytes: int, evict: Evict) -> None:
        """Call `evict` before more than so many bytes are allocated, or held; 0: when the device has no more."""
        self._evict = evict
        self._cap_bytes = self._most_bytes = cap_bytes
        self._state.triggers.above(cap_bytes)

    def end(self) -> None:
        self._evict = None
        self._state.triggers.above(0)

    def keep_cap(self, size_bytes: int) -> None:
        self._lets_go(self._state.record.total.allocated_bytes + size_bytes - self._most_bytes)

    def makes_room(self, size_bytes: int) -> bool:
        record = self._state.record
        if self._evict is not None and not self._is_busy:
            self._most_bytes = decisions.most_before_eviction(
                self._most_bytes, record.total.allocated_bytes, record.statistics.reserved_bytes
            )
            self._state.triggers.above(self._most_bytes)
        return self._lets_go(size_bytes)

    def _lets_go(self, size_bytes: int) -> bool:
        if self._evict is None or size_bytes <= 0 or self._is_busy:
            return False
        self._is_busy = True
        try:
            return self._evict(size_bytes) > 0
        finally:
            self._is_busy = False

    def told(self, size_bytes: int) -> str:
        if self._evict is None:
            return ""
        enough = human_bytes(self._state.record.statistics.reserved_bytes + whole_pages(size_bytes))
        if not self._cap_bytes:
            return " All that may be evicted was evicted before."
        return (
            f" The cap of {human_bytes(self._cap_bytes)} cannot be kept: what could be evicted was, and what is left "
            "are parameters, gradients, optimizer state and what is being computed with. A cap of "
            f"{enough} serves this request; what comes after it may need more."
        )


#: after these "the process must be terminated and relaunched" (CUDA driver API, CUresult); and an error of the memory
_CONTEXT_LOST = frozenset((214, 700, 702, 714, 715, 716, 717, 718, 719))


class Shortage:
    """The segments that requests lack, on one device."""

    def __init__(self, arenas: Arenas, recording: Recording, status: Status) -> None:
        self._memory, self._state = arenas.memory, arenas.state
        self._recording, self._status = recording, status
        self._lacks_arena = False
        self.eviction = Eviction(arenas.state)

    def add_segment(self, pool: int, size_bytes: int, *, planned: bool) -> bool:
        """Take a segment for a request of a pool; False if there is none, and why is set as the error's text.

        What a plan does not serve is the exception: it gets no more than it needs.
        """
        state, memory = self._state, self._memory
        kind = state.heap.pool_kind(pool)
        if memory.source.paged:
            if self._tries(partial(memory.paging.grow, pool, size_bytes), size_bytes):
                return True
            if not memory.source.refusal:
                return self._refuse(state.heap.full_table(), size_bytes)
        wanted, least = segment_bytes(kind, size_bytes), whole_pages(size_bytes)
        if state.record.policy.memory_is_short and kind == constants.GENERAL_KIND:
            wanted = tight_segment_bytes(size_bytes)
        if planned and kind == constants.GENERAL_KIND:
            wanted = least
        take_least = partial(memory.take_segment, pool, least)
        if memory.take_segment(pool, wanted) or self._tries(take_least, size_bytes):
            return True
        full = state.heap.full_table()
        if full:
            memory.release_unused()  # segments without blocks take rows too
            if take_least():
                return True
        return self._refuse(full, size_bytes)

    def _tries(self, take: Callable[[], bool], size_bytes: int) -> bool:
        if take():
            return True
        while self._evicts(size_bytes):  # before garbage is collected, which takes longer
            if take():
                return True
        return self._collects(size_bytes) and take()

    def _refuse(self, full: str, size_bytes: int) -> bool:
        if full:
            self._state.set_out_of_memory_text(full_table_text(self._state, full, size_bytes))
        else:
            self._memory.lacking_bytes = max(self._memory.lacking_bytes, size_bytes)
            self._explain(size_bytes)
        return False

    def is_enough_in_pieces(self, size_bytes: int) -> bool:
        """Whether a request would be served if all that is free were in one piece, and may be made so."""
        record = self._state.record
        unused_bytes = record.statistics.reserved_bytes - record.total.allocated_bytes - record.shared.deferred_bytes
        return not self._memory.is_capturing and self._memory.source.free_bytes() + unused_bytes >= size_bytes

    def _collects(self, size_bytes: int) -> bool:
        """Collect arrays in reference cycles, as CuPy's own pool does it; False if that cannot help."""
        if self._state.heap.largest_free_bytes() >= size_bytes:
            return False  # the core finds that block
        if self._memory.source.free_bytes() + self._state.record.statistics.reserved_bytes < size_bytes:
            return False  # were all of it free
        gc.collect()
        return True

    def _evicts(self, size_bytes: int) -> bool:
        """Have so much let go of that the program can do without; False if there is nothing, or no use in it."""
        if self._memory.is_capturing or self._state.heap.full_table():
            return False
        return self.eviction.makes_room(size_bytes)

    def explain_refusal(self, table: int, size_bytes: int) -> None:
        if table:
            self._state.set_out_of_memory_text(full_table_text(self._state, _FULL[table], size_bytes))
        else:
            self._explain(size_bytes)

    def _explain(self, size_bytes: int) -> None:
        """Say who holds the memory that a request of this thread lacks."""
        device, source, record = self._memory.device, self._memory.source, self._state.record
        free, limit, arena = max(0, source.free_bytes()), source.limit_bytes, record.plan.arena_bytes
        self._recording.note_refusal(free)
        asked_by = this_call_site()
        in_arena = f" ({human_bytes(arena)} of it the plan's arena)" if arena else ""
        blocks = [block for segment in segments(self._state) for block in segment.blocks]
        pieces = [block.size_bytes for block in blocks if block.state == constants.BLOCK_FREE]
        text = (
            f"CUDA out of memory. Tried to allocate {human_bytes(size_bytes)} ({size_bytes} bytes)"
            f"{f' at {asked_by}' if asked_by != UNKNOWN else ''}. stalloc: out of memory on device {device.index} "
            f"({shown_with_memory(device.kind, device.name, device.total_bytes)}"
            f"{f', limited to {human_bytes(limit)}' if limit else ''}). "
            f"Allocated {human_bytes(record.total.allocated_bytes)}, "
            f"reserved {human_bytes(record.statistics.reserved_bytes)}{in_arena}. "
            f"{_why(size_bytes, free, pieces, PAGE_BYTES if source.paged else 1)} "
            f"{_holders(self._state, blocks, self._recording.call_sites)}{_NEXT}"
            f"{self.eviction.told(size_bytes)}"
        )
        if self._memory.asleep_bytes:
            text += f" Of what is reserved, {human_bytes(self._memory.asleep_bytes)} are asleep, and not on the device."
        self._state.set_out_of_memory_text(text)

    def explain_failure(self, size_bytes: int, error: BaseException) -> None:
        status, advice = driver_status(error), "try it again"
        if status in _CONTEXT_LOST:
            advice = (
                "the GPU does nothing more for this process, and what it was given before may be the reason: run the "
                "program anew with CUDA_LAUNCH_BLOCKING=1, which stops at the call that fails"
            )
        elif status:
            advice = f"see with nvidia-smi whether device {self._memory.device.index} is in use, and in which mode"
        text = (
            f"stalloc: a request of {size_bytes} bytes was not served, since the way to memory failed "
            f"({type(error).__name__}: {error}): {advice}."
        )
        self._state.set_out_of_memory_text(text, status)

    # --- room for an arena, made by moving what lives

    def forget_arena(self) -> None:
        self._lacks_arena = False

    def ask_for_arena(self, arena_bytes: int, *, may_move: bool) -> bool:
        """Whether an arena finds no room now, but may after a mark at which what lives is moved; asked for once."""
        if self._lacks_arena or not may_move:
            self._lacks_arena = False
            return False
        if self._memory.has_room(arena_bytes):
            return False
        self._memory.lacking_bytes, self._lacks_arena = max(self._memory.lacking_bytes, arena_bytes), True
        return True

    def take_lacking(self) -> tuple[int, bool]:
        """The bytes there was hardly room for since this was asked, and whether for an arena, which is tried again."""
        with self._memory.lock:
            lacking, self._memory.lacking_bytes = self._memory.lacking_bytes, 0
            if self._lacks_arena and self._status.phase is Phase.PLANNING:
                self._state.triggers.at_boundary()
            return lacking, self._lacks_arena
