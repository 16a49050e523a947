"""Threads that allocate, write, check and free from compiled code, through the entry points that CuPy calls.

Contract: a block belongs to whoever holds its slot, and any thread may free it. While it lives, words of it hold a tag
that no other block has: of blocks up to `WHOLE` bytes one word in each unit of 512 bytes, which is the least that two
blocks can share; of larger ones the first and the last units and a few within, and for a sample of all blocks every
word. At its free each word is compared: whatever was handed out twice, or written to after it was, is counted.
"""

from stalloc.compiled import njit
from stalloc.core.frees import share
from stalloc.core.intrinsics import call3, lock, unlock
from stalloc.core.records import word_at

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
    x = word_at(word, 0).value
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    word_at(word, 0).value = x
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
def _touch(address, place, tag, write):
    """Write a word of a block, or compare it; whether it was wrong."""
    if write:
        word_at(address, place).value = tag + place
        return 0
    return int(word_at(address, place).value != tag + place)


@njit(nogil=True)
def _visit(address, size, tag, every, write):
    """Write a block's words, or compare them; how many were wrong."""
    units = (size + 511) >> 9
    wrong = 0
    if every:
        for i in range(units * UNIT_WORDS):
            wrong += _touch(address, i, tag, write)
        return wrong
    within = (tag >> 3) % UNIT_WORDS
    for i in range(units if size <= WHOLE else _EDGE_UNITS):
        wrong += _touch(address, i * UNIT_WORDS + within, tag, write)
    if size <= WHOLE:
        return wrong
    for i in range(_WITHIN + _EDGE_UNITS):
        # the words within are a function of the tag, so that they need not be remembered
        unit = units - 1 - i if i < _EDGE_UNITS else _EDGE_UNITS + (tag * (2 * i + 1) >> 7) % (units - 2 * _EDGE_UNITS)
        wrong += _touch(address, unit * UNIT_WORDS + within, tag, write)
    return wrong


@njit(nogil=True)
def fill_slot(row, allocate, stream, size, counts):
    """Allocate a block into an empty slot that the caller holds; whether there was memory."""
    address = call3(allocate, stream, size, 0)
    if address == 0:
        word_at(counts, REFUSED).value += 1
        return False
    tag = word_at(counts, NEXT_TAG).value
    word_at(counts, NEXT_TAG).value = tag + (1 << 20)
    every = (tag >> 20) & 1023 == 0
    _visit(address, size, tag, every, True)
    word_at(row, ADDRESS).value = address
    word_at(row, SIZE).value = size
    word_at(row, TAG).value = tag
    word_at(row, EVERY).value = every
    word_at(counts, ALLOCATIONS).value += 1
    word_at(counts, BYTES).value += size
    return True


@njit(nogil=True)
def empty_slot(row, free, counts):
    address, size, tag = word_at(row, ADDRESS).value, word_at(row, SIZE).value, word_at(row, TAG).value
    wrong = _visit(address, size, tag, word_at(row, EVERY).value == 1, False)
    word_at(counts, WRONG_WORDS).value += wrong
    _visit(address, size, -tag, False, True)  # what is freed must not look as if it lived
    word_at(row, ADDRESS).value = 0
    call3(free, 0, address, 0)
    word_at(counts, FREES).value += 1


@njit(nogil=True)
def roam(state, allocate, free, slots, num_slots, streams, sizes, largest, share_every, operations, counts):
    """Fill empty slots and empty full ones, at random.

    `streams` (s,) are raw streams; `sizes` (k,) bytes are asked for now and then, as a plan knows them; nothing above
    `largest` is asked for. One full slot in `share_every` is used by another stream as well before it is freed.
    """
    seed = counts + SEED * 8
    for _ in range(operations):
        row = slots + draw(seed) % num_slots * SLOT_ROW * 8
        lock(word_at(row, BUSY))
        if word_at(row, ADDRESS).value == 0:
            chance = draw(seed)
            size = sizes[(chance >> 4) % len(sizes)] if chance & 15 == 0 else _any_size(seed)
            fill_slot(row, allocate, streams[(chance >> 40) % len(streams)], min(size, largest), counts)
        else:
            if draw(seed) % share_every == 0:
                share(state, word_at(row, ADDRESS).value, streams[draw(seed) % len(streams)])
                word_at(counts, SHARED).value += 1
            empty_slot(row, free, counts)
        unlock(word_at(row, BUSY))
    word_at(counts, OPERATIONS).value += operations


@njit(nogil=True)
def follow(allocate, free, own, slots, num_slots, streams, size, stream, dying, first_dying, deviations, counts):
    """One pass of a program over a cycle: entry i frees what dies before it, then allocates `size[i]` bytes.

    `own` is the address of a slot for each entry. What dies before entry i are the entries
    dying[first_dying[i] : first_dying[i + 1]]. One request in `deviations` (0: none) is left out, asked for with
    another size, preceded by one that is not on the cycle, or given to any thread, to be freed whenever it likes.
    """
    seed = counts + SEED * 8
    done = 0
    for i in range(len(size)):
        for j in range(first_dying[i], first_dying[i + 1]):
            row = own + dying[j] * SLOT_ROW * 8
            if word_at(row, ADDRESS).value != 0:
                empty_slot(row, free, counts)
                done += 1
        row, wanted, what = own + i * SLOT_ROW * 8, size[i], -1
        if word_at(row, ADDRESS).value != 0:  # it outlived the pass
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
            lock(word_at(other, BUSY))
            if word_at(other, ADDRESS).value == 0:
                fill_slot(other, allocate, streams[stream[i]], wanted if what == 3 else _any_size(seed), counts)
                done += 1
            unlock(word_at(other, BUSY))
            if what == 3:
                continue
        fill_slot(row, allocate, streams[stream[i]], wanted, counts)
        done += 1
    word_at(counts, OPERATIONS).value += done


@njit(nogil=True)
def empty_all(free, slots, num_slots, counts):
    for i in range(num_slots):
        row = slots + i * SLOT_ROW * 8
        lock(word_at(row, BUSY))
        if word_at(row, ADDRESS).value != 0:
            empty_slot(row, free, counts)
        unlock(word_at(row, BUSY))


@njit(nogil=True)
def hold(row):
    lock(word_at(row, BUSY))
    return word_at(row, ADDRESS).value


@njit(nogil=True)
def let_go(row):
    unlock(word_at(row, BUSY))
