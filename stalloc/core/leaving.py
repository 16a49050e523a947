"""Which pages lose their memory, so that others have it: free ones of segments first, then idle ones of the arena.

Contract: the core serves no more from what is written, and its memory can be unmapped once the device is done with it.
"""

from stalloc.compiled import BORROWING, njit
from stalloc.core.arena_pages import leave_arena_pages
from stalloc.core.constants import GRANULE
from stalloc.core.growth import leave_free_pages
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.shared_pages import leave_shared_pages


@njit(**BORROWING)
def leave_pages(device, wanted, ahead, spares_arena, low, high, begin, end, addresses, sizes, before, after):
    """Serve no more from as many pages as `wanted` bytes are, or as there are; how many ranges, and segments that move.

    And from those of so many bytes `ahead` that nothing needs soon: what the plan needs in the next quarter of an
    iteration goes last, and not for them. None of the arena goes if `spares_arena`. What is free in addresses [low,
    high) stays, since memory is to come there, and so do bytes [begin, end) of the arena. Writes address and size of
    each range, as many as the columns hold, and where segments began `before` that begin elsewhere now (`after`; 0:
    gone). For Python.
    """
    state = locked(device)
    wanted += ahead
    count = leave_free_pages(state, -(-wanted // GRANULE) * GRANULE, low, high, addresses, sizes)
    for i in range(count):
        wanted -= sizes[i]
    first = count
    count, moved = leave_shared_pages(state, wanted, low, high, addresses, sizes, first, before, after)
    for i in range(first, count):
        wanted -= sizes[i]
    if not spares_arena:
        wanted = -(-wanted // GRANULE) * GRANULE
        count = leave_arena_pages(state, wanted, ahead, begin, end, addresses, sizes, count)
    unlock(state)
    return count, moved
