"""Pools, their segments and free blocks: for each stream and kind of request one pool, whose segments are cut.

Contract: the lock is held, except where Python calls. Small requests share segments; large requests split general
segments, as a caching allocator does, except what is expected to last (the state of an optimizer): it has segments that
hold nothing else, so that it does not pin what is transient. While a CUDA graph is captured everything comes from a
private pool, whose memory nobody else gets as long as the graph can be replayed: two rows, of which one (LASTING_BIT)
has what is expected to outlive the capture.

The blocks of a segment cover it without a gap, in order; free neighbours are one block, so a segment in which nothing
lives is one free block. Segments that came from the device as one piece go back together.

Free blocks sit in bins of near-equal sizes, one for each multiple of 512 bytes below 64 KiB and 64 an octave from there
on, with a bit for each bin that holds any (Masmano, Ripoll, Crespo and Real, "TLSF: a new dynamic memory allocator for
real-time systems", ECRTS 2004), so that the best fit is found exactly:
- a bin of one size is a list; a block enters it before the first if its address is lower, else after it, so that
  low addresses come up sooner without a search;
- a bin of several sizes is a treap ordered by (size, address), of which the lowest fit is taken (Seidel and Aragon,
  "Randomized search trees", Algorithmica 1996).

A link is the word that holds the row of a block: a root, or a field of the block before it.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import (
    ACTION_SEGMENT_ALLOC,
    ACTION_SEGMENT_FREE,
    BLOCK_FREE,
    GENERAL_KIND,
    GRANULE,
    LASTING_BIT,
    POOL_ASLEEP,
    POOL_PINNED,
    POOL_USED,
    PRIVATE_KINDS,
)
from stalloc.core.counters import count_reserved, record
from stalloc.core.intrinsics import first_bit, last_bit, under_lock
from stalloc.core.records import bins_at, block_at, filled_at, left_of, pool_at, right_of, root_at, segment_at

_FINE = 128  # sizes in units of ALIGNMENT below this have a bin each, which is a list
_PARTS_BITS = 6  # an octave above has 2 ** this bins
_FIRST_OCTAVE = 7  # 2 ** this is _FINE


@inner(forceinline=True)
def pool_of(state, row):
    """The pool of a block: that of its segment."""
    return segment_at(state, block_at(state, row).segment).pool


@inner(forceinline=True)
def is_before(state, a, b):
    """Whether a block is smaller than another, or as large and at a lower address."""
    size, other = block_at(state, a).size_bytes, block_at(state, b).size_bytes
    return size < other or (size == other and block_at(state, a).address < block_at(state, b).address)


@inner(forceinline=True)
def _bin(size):
    units = size >> 9
    if units < _FINE:
        return units
    octave = last_bit(units)
    return _FINE + ((octave - _FIRST_OCTAVE) << _PARTS_BITS) + ((units >> (octave - _PARTS_BITS)) & 63)


@inner(forceinline=True)
def _mark_bin(bins, nth, filled):
    """Note whether a bin holds any blocks."""
    word = filled_at(bins, nth >> 6)
    bit, summary_bit = 1 << (nth & 63), 1 << (nth >> 6)
    bits = word.value | bit if filled else word.value & ~bit
    word.value = bits
    bins.summary = bins.summary | summary_bit if bits != 0 else bins.summary & ~summary_bit


@inner(forceinline=True)
def _next_bin(bins, after):
    """The first bin beyond `after` that holds any blocks; -1 if none does."""
    word = (after + 1) >> 6
    bits = filled_at(bins, word).value & (-1 << ((after + 1) & 63))
    if bits == 0:
        words = bins.summary & (-2 << word)
        if words == 0:
            return -1
        word = first_bit(words)
        bits = filled_at(bins, word).value
    return (word << 6) + first_bit(bits)


@inner(forceinline=True)
def _enter_list(state, link, row):
    block = block_at(state, row)
    previous, following = 0, link.value
    if following != 0 and block_at(state, following).address < block.address:
        previous, link = following, right_of(block_at(state, following))
        following = link.value
    link.value = row
    block.left = previous
    block.right = following
    if following != 0:
        block_at(state, following).left = row


@inner(forceinline=True)
def _leave_list(state, first, row):
    previous, following = block_at(state, row).left, block_at(state, row).right
    if previous == 0:
        first.value = following
    else:
        block_at(state, previous).right = following
    if following != 0:
        block_at(state, following).left = previous


@inner(forceinline=True)
def _priority(row):
    """The priority of a block in its treap: its row, mixed, is as good as random and need not be kept."""
    row *= 0x1E3779B97F4A7C15
    return (row ^ (row >> 29)) * 0x3F58476D1CE4E5B9


@njit(inline="always")
def _towards(state, current, row):
    """The link below a block on the way to another in its treap."""
    block = block_at(state, current)
    return left_of(block) if is_before(state, row, current) else right_of(block)


@inner()
def _enter_tree(state, link, row):
    """Add a block to the treap whose root is at `link`: those of lower priority on its way come below it."""
    priority, current = _priority(row), link.value
    while current != 0 and _priority(current) >= priority:
        link = _towards(state, current, row)
        current = link.value
    link.value = row
    left, right = left_of(block_at(state, row)), right_of(block_at(state, row))
    while current != 0:
        if is_before(state, current, row):
            left.value = current
            left = right_of(block_at(state, current))
            current = left.value
        else:
            right.value = current
            right = left_of(block_at(state, current))
            current = right.value
    left.value = 0
    right.value = 0


@inner()
def _leave_tree(state, link, row):
    """Take a block out of the treap whose root is at `link`: the two below it are joined in its place."""
    current = link.value
    while current != row:
        link = _towards(state, current, row)
        current = link.value
    a, b = block_at(state, row).left, block_at(state, row).right
    while a != 0 and b != 0:
        if _priority(a) >= _priority(b):
            link.value = a
            link = right_of(block_at(state, a))
            a = link.value
        else:
            link.value = b
            link = left_of(block_at(state, b))
            b = link.value
    link.value = a if a != 0 else b


@inner()
def insert_free(state, row):
    """Add a free block to those of its pool."""
    bins, nth = bins_at(state, pool_of(state, row)), _bin(block_at(state, row).size_bytes)
    root = root_at(bins, nth)
    if root.value == 0:
        _mark_bin(bins, nth, True)
    if nth < _FINE:
        _enter_list(state, root, row)
    else:
        _enter_tree(state, root, row)


@inner()
def remove_free(state, row):
    """Take a free block out of those of its pool."""
    bins, nth = bins_at(state, pool_of(state, row)), _bin(block_at(state, row).size_bytes)
    root = root_at(bins, nth)
    if nth < _FINE:
        _leave_list(state, root, row)
    else:
        _leave_tree(state, root, row)
    if root.value == 0:
        _mark_bin(bins, nth, False)


@inner(forceinline=True)
def _fit_under(state, root, size):
    best, current = 0, root
    while current != 0:
        block = block_at(state, current)
        if block.size_bytes >= size:
            best, current = current, block.left
        else:
            current = block.right
    return best


@inner()
def best_fit(state, pool, size):
    """The smallest free block of a pool with `size` bytes; 0 if there is none."""
    bins, nth = bins_at(state, pool), _bin(size)
    root = root_at(bins, nth).value
    best = root if nth < _FINE else _fit_under(state, root, size)
    if best == 0:
        nth = _next_bin(bins, nth)
        if nth >= 0:  # each of its blocks is large enough
            root = root_at(bins, nth).value
            best = root if nth < _FINE else _fit_under(state, root, size)
    return best


@inner()
def find_pool(state, stream, kind, create):
    """The row of the pool for a stream and a kind; -1 if there is none and none is made."""
    mask = state.heap.pools_mask
    row = ((kind >> 9) * 31 + kind + stream * 7919) & mask
    while True:
        pool = pool_at(state, row)
        if pool.status == 0:
            used = state.heap.pools_used
            # one in eight rows is kept for small and general pools, so that a program of many sizes still gets those
            if not create or used >= mask or (kind > GENERAL_KIND and used >= mask - (mask >> 3)):
                return -1
            state.heap.pools_used = used + 1
            pool.status = POOL_PINNED if kind >= PRIVATE_KINDS else POOL_USED
            pool.stream = stream
            pool.kind = kind
            return row
        if pool.stream == stream and pool.kind == kind and pool.status != POOL_ASLEEP:
            return row
        row = (row + 1) & mask


@under_lock()
def unpin_pools(state, kind):
    for row in range(state.heap.pools_mask + 1):
        pool = pool_at(state, row)
        if pool.status == POOL_PINNED and (pool.kind | LASTING_BIT) == (kind | LASTING_BIT):
            pool.status = POOL_USED


@under_lock()
def largest_free(state):
    largest = 0
    for row in range(state.heap.pools_mask + 1):
        bins = bins_at(state, row)
        if pool_at(state, row).status != POOL_USED or bins.summary == 0:
            continue
        word = last_bit(bins.summary)
        nth = (word << 6) + last_bit(filled_at(bins, word).value)
        block = root_at(bins, nth).value
        while nth >= _FINE and block_at(state, block).right != 0:
            block = block_at(state, block).right
        largest = max(largest, block_at(state, block).size_bytes)
    return largest


@under_lock(**BORROWING)
def let_pools_sleep(state, pages):
    """Requests get other pools of the same stream and kind. What is freed is free, and its pages may go."""
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if segment.address == 0 or pool_at(state, segment.pool).status != POOL_USED:
            continue
        for page in pages:
            if page < segment.address + segment.size_bytes and page + GRANULE > segment.address:
                pool_at(state, segment.pool).status = POOL_ASLEEP
                break


@inner()
def _give_segment_to(state, number, pool):
    """Let another pool of the same kind have a segment with what is free in it."""
    segment = segment_at(state, number)
    before = segment.pool
    row = segment.first
    while row != 0:
        if block_at(state, row).state == BLOCK_FREE:
            segment.pool = before
            remove_free(state, row)
            segment.pool = pool
            insert_free(state, row)
        row = block_at(state, row).next
    segment.pool = pool


@under_lock()
def wake_pools(state):
    for row in range(state.heap.pools_mask + 1):
        if pool_at(state, row).status == POOL_ASLEEP:
            pool_at(state, row).status = POOL_USED
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if segment.address != 0:
            pool = find_pool(state, pool_at(state, segment.pool).stream, pool_at(state, segment.pool).kind, False)
            if pool != segment.pool:
                _give_segment_to(state, number, pool)


@inner()
def put_on(state, row, status):
    """Make a block free or unmapped, whichever `status` says, and put it on the list of such."""
    block_at(state, row).state = status
    if status == BLOCK_FREE:
        insert_free(state, row)
    else:
        block, following = block_at(state, row), state.heap.first_unmapped
        block.left = 0
        block.right = following
        if following != 0:
            block_at(state, following).left = row
        state.heap.first_unmapped = row


@inner()
def take_off(state, row):
    """Take a free or unmapped block off the list that it is on."""
    block = block_at(state, row)
    if block.state == BLOCK_FREE:
        remove_free(state, row)
        return
    if block.left != 0:
        block_at(state, block.left).right = block.right
    else:
        state.heap.first_unmapped = block.right
    if block.right != 0:
        block_at(state, block.right).left = block.left


@inner()
def allocate_block_row(state):
    """A row for a block; 0 if the table is full."""
    spare = state.heap.free_block_row
    if spare != 0:
        state.heap.free_block_row = block_at(state, spare).next
        return spare
    used = state.heap.blocks_used
    if used >= state.heap.blocks_capacity:
        return 0
    state.heap.blocks_used = used + 1
    return used


@inner()
def release_block_row(state, row):
    """Give the row of a block back."""
    block_at(state, row).next = state.heap.free_block_row
    state.heap.free_block_row = row


@inner()
def _absorb(state, row, following):
    """Let a block have the range of the one above it; neither is on a list."""
    block, gone = block_at(state, row), block_at(state, following)
    block.size_bytes += gone.size_bytes
    block.next = gone.next
    if gone.next != 0:
        block_at(state, gone.next).previous = row
    release_block_row(state, following)


@inner()
def cut(state, row, size):
    """Cut a block that is on no list after `size` bytes: the row of the rest, 0 if that is nothing or has no row."""
    block = block_at(state, row)
    other = allocate_block_row(state) if block.size_bytes != size else 0
    if other == 0:
        return 0
    rest = block_at(state, other)
    set_up_block(state, other, block.address + size, block.size_bytes - size, block.segment, block.state)
    rest.previous = row
    rest.next = block.next
    if block.next != 0:
        block_at(state, block.next).previous = other
    block.next = other
    block.size_bytes = size
    return other


@inner()
def join(state, row, status):
    """Join a block that is on no list with the neighbours of this state, and put it on their list; its row then."""
    block = block_at(state, row)
    following, previous = block.next, block.previous
    if following != 0 and block_at(state, following).state == status:
        take_off(state, following)
        _absorb(state, row, following)
    if previous != 0 and block_at(state, previous).state == status:
        take_off(state, previous)
        _absorb(state, previous, row)
        row = previous
    put_on(state, row, status)
    return row


@inner()
def allocate_segment_row(state, pool, address, size, first):
    """A row for a segment of a pool whose first block is `first`; 0 if the table is full."""
    row = state.heap.free_segment_row
    if row != 0:
        state.heap.free_segment_row = segment_at(state, row).first
    else:
        row = state.heap.segments_used
        if row >= state.heap.segments_capacity:
            return 0
        state.heap.segments_used = row + 1
    segment = segment_at(state, row)
    segment.address = address
    segment.pool = pool
    segment.size_bytes = segment.mapped_bytes = size
    segment.first = first
    segment.num_live = segment.interval_low = segment.interval_high = segment.until = 0
    segment.group = segment.is_paged = segment.tail = segment.head = 0
    segment.last_used = state.iterations.iterations_ever
    return row


@inner()
def release_segment_row(state, row):
    """Give the row of a segment back."""
    segment = segment_at(state, row)
    segment.address = 0
    segment.interval_high = 0
    segment.first = state.heap.free_segment_row
    state.heap.free_segment_row = row


@inner()
def set_up_block(state, row, address, size, segment, status):
    """Fill the row of a block without neighbours."""
    block = block_at(state, row)
    block.address = address
    block.size_bytes = size
    block.previous = block.next = 0
    block.segment = segment
    block.state = status
    block.born = -1


@inner()
def add_segment(state, pool, address, size, status):
    """Give a pool a segment, one block that is free or unmapped (`status`); its row, 0 if the tables are full."""
    block = allocate_block_row(state)
    if block == 0:
        return 0
    segment = allocate_segment_row(state, pool, address, size, block)
    if segment == 0:
        release_block_row(state, block)
        return 0
    set_up_block(state, block, address, size, segment, status)
    put_on(state, block, status)
    return segment


@inner()
def release_blocks(state, segment):
    """Take all blocks of a segment, in which nothing lives, off their lists, and give their rows back."""
    row = segment_at(state, segment).first
    while row != 0:
        following = block_at(state, row).next
        take_off(state, row)
        release_block_row(state, row)
        row = following


@inner()
def remove_segment(state, row):
    """Take a segment in which nothing lives out of the heap."""
    release_blocks(state, row)
    release_segment_row(state, row)


@inner()
def _is_removable(state, segment, used_before):
    """Whether a segment and its group hold nothing, it was not used of late, and no lease or graph keeps it."""
    if segment.address == 0 or segment.num_live != 0 or segment.interval_high != 0 or segment.is_paged == 1:
        return False
    for row in range(1, state.heap.segments_used if segment.group != 0 else 1):
        other = segment_at(state, row)
        if other.address != 0 and other.group == segment.group and other.num_live != 0:
            return False
    return segment.last_used < used_before and pool_at(state, segment.pool).status != POOL_PINNED


@under_lock()
def give_segment(state, pool, address, size):
    if add_segment(state, pool, address, size, BLOCK_FREE) == 0:
        return False
    count_reserved(state, pool_at(state, pool).kind, size, 1)
    state.statistics.num_segment_allocs += 1
    if state.hot.recording == 1:
        record(state, ACTION_SEGMENT_ALLOC, pool_at(state, pool).stream, address, size)
    return True


@under_lock(**BORROWING)
def remove_free_segments(state, addresses, sizes, idle_iterations):
    """As `DeviceHeap.remove_free_segments`: of those that came from the device as one piece all or none; how many."""
    used_before, count = state.iterations.iterations_ever + 1 - idle_iterations, 0
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        if count == len(addresses) or not _is_removable(state, segment, used_before):
            continue
        count_reserved(state, pool_at(state, segment.pool).kind, -segment.size_bytes, -1)
        addresses[count] = segment.address
        sizes[count] = segment.size_bytes
        remove_segment(state, row)
        state.statistics.num_segment_frees += 1
        if state.hot.recording == 1:
            record(state, ACTION_SEGMENT_FREE, 0, addresses[count], sizes[count])
        count += 1
    return count
