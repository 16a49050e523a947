"""Threads that allocate, write, check and free from compiled code, through the entry points that CuPy calls.

Contract: a block belongs to whoever holds its slot, and any thread may free it. While it lives, words of it hold a tag
that no other block has: of blocks up to `WHOLE` bytes one word in each unit of 512 bytes, which is the least that two
blocks can share; of larger ones the first and the last units and a few within, and for a sample of all blocks every
word. At its free each word is compared: whatever was handed out twice, or written to after it was, is counted.
"""

from stalloc.compiled import njit
from stalloc.runtime import core
from stalloc.runtime.words import call3, lock, peek, poke, unlock

SLOT_ROW = 8  # words: a line of the cache, so that threads do not disturb each other
BUSY, ADDRESS, SIZE, TAG, EVERY = range(5)
WHOLE = 128 << 10  # bytes
OPERATIONS, ALLOCATIONS, FREES, REFUSED, WRONG_WORDS, SHARED, SEED, NEXT_TAG, BYTES = range(9)  # of a thread's counts
COUNTS = 16
UNIT_WORDS = 64
_EDGE_UNITS = 16
_WITHIN = 24


@njit(nogil=True)
def draw(word):
    """The next number of a generator (xorshift), not negative; `word` is the address of its state."""
    x = peek(word, 0)
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    poke(word, 0, x)
    return x & 0x7FFFFFFFFFFFFFFF


@njit(nogil=True)
def _any_size(word):
    """Bytes of a request: mostly small, a few of some MiB, one in 65,536 of up to 256 MiB."""
    x = draw(word)
    chance, rest = x & 0xFF, x >> 8
    if chance < 24:
        return 1 + rest % 512
    if chance < 160:
        return 1 + rest % 8192
    if chance < 248:
        return 1 + rest % (64 << 10)
    if chance < 255:
        return 1 + rest % (1 << 20)
    return 1 + (rest >> 8) % ((4 if rest & 0xFF else 256) << 20)


@njit(nogil=True)
def _visit(address, size, tag, every, write):
    """Write a block's words, or compare them; how many were wrong."""
    units = (size + 511) >> 9
    wrong = 0
    if every:
        for i in range(units * UNIT_WORDS):
            if write:
                poke(address, i, tag + i)
            elif peek(address, i) != tag + i:
                wrong += 1
        return wrong
    edge = units if size <= WHOLE else _EDGE_UNITS
    for i in range(edge):
        at = i * UNIT_WORDS + (tag >> 3) % UNIT_WORDS
        if write:
            poke(address, at, tag + at)
        elif peek(address, at) != tag + at:
            wrong += 1
    if size <= WHOLE:
        return wrong
    for i in range(_WITHIN + _EDGE_UNITS):
        # the words within are a function of the tag, so that they need not be remembered
        unit = units - 1 - i if i < _EDGE_UNITS else _EDGE_UNITS + (tag * (2 * i + 1) >> 7) % (units - 2 * _EDGE_UNITS)
        at = unit * UNIT_WORDS + (tag >> 3) % UNIT_WORDS
        if write:
            poke(address, at, tag + at)
        elif peek(address, at) != tag + at:
            wrong += 1
    return wrong


@njit(nogil=True)
def fill_slot(row, allocate, stream, size, counts):
    """Allocate a block into an empty slot that the caller holds; whether there was memory."""
    address = call3(allocate, stream, size, 0)
    if address == 0:
        poke(counts, REFUSED, peek(counts, REFUSED) + 1)
        return False
    tag = peek(counts, NEXT_TAG)
    poke(counts, NEXT_TAG, tag + (1 << 20))
    every = (tag >> 20) & 1023 == 0
    _visit(address, size, tag, every, True)
    poke(row, ADDRESS, address)
    poke(row, SIZE, size)
    poke(row, TAG, tag)
    poke(row, EVERY, every)
    poke(counts, ALLOCATIONS, peek(counts, ALLOCATIONS) + 1)
    poke(counts, BYTES, peek(counts, BYTES) + size)
    return True


@njit(nogil=True)
def empty_slot(row, free, counts):
    """Check and free the block of a slot that the caller holds."""
    address, size, tag = peek(row, ADDRESS), peek(row, SIZE), peek(row, TAG)
    wrong = _visit(address, size, tag, peek(row, EVERY) == 1, False)
    poke(counts, WRONG_WORDS, peek(counts, WRONG_WORDS) + wrong)
    _visit(address, size, -tag, False, True)  # what is freed must not look as if it lived
    poke(row, ADDRESS, 0)
    call3(free, 0, address, 0)
    poke(counts, FREES, peek(counts, FREES) + 1)


@njit(nogil=True)
def roam(state, allocate, free, slots, num_slots, streams, sizes, largest, share_every, operations, counts):
    """Fill empty slots and empty full ones, at random.

    `streams` (s,) are raw streams; `sizes` (k,) bytes are asked for now and then, as a plan knows them; nothing above
    `largest` is asked for. One full slot in `share_every` is used by another stream as well before it is freed.
    """
    seed = counts + SEED * 8
    for _ in range(operations):
        row = slots + draw(seed) % num_slots * SLOT_ROW * 8
        lock(row)
        if peek(row, ADDRESS) == 0:
            chance = draw(seed)
            size = sizes[(chance >> 4) % len(sizes)] if chance & 15 == 0 else _any_size(seed)
            fill_slot(row, allocate, streams[(chance >> 40) % len(streams)], min(size, largest), counts)
        else:
            if draw(seed) % share_every == 0 and core.share(state, peek(row, ADDRESS)):
                poke(counts, SHARED, peek(counts, SHARED) + 1)
            empty_slot(row, free, counts)
        unlock(row)
    poke(counts, OPERATIONS, peek(counts, OPERATIONS) + operations)


@njit(nogil=True)
def follow(allocate, free, own, slots, num_slots, streams, size, stream, dying, first_dying, deviations, counts):
    """One pass of a program over a ring: entry i frees what dies before it, then allocates `size[i]` bytes.

    `own` is the address of a slot for each entry. What dies before entry i are the entries
    dying[first_dying[i] : first_dying[i + 1]]. One request in `deviations` (0: none) is left out, asked for with
    another size, preceded by one that is not on the ring, or given to any thread, to be freed whenever it likes.
    """
    seed = counts + SEED * 8
    done = 0
    for i in range(len(size)):
        for j in range(first_dying[i], first_dying[i + 1]):
            row = own + dying[j] * SLOT_ROW * 8
            if peek(row, ADDRESS) != 0:
                empty_slot(row, free, counts)
                done += 1
        row, wanted, what = own + i * SLOT_ROW * 8, size[i], -1
        if peek(row, ADDRESS) != 0:  # it outlived the pass
            empty_slot(row, free, counts)
            done += 1
        if deviations > 0 and draw(seed) % deviations == 0:
            what = draw(seed) & 3
        if what == 0:
            continue
        if what == 1:
            wanted += 512 * (1 + draw(seed) % 8)
        if what >= 2:
            other = slots + draw(seed) % num_slots * SLOT_ROW * 8
            lock(other)
            if peek(other, ADDRESS) == 0:
                fill_slot(other, allocate, streams[stream[i]], wanted if what == 3 else _any_size(seed), counts)
                done += 1
            unlock(other)
            if what == 3:
                continue
        fill_slot(row, allocate, streams[stream[i]], wanted, counts)
        done += 1
    poke(counts, OPERATIONS, peek(counts, OPERATIONS) + done)


@njit(nogil=True)
def empty_all(free, slots, num_slots, counts):
    """Check and free what is left."""
    for i in range(num_slots):
        row = slots + i * SLOT_ROW * 8
        lock(row)
        if peek(row, ADDRESS) != 0:
            empty_slot(row, free, counts)
        unlock(row)


@njit(nogil=True)
def hold(row):
    """Hold a slot; the address of its block, 0 if it is empty."""
    lock(row)
    return peek(row, ADDRESS)


@njit(nogil=True)
def let_go(row):
    """Give a slot back."""
    unlock(row)
