"""An arena whose pages come as the plan is followed: put in force, moved, and given memory where a request needs it.

Contract: that of `Arenas`, whose arena it is. A plan never waits for memory to be put in force, and what lives in its
way costs its own pages and no more.
"""

from typing import TYPE_CHECKING, Any

from stalloc.core import constants
from stalloc.core.arena_tape import ArenaTape
from stalloc.core.regions import on_pages
from stalloc.runtime import decisions, thresholds

if TYPE_CHECKING:
    from stalloc.runtime.arenas import Arenas


def serve_by_pages(arenas: "Arenas", tape: ArenaTape, expected_bytes: int) -> bool:
    """Serve a tape from addresses without memory; False if the device could never hold it.

    `expected_bytes`: what the program is taken to need at most.
    """
    fills = decisions.is_more_than(expected_bytes, arenas.memory.paging.device_bytes, thresholds.PART_SHIFT)
    tape, source = on_pages(tape, apart=not fills), arenas.memory.source
    most_bytes = source.free_bytes() + arenas.state.record.reserved_bytes
    memory = source.reserve(tape.arena_bytes) if tape.arena_bytes <= most_bytes else None
    if memory is None:
        return False
    arenas.drop_tape()
    if arenas.arena is not None:  # it could not be dissolved
        return False
    _serve_on(arenas, memory, tape, 0, anew=True)
    arenas.memory.paging.gather()
    arenas.state.write(expected_peak=expected_bytes, memory_is_short=0)
    arenas.state.triggers.at_boundary()
    return True


def move(arenas: "Arenas") -> bool:
    """Serve the plan in force from other addresses: what is in its way keeps its place, and pages follow.

    False if there are no others.
    """
    state, record, tape = arenas.state, arenas.state.record, arenas.tape
    memory = arenas.memory.source.reserve(arenas.arena.size_bytes) if tape is not None else None
    if tape is None or memory is None or state.arena.tape is None:
        return False
    begin, end, cursor, ask_after = record.ring_start, record.ring_end, record.cursor, record.ask_after_misses
    learnt = state.arena.tape.lifespans
    names = "history_count", "last_miss", "miss_run", "excess_misses", "bad_passes"  # where it is remains as sure
    followed = {name: int(getattr(record, name)) for name in names}
    arenas.drop_tape()
    if arenas.arena is not None:  # it could not be dissolved
        state.write(mode=constants.MODE_REPLAY)
        state.triggers.after_misses(ask_after)
        return False
    _serve_on(arenas, memory, tape, cursor, anew=False)
    state.arena.tape.lifespans[:] = learnt
    state.arena.begin_step(begin, end, cursor)
    state.write(**followed)
    state.triggers.after_misses(ask_after)
    return True


def _serve_on(arenas: "Arenas", memory: Any, tape: ArenaTape, cursor: int, *, anew: bool) -> None:
    arenas.state.arena.install(tape, cursor)
    if tape.cross_streams:
        arenas.order_handovers(tape.gives)
    arenas.arena, arenas.tape = memory, tape
    arenas.state.arena.serve_pages(memory.ptr, memory.size_bytes, anew=anew)


def back(arenas: "Arenas", position: int) -> None:
    """Map what the place of a tape's entry lacks, if there is memory for it."""
    record = arenas.state.record
    if arenas.arena is not None and arenas.memory.source.paged:
        arenas.memory.paging.back(position)
    if record.ask_at_step:  # passes are counted in which pages move
        arenas.state.triggers.at_boundary()
