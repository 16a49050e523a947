"""The slots of the arena: what planned request lives at an offset.

Contract: the lock is held. Every offset of the schedule has a slot from when the schedule is installed on; a slot is
never added or removed while the schedule is in place.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.hash_table import find_row
from stalloc.core.records import Slot, dtype_of, slot_at, slot_row

_WORDS = dtype_of(Slot).itemsize // 8


@njit(**BORROWING)
def fill_slots(table, mask, offsets, rows):
    """Fill an empty table of slots with distinct offsets (bytes); `rows[i]` becomes the row of `offsets[i]`."""
    for i in range(len(offsets)):
        rows[i] = find_row(table, _WORDS, mask, offsets[i] >> 9, -1, -1)
        slot_row(table, rows[i]).offset = offsets[i]


@inner(forceinline=True)
def in_arena(state, address):
    """Whether an address is one of the arena's."""
    return state.plan.arena <= address < state.plan.arena + state.plan.arena_bytes


@inner(forceinline=True)
def find_slot(state, address):
    """The row of the slot of what lives at an address in the arena; -1 if no planned request does."""
    offset = address - state.plan.arena
    row = find_row(state.plan.slots, _WORDS, state.plan.slots_mask, offset >> 9, offset, -1)
    return row if slot_at(state, row).entry >= 0 else -1
