"""The device code: one kernel for copy, fill, copy-and-fill and check, which goes by a table of absolute addresses.

Contract: what each row says (see worklist.py) is done exactly once; rows are done in any order. Where source and
target lie on the 16-byte grid, loads and stores are 128 bits wide: a row's byte count there is a multiple of 16, which
the code states as such, so that the compiler knows that no mask parts a word.

All addresses are 64-bit integers, also the table's: no tensor is needed to launch it, on a GPU or in the interpreter.
"""

import triton
import triton.language as tl

#: MODE: 0 copy, 1 fill, 2 copy and fill the source, 3 count the bytes that differ (launch.MODES)


@triton.jit
def _lanes(source, target, count, pattern, lane, MODE: tl.constexpr):
    """Tiles of `lane`, of a long row: pointers to its first elements, its elements, the pattern for each lane."""
    different = tl.zeros(lane.shape, tl.int32)
    at = count - count  # 0 of the same type
    while at < count:
        inside = at + lane < count
        if MODE == 0 or MODE == 2:
            tl.store(target + at + lane, tl.load(source + at + lane, mask=inside), mask=inside)
        if MODE == 1:
            tl.store(target + at + lane, pattern, mask=inside)
        if MODE == 2:
            tl.store(source + at + lane, pattern, mask=inside)
        if MODE == 3:
            different += _different_bytes(tl.load(target + at + lane, mask=inside, other=0), pattern, inside)
        at += lane.shape[0]
    return different


@triton.jit
def _different_bytes(value, pattern, inside):
    difference = value ^ pattern
    if value.dtype.primitive_bitwidth == 8:
        count = (difference != 0).to(tl.int32)
    else:
        count = ((difference & 255) != 0).to(tl.int32)
        count += (((difference >> 8) & 255) != 0).to(tl.int32)
        count += (((difference >> 16) & 255) != 0).to(tl.int32)
        count += (((difference >> 24) & 255) != 0).to(tl.int32)
    return tl.where(inside, count, 0)


@triton.jit
def _long(source, target, count, patterns, turn, MODE: tl.constexpr, LANES: tl.constexpr, GRID: tl.constexpr):
    """A long row: on the 16-byte grid, four 32-bit elements to a word, on the 4-byte grid, or single bytes."""
    lane = tl.arange(0, LANES)
    if GRID == 1:
        pattern = tl.load(patterns.to(tl.pointer_type(tl.uint8)) + turn * 16 + (lane & 15))
        p, q = source.to(tl.pointer_type(tl.uint8)), target.to(tl.pointer_type(tl.uint8))
    else:
        pattern = tl.load(patterns.to(tl.pointer_type(tl.int32)) + turn * 4 + (lane & 3))
        p, q = source.to(tl.pointer_type(tl.int32)), target.to(tl.pointer_type(tl.int32))
    if GRID == 16:
        p, q, count = tl.multiple_of(p, 16), tl.multiple_of(q, 16), (count >> 4) * 4
    if GRID == 4:
        count = count >> 2
    different = _lanes(p, q, count, pattern, lane, MODE)
    if MODE == 3:
        tl.atomic_add(source.to(tl.pointer_type(tl.int64)), tl.sum(different.to(tl.int64), 0))


@triton.jit
def _group(rows, patterns, first, num_rows, MODE: tl.constexpr, ROWS: tl.constexpr, GRID: tl.constexpr):
    """ROWS small rows at once: on the 16-byte grid, 512 bytes each at most, or anywhere, 64 bytes each at most."""
    row = first + tl.arange(0, ROWS)
    there = row < num_rows
    source = tl.load(rows + row * 4, mask=there, other=0)
    target = tl.load(rows + row * 4 + 1, mask=there, other=0)
    count = tl.load(rows + row * 4 + 2, mask=there, other=0)
    turn = tl.load(rows + row * 4 + 3, mask=there, other=0)
    if GRID == 16:
        lane = tl.arange(0, 128)[None, :]
        inside = lane < ((count >> 4) * 4)[:, None]
        p = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)[:, None] + lane
        q = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)[:, None] + lane
        pattern = tl.load(patterns.to(tl.pointer_type(tl.int32)) + (turn * 4)[:, None] + (lane & 3))
    else:
        lane = tl.arange(0, 64)[None, :]
        inside = lane < count[:, None]
        p = source.to(tl.pointer_type(tl.uint8))[:, None] + lane
        q = target.to(tl.pointer_type(tl.uint8))[:, None] + lane
        pattern = tl.load(patterns.to(tl.pointer_type(tl.uint8)) + (turn * 16)[:, None] + (lane & 15))
    if MODE == 0 or MODE == 2:
        tl.store(q, tl.load(p, mask=inside), mask=inside)
    if MODE == 1:
        tl.store(q, pattern, mask=inside)
    if MODE == 2:
        tl.store(p, pattern, mask=inside)
    if MODE == 3:
        different = _different_bytes(tl.load(q, mask=inside, other=0), pattern, inside)
        total = tl.sum(different.to(tl.int64), 1)
        tl.atomic_add(source.to(tl.pointer_type(tl.int64)), total, mask=there & (total != 0))


@triton.jit
def batched(table, MODE: tl.constexpr, TILE_BYTES: tl.constexpr, BYTE_TILE: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """Do a table (see worklist.py): a persistent grid, to whose programs the units are handed out to and fro.

    In even rounds the first program gets the first unit, in odd ones the last does, so that with units in falling sizes
    the sums are nearly even.
    """
    header = table.to(tl.pointer_type(tl.int64))
    long16, long4, long1 = tl.load(header), tl.load(header + 1), tl.load(header + 2)
    small16, small1 = tl.load(header + 3), tl.load(header + 4)
    patterns = tl.multiple_of(table + 64, 16)
    rows = header + 40
    ends4 = long16 + long4
    ends1 = ends4 + long1
    groups16 = ends1 + tl.cdiv(small16, GROUP_ROWS)
    units = groups16 + tl.cdiv(small1, GROUP_ROWS)
    unit = tl.program_id(0).to(tl.int64)
    step = 2 * (tl.num_programs(0) - unit) - 1
    while unit < units:  # not range(): Triton's interpreter fails on it with NumPy 2.4 and later
        if unit < ends1:
            source, target = tl.load(rows + unit * 4), tl.load(rows + unit * 4 + 1)
            count, turn = tl.load(rows + unit * 4 + 2), tl.load(rows + unit * 4 + 3)
            if unit < long16:
                _long(source, target, count, patterns, turn, MODE, TILE_BYTES // 4, 16)
            elif unit < ends4:
                _long(source, target, count, patterns, turn, MODE, BYTE_TILE, 4)
            else:
                _long(source, target, count, patterns, turn, MODE, BYTE_TILE, 1)
        elif unit < groups16:
            _group(rows + ends1 * 4, patterns, (unit - ends1) * GROUP_ROWS, small16, MODE, GROUP_ROWS, 16)
        else:
            last = rows + (ends1 + small16) * 4
            _group(last, patterns, (unit - groups16) * GROUP_ROWS, small1, MODE, GROUP_ROWS, 1)
        unit += step
        step = 2 * tl.num_programs(0) - step
