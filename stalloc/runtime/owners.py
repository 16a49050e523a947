"""Compiled: who owns the block at an address, asked under the core's lock.

Contract: only reads. It is for the slow ways (STALLOC_POISON); nothing on the fast path calls it.
"""

# ruff: noqa: F403, F405  (the names of layout are constants to the compiler)

from stalloc.compiled import njit
from stalloc.runtime.free_blocks import block, pool_of
from stalloc.runtime.heap import find_live, pool_kind, rounded_bytes
from stalloc.runtime.layout import *
from stalloc.runtime.lending import find_slot
from stalloc.runtime.words import lock, peek, unlock

ROUNDED, RAW_STREAM, HELD, GRAPHS = range(4)  # of the row that is written: bytes, handle, BLOCK_ state, 1: a graph's


@njit()
def find_owner(state, address, row):
    """Write what is known of the live or deferred block at an address; False if there is none."""
    lock(state)
    base, slot, found = peek(state, ARENA), 0, True
    if base <= address < base + peek(state, ARENA_BYTES):
        slot = find_slot(state, address)
    if slot != 0:
        key = peek(peek(state, TAPE), peek(slot, S_ENTRY) * TAPE_ROW + T_KEY)
        row[ROUNDED] = key >> STREAM_BITS
        row[RAW_STREAM] = peek(peek(state, STREAMS), key & (MAX_STREAMS - 1))
        row[HELD] = peek(slot, S_STATE)
        row[GRAPHS] = 0
    else:
        index = find_live(state, address)
        found = index != 0
        if found:
            pool = pool_of(state, index)
            row[ROUNDED] = rounded_bytes(state, index)
            row[RAW_STREAM] = peek(peek(state, STREAMS), peek(peek(state, POOLS), pool * POOL_ROW + P_STREAM))
            row[HELD] = block(state, index, B_STATE)
            row[GRAPHS] = pool_kind(state, pool) >= PRIVATE_KINDS
    unlock(state)
    return found
