"""From a table of blocks to the table that a launch reads: which program does what.

Contract: the rows cover every byte of every block exactly once. Bytes that lie off the 16-byte grid are cut off into
rows of their own, so that the rest goes by 128-bit words; large blocks are cut into chunks, so that one of them keeps
all programs busy; small ones are grouped, so that a program does several at once.

The table is one column of 64-bit words: a header, the pattern in its 16 rotations, the rows. Rows lie in sections, one
for each way to do them, the largest first: 0 long on the 16-byte grid, 1 long on the 4-byte grid, 2 long anywhere, 3
small on the 16-byte grid, 4 small anywhere. `unit` counts what a program takes at a time: a row of a long section, or a
group of rows of a small one.
"""

import numpy as np

from stalloc.compiled import njit

from .block_columns import PATTERN_BYTES, Column
from .configs import Config

HEADER_WORDS = 8  # rows in each section: long by 16 bytes, long by 4, long by 1, small by 16, small by 1
PATTERN_WORDS = 32  # 16 rotations of 16 bytes
ROWS_AT = HEADER_WORDS + PATTERN_WORDS
ROW_WORDS = 4  # source (for a check: where its count goes), target, bytes, rotation of the pattern

MAX_CHUNK_BYTES = 4 << 20
CHUNKS_PER_PROGRAM = 8  # about how many units of a large table each program gets, so that none ends much later

SMALL_VECTOR_BYTES = 512  # a row of the small sections has at most so many bytes: on the 16-byte grid,
SMALL_BYTES = 64  # or anywhere
_CLASSES = 64  # of sizes, by which what is left over is sorted


@njit(nogil=True)
def _cut(source, target, size, alone):
    """Head, body (bytes) and the body's section of one block; `alone`: the source's place does not matter."""
    apart = 0 if alone else source - target
    if size <= SMALL_BYTES and (apart & 15 != 0 or (target | size) & 15 != 0):
        return 0, size, 4
    if apart & 3 != 0:
        return 0, size, 2
    grain = 16 if apart & 15 == 0 else 4
    head = -target & (grain - 1)
    body = (size - head) & -grain
    if grain == 4:
        return head, body, 1
    return head, body, 3 if body <= SMALL_VECTOR_BYTES else 0


@njit(nogil=True)
def _count_rows(source, target, size, alone, chunk, lengths):
    """Add up the rows of each section, (5,); long bodies are cut into chunks of `chunk` bytes."""
    for i in range(len(size)):
        head, body, section = _cut(source[i], target[i], size[i], alone)
        if body > 0:
            lengths[section] += (body + chunk - 1) // chunk if section < 3 else 1
        lengths[4] += (head > 0) + (size[i] > head + body)


@njit(nogil=True)
def _write(rows, at, source, target, count, turn):
    rows[at, 0] = source
    rows[at, 1] = target
    rows[at, 2] = count
    rows[at, 3] = turn & 15


@njit(nogil=True)
def _write_rows(source, target, size, alone, fixed, chunk, first, rows):
    """Write the rows; section s begins at first[s]. `fixed`: a source is not an address of bytes and stays as it is.

    Full chunks come first, then what is left over in falling classes of size: with units handed out to and fro
    (triton_code.batched) every program gets nearly as many bytes.
    """
    n = len(size)
    left, place = np.zeros(n, np.int64), np.zeros((3, _CLASSES), np.int64)
    for i in range(n):
        head, body, section = _cut(source[i], target[i], size[i], alone)
        step = 0 if fixed else 1
        if section < 3:
            for at in range(head, head + body - chunk + 1, chunk):
                _write(rows, first[section], source[i] + step * at, target[i] + at, chunk, at)
                first[section] += 1
            left[i] = body % chunk
        elif body > 0:
            _write(rows, first[section], source[i] + step * head, target[i] + head, body, head)
            first[section] += 1
        if head > 0:
            _write(rows, first[4], source[i], target[i], head, 0)
            first[4] += 1
        behind = head + body
        if size[i] > behind:
            _write(rows, first[4], source[i] + step * behind, target[i] + behind, size[i] - behind, behind)
            first[4] += 1
    most = 1
    for i in range(n):
        most = max(most, left[i] + 1)
    for i in range(n):
        if left[i] > 0:
            section = _cut(source[i], target[i], size[i], alone)[2]
            place[section, _CLASSES - 1 - left[i] * _CLASSES // most] += 1
    for section in range(3):
        at = first[section]
        for nth in range(_CLASSES):
            count = place[section, nth]
            place[section, nth] = at
            at += count
        first[section] = at
    for i in range(n):
        if left[i] > 0:
            head, body, section = _cut(source[i], target[i], size[i], alone)
            at, nth = head + body - left[i], _CLASSES - 1 - left[i] * _CLASSES // most
            _write(rows, place[section, nth], source[i] + (0 if fixed else at), target[i] + at, left[i], at)
            place[section, nth] += 1


def work_table(
    source: Column | None,
    target: Column,
    size: Column,
    pattern: bytes,
    *,
    config: Config,
    num_programs: int,
    counts: bool = False,
) -> tuple[np.ndarray, int]:
    """The table of one launch, as int64 words, and its number of units.

    (n,) addresses and bytes, none of them empty. `source` None: only targets are touched. For a check (`counts`)
    sources are the addresses of the 64-bit words that the differences of each block add up in.
    """
    first = target if source is None else source
    alone = source is None or counts  # only the targets' alignment matters
    chunk = _chunk_bytes(int(size.sum()), num_programs, config)
    first, target, size = (np.ascontiguousarray(column) for column in (first, target, size))
    lengths = np.zeros(5, np.int64)
    _count_rows(first, target, size, alone, chunk, lengths)
    table = np.zeros(ROWS_AT + int(lengths.sum()) * ROW_WORDS, np.int64)
    table[:5] = lengths
    twice = np.frombuffer(pattern + pattern, np.uint8)
    rotations = [twice[i : i + PATTERN_BYTES] for i in range(PATTERN_BYTES)]
    table[HEADER_WORDS:ROWS_AT] = np.concatenate(rotations).view(np.int64)
    begins, rows = np.cumsum(lengths) - lengths, table[ROWS_AT:].reshape(-1, 4)
    _write_rows(first, target, size, alone, counts, chunk, begins, rows)
    long, small = lengths[:3].tolist(), lengths[3:].tolist()
    return table, sum(long) + sum(-(-count // config.group_rows) for count in small)


def _chunk_bytes(total_bytes: int, num_programs: int, config: Config) -> int:
    """How much of a large block a program takes at a time, a multiple of the tile."""
    even = min(total_bytes // (num_programs * CHUNKS_PER_PROGRAM), MAX_CHUNK_BYTES)
    return max(1, -(-even // config.tile_bytes)) * config.tile_bytes
