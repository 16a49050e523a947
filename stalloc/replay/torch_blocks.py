"""Blocks of the caching allocator's model: what torch keeps beside what every model has.

Contract: a stream has four trees: free small blocks, unmapped small ranges, free large blocks, unmapped large ranges.
Free blocks are ordered by size, unmapped ranges by address. A pool is twice the stream, plus one for large blocks, and
is half the number of the tree that a block is in, or was in last. `extra` of a block is the start of the expandable
segment that it belongs to, 0 for none; `other` of a free one counts for the collection by age.
"""

import numpy as np

from stalloc.allocator_conf import TorchSettings
from stalloc.compiled import inner
from stalloc.core.record_types import row_of
from stalloc.core.records import Word
from stalloc.replay.blocks import FREE, LIVE, UNMAPPED, WAITING, at, split, whole_block
from stalloc.replay.model import own_type
from stalloc.replay.treap import insert, insert_by_address, merge

TREES = 4  # of a stream
OWN = own_type(
    TorchSettings,
    "block_bytes",  # whole blocks that are not given up, which torch calls allocated
    "waiting_blocks",
    "out_of_memory",  # requests that ran out of memory
    "allowed",  # bytes that the process may reserve, -1 for no limit
    "collect_above",  # bytes reserved above which blocks go back by age, -1 for never
    "space_bytes",  # addresses of an expandable segment
    "searches",
    "divisions",
    "given",
    "num_given",
    "given_used",
)
searches_at = row_of("searches", Word)  # (2,) looks into the free blocks of the small and of the large pools
divisions_at = row_of("divisions", Word)  # (16,) of the rounding, for each power of two from 1 MiB on
_given_at = row_of("given", Word)  # (num_given,) device addresses to be handed out in order, before any are made up
_ALIGN = np.int64(0x1FFFFF)


@inner()
def pool_of(t, block):
    """The pool of a block."""
    return at(t, block).tree >> 1


@inner()
def cut(t, block, size, state):
    """Split a block that is in no tree after `size` bytes; the rest is a new block with that state, in no tree."""
    rest = split(t, block, size)
    at(t, rest).extra = at(t, block).extra
    at(t, rest).state = state
    return rest


@inner()
def add_free(t, m, block):
    """A mapped block joins the free ones of its pool."""
    pool, free = pool_of(t, block), at(t, block)
    free.state = FREE
    free.request = -1
    free.other = searches_at(m, pool & 1).value
    insert(t, 2 * pool, block)


@inner()
def add_unmapped(t, block):
    """A range of addresses without memory joins the unmapped ones of its pool."""
    at(t, block).state = UNMAPPED
    at(t, block).request = -1
    insert_by_address(t, 2 * pool_of(t, block) + 1, block)


@inner()
def free_and_merge(t, m, block):
    """A mapped block in no tree becomes free, with the free neighbours that it has; the merged block."""
    block = merge(t, 2 * pool_of(t, block), FREE, block)
    add_free(t, m, block)
    return block


@inner()
def add_segment(t, pool, address, size, base):
    """A new block that spans a segment, in no tree."""
    block = whole_block(t, address, size)
    at(t, block).tree = 2 * pool
    at(t, block).stream = pool >> 1
    at(t, block).extra = base
    return block


@inner()
def _is_taken(t, begin, end):
    for row in range(1, t.blocks_used):
        block = at(t, row)
        is_mapped = block.state in (FREE, LIVE, WAITING)
        if is_mapped and block.address < end and begin < block.address + block.size:
            return True
    return False


@inner()
def raise_next_address(t, end):
    """Place later segments behind `end`."""
    t.next_address = max(t.next_address, (end + _ALIGN) & ~_ALIGN)


@inner()
def device_address(t, m, size, mapped):
    """Where the device puts the next segment of `size` bytes, of which `mapped` are used soon: as given, or above all
    others.

    A model that does something else than the run whose addresses were given may meet one that is taken: from there on
    they are its own.
    """
    address = t.next_address
    if m.given_used < m.num_given:
        told = _given_at(m, m.given_used).value
        if _is_taken(t, told, told + mapped):
            m.given_used = m.num_given
        else:
            m.given_used += 1
            address = told
    raise_next_address(t, address + size)
    return address
