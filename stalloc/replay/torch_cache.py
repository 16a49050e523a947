"""What PyTorch's CUDA caching allocator does with a program, event by event.

Contract: every choice is the one of torch 2.11's c10/cuda/CUDACachingAllocator.cpp: the block that a request gets,
whether it is split, when device memory is taken, and what goes back when the device has no more. A device fails only
when its capacity is exceeded. A request of no bytes gets no block.
"""

from stalloc.compiled import njit
from stalloc.replay.protocol import Kind
from stalloc.replay.torch_blocks import (
    ADDRESS,
    AGE,
    ALLOCATED,
    ALLOWED,
    BASE,
    BLOCK_BYTES,
    CAPACITY,
    COLLECT_ABOVE,
    EXPANDABLE,
    FREE,
    LARGE_SEARCHES,
    LARGE_SEGMENT,
    LIVE,
    MAX_ROUNDING,
    MAX_SPLIT,
    NEXT,
    NUM_SPARE,
    NUM_WAITING,
    OUT_OF_MEMORY,
    PEAK_ALLOCATED,
    POOL,
    PREVIOUS,
    REQUEST,
    REQUESTED,
    RESERVED,
    RETRIES,
    ROW,
    ROWS_END,
    SIZE,
    SMALL_SEARCHES,
    STATUS,
    UNMAPPED,
    WAITING,
    add_free,
    add_segment,
    best_fit,
    count_reserved,
    cut,
    device_address,
    following,
    free_tree,
    give_row,
    last,
    merge_neighbours,
    remove,
)
from stalloc.replay.torch_expandable import grow, unmap_pages

DONE, NEED_ROWS, FAILED = range(3)
RELEASE = len(Kind)
"""A kind of event beyond those of all models, for recordings: the segment whose address stands in the place of the
request goes back to the device, if it is free as a whole."""

_MIB = 1 << 20
_ALLOC = int(Kind.ALLOC)
_COMPLETED, _EMPTY = int(Kind.FREE_COMPLETED), int(Kind.EMPTY_CACHE)


@njit()
def _floor_log2(value):
    power = 0
    while value > 1:
        value >>= 1
        power += 1
    return power


@njit()
def round_size(divisions, size):
    """Bytes of the block that a request of `size` bytes is looked for with."""
    if size < 512:
        return 512
    power = _floor_log2(size)
    parts = divisions[min(max(power - 20, 0), len(divisions) - 1)]
    if parts > 1 and size > 512 * parts:
        if size == 1 << power:
            return size
        step = (1 << power) // parts
        return 2 << power if step == 0 else (size + step - 1) // step * step
    return (size + 511) // 512 * 512


@njit()
def _segment_size(numbers, size):
    if size <= _MIB:
        return 2 * _MIB
    if size < 10 * _MIB:
        return numbers[LARGE_SEGMENT]
    return (size + 2 * _MIB - 1) // (2 * _MIB) * (2 * _MIB)


@njit()
def _growing_size(cells, block):
    """What a block can become by mapping more."""
    after = cells[block + NEXT]
    return cells[block + SIZE] + (cells[after + SIZE] if after != 0 and cells[after + STATUS] == UNMAPPED else 0)


@njit()
def _find_cached(state, pool, size):
    """Take a free block that serves the request out of its tree; 0 if there is none."""
    cells, numbers = state.cells, state.numbers
    if numbers[COLLECT_ABOVE] >= 0:
        numbers[SMALL_SEARCHES + (pool & 1)] += 1
    header = free_tree(state, pool)
    block = best_fit(cells, header, size)
    if block == 0:
        return 0
    if numbers[EXPANDABLE]:
        # the block that grows least far is the best, not the smallest
        after = following(cells, header, block)
        while after != 0 and cells[block + BASE] != 0 and _growing_size(cells, after) < _growing_size(cells, block):
            block = after
            after = following(cells, header, block)
    limit = numbers[MAX_SPLIT]
    if limit > 0 and size < limit <= cells[block + SIZE]:
        return 0
    if 0 < limit <= size and cells[block + SIZE] >= size + numbers[MAX_ROUNDING]:
        return 0
    remove(cells, header, block)
    return block


@njit()
def _take_from_device(state, pool, size):
    """A block of a new segment, in no tree; 0 if the device or the process's share has no more."""
    numbers = state.numbers
    wanted = _segment_size(numbers, size)
    if numbers[ALLOWED] >= 0 and numbers[RESERVED] + wanted > numbers[ALLOWED]:
        return 0
    if numbers[EXPANDABLE]:
        return grow(state, pool, size)
    if numbers[CAPACITY] > 0 and numbers[RESERVED] + wanted > numbers[CAPACITY]:
        return 0
    block = add_segment(state, pool, device_address(state, wanted, wanted), wanted, 0)
    count_reserved(state, wanted)
    return block


@njit()
def _release(state, block):
    """Give a segment that is one free block back to the device."""
    cells = state.cells
    remove(cells, free_tree(state, cells[block + POOL]), block)
    count_reserved(state, -cells[block + SIZE])
    give_row(state, block)


@njit()
def _is_whole(cells, block):
    """Whether a row is a free block that spans a segment of its own."""
    return cells[block + STATUS] == FREE and cells[block + PREVIOUS] == 0 and cells[block + NEXT] == 0


@njit()
def _collect(state):
    """Give back the large segments that were free for longer than the mean, until enough is free."""
    cells, numbers = state.cells, state.numbers
    if numbers[COLLECT_ABOVE] < 0 or numbers[RESERVED] <= numbers[COLLECT_ABOVE]:
        return
    target = numbers[RESERVED] - numbers[COLLECT_ABOVE]
    now, total_age, count = numbers[LARGE_SEARCHES], 0, 0
    for block in range(ROW, numbers[ROWS_END], ROW):
        if _is_whole(cells, block) and cells[block + POOL] & 1:
            total_age += now - cells[block + AGE]
            count += 1
    reclaimed, went_on = 0, True
    while reclaimed < target and went_on and count > 0:
        threshold = total_age / count
        went_on = False
        for block in range(ROW, numbers[ROWS_END], ROW):
            if _is_whole(cells, block) and cells[block + POOL] & 1 and now - cells[block + AGE] >= threshold:
                went_on = True
                reclaimed += cells[block + SIZE]
                total_age -= now - cells[block + AGE]
                count -= 1
                _release(state, block)


@njit()
def _release_oversize(state, pool, size):
    """Give back unsplittable blocks of the stream, enough for the request if there are; whether it was enough.

    Expandable segments have no blocks of their own to give back: they wait until the cache is emptied.
    """
    cells, numbers = state.cells, state.numbers
    limit, header = numbers[MAX_SPLIT], free_tree(state, pool)
    if limit == 0 or numbers[EXPANDABLE]:
        return False
    wanted = max(size, limit)
    block = best_fit(cells, header, wanted)
    if block != 0:
        _release(state, block)
        return True
    released = 0
    while released < wanted:
        block = last(cells, header)
        if block == 0 or cells[block + SIZE] < limit:
            return False
        released += cells[block + SIZE]
        _release(state, block)
    return True


@njit()
def _complete(state, block):
    """The bytes of a block that was given up may be handed out again."""
    cells = state.cells
    state.holder[cells[block + REQUEST]] = 0
    if cells[block + STATUS] == WAITING:
        state.numbers[NUM_WAITING] -= 1
    cells[block + STATUS] = FREE
    merge_neighbours(state, block, FREE, True)
    add_free(state, block)


@njit()
def empty_cache(state):
    """Wait for all streams, then give back every segment and page without a live block."""
    cells, numbers = state.cells, state.numbers
    end = numbers[ROWS_END]
    if numbers[NUM_WAITING] > 0:
        for block in range(ROW, end, ROW):
            if cells[block + STATUS] == WAITING:
                _complete(state, block)
    for block in range(ROW, end, ROW):
        if cells[block + STATUS] == FREE:
            if cells[block + BASE] != 0:
                unmap_pages(state, block)
            elif cells[block + PREVIOUS] == 0 and cells[block + NEXT] == 0:
                _release(state, block)


@njit()
def _release_at(state, address):
    cells = state.cells
    for block in range(ROW, state.numbers[ROWS_END], ROW):
        if cells[block + ADDRESS] == address and _is_whole(cells, block):
            _release(state, block)
            return


@njit()
def _allocate(state, request, size, stream):
    """Serve a request: its block, 0 when memory runs out."""
    cells, numbers = state.cells, state.numbers
    rounded = round_size(state.divisions, size)
    pool = 2 * stream + (1 if rounded > _MIB else 0)
    block = _find_cached(state, pool, rounded)
    if block == 0:
        _collect(state)
        block = _take_from_device(state, pool, rounded)
        if block == 0 and _release_oversize(state, pool, rounded):
            block = _take_from_device(state, pool, rounded)
        if block == 0:
            empty_cache(state)
            numbers[RETRIES] += 1
            block = _take_from_device(state, pool, rounded)
        if block == 0:
            numbers[OUT_OF_MEMORY] += 1
            return 0
    rest = cells[block + SIZE] - rounded
    if pool & 1 == 0 or numbers[EXPANDABLE]:
        split = rest >= 512
    else:
        split = (numbers[MAX_SPLIT] == 0 or rounded < numbers[MAX_SPLIT]) and rest > _MIB
    if split:
        add_free(state, cut(state, block, rounded, FREE))
    cells[block + STATUS] = LIVE
    cells[block + REQUEST] = request
    cells[block + REQUESTED] = size
    state.holder[request] = block
    numbers[ALLOCATED] += size
    numbers[BLOCK_BYTES] += cells[block + SIZE]
    numbers[PEAK_ALLOCATED] = max(numbers[PEAK_ALLOCATED], numbers[ALLOCATED])
    return block


@njit()
def _give_up(state, block):
    """The program does not need the block any more; its streams may."""
    cells, numbers = state.cells, state.numbers
    numbers[ALLOCATED] -= cells[block + REQUESTED]
    numbers[BLOCK_BYTES] -= cells[block + SIZE]
    cells[block + STATUS] = WAITING
    numbers[NUM_WAITING] += 1


@njit()
def _has_rows(state):
    """Whether the next event finds rows enough: unmapping may cut every free block in three."""
    numbers = state.numbers
    used = numbers[ROWS_END] - ROW * numbers[NUM_SPARE]
    wanted = 16 * ROW + (2 * used if numbers[EXPANDABLE] else 0)
    return len(state.cells) - used >= wanted


@njit()
def run(state, events, keep_going, start, reserved, allocated, block_bytes, address):
    """Go on with the events from position `start`; writes the (m,) columns as it goes.

    Returns the position it came to and why: DONE, NEED_ROWS, or FAILED where a request ran out of memory and
    `keep_going` is false; otherwise a request that ran out of memory holds nothing and its frees do nothing.
    """
    cells, numbers = state.cells, state.numbers
    for at in range(start, len(events.kind)):
        if not _has_rows(state):
            return at, NEED_ROWS
        kind, request = events.kind[at], events.request[at]
        given = -1
        if kind == _EMPTY:
            empty_cache(state)
        elif kind == RELEASE:
            _release_at(state, request)
        elif kind == _ALLOC:
            size = events.size[request]
            if size > 0:
                block = _allocate(state, request, size, events.stream[request])
                if block == 0:
                    if not keep_going:
                        return at, FAILED
                else:
                    given = cells[block + ADDRESS]
        else:
            block = state.holder[request]
            if block != 0:
                if cells[block + STATUS] == LIVE:
                    _give_up(state, block)
                if kind == _COMPLETED:
                    _complete(state, block)
        reserved[at] = numbers[RESERVED]
        allocated[at] = numbers[ALLOCATED]
        block_bytes[at] = numbers[BLOCK_BYTES]
        address[at] = given
    return len(events.kind), DONE
