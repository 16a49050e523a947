"""From a table of blocks to the table that a launch reads: which program does what.

Contract: the rows cover every byte of every block exactly once. Bytes that lie off the 16-byte grid are cut off into
rows of their own, so that the rest goes by 128-bit words; large blocks are cut into chunks, so that one of them keeps
all programs busy; small ones are grouped, so that a program does several at once.

The table is one column of 64-bit words: a header, the pattern in its 16 rotations, the rows. Rows lie in sections, one
for each way to do them, the largest first; `unit` counts what a program takes at a time: a row of a long section, or a
group of rows of a small one.
"""

import numpy as np

from .blocks import PATTERN_BYTES, Column
from .configs import Config

HEADER_WORDS = 8  # rows in each section: long by 16 bytes, long by 4, long by 1, small by 16, small by 1
PATTERN_WORDS = 32  # 16 rotations of 16 bytes
ROWS_AT = HEADER_WORDS + PATTERN_WORDS
ROW_WORDS = 4  # source (for a check: where its count goes), target, bytes, rotation of the pattern

SMALL_VECTOR_BYTES = 512  # a row of the small sections has at most so many bytes: on the 16-byte grid,
SMALL_BYTES = 64  # or anywhere
MAX_CHUNK_BYTES = 4 << 20
CHUNKS_PER_PROGRAM = 8  # about how many units of a large table each program gets, so that none ends much later


def work_table(
    source: Column | None, target: Column, size: Column, pattern: bytes, *, config: Config, num_programs: int
) -> tuple[np.ndarray, int]:
    """The table of one launch, as int64 words, and its number of units.

    (n,) addresses and bytes, none of them empty. `source` None: only targets are touched, or, for a check, the words
    to count into stand for sources and only the targets' alignment matters.
    """
    return _table(source, target, size, pattern, config, num_programs, fixed_source=False)


def check_table(
    counter: Column, target: Column, size: Column, pattern: bytes, *, config: Config, num_programs: int
) -> tuple[np.ndarray, int]:
    """The table of a check: `counter` (n,) is the address of the 64-bit word that block i's differences add up in."""
    return _table(counter, target, size, pattern, config, num_programs, fixed_source=True)


def _table(
    source: Column | None,
    target: Column,
    size: Column,
    pattern: bytes,
    config: Config,
    num_programs: int,
    fixed_source: bool,
) -> tuple[np.ndarray, int]:
    first = target if source is None else source
    apart = np.zeros_like(target) if source is None or fixed_source else first - target
    grain = np.where(apart & 15 == 0, 16, np.where(apart & 3 == 0, 4, 1))
    small = (size <= SMALL_BYTES) & ((target | size) & 15 != 0)
    grain[small | (grain == 4) & (size <= SMALL_BYTES)] = 1
    head = np.where(grain > 1, -target & (grain - 1), 0)
    body = (size - head) & -grain
    tail = size - head - body
    total_bytes = int(size.sum())
    chunk = _chunk_bytes(total_bytes, num_programs, config)

    sections = []
    for width in (16, 4, 1):
        short = SMALL_VECTOR_BYTES if width == 16 else SMALL_BYTES if width == 1 else 0
        long = np.flatnonzero((grain == width) & (body > short))
        sections.append(_chunks(long, head[long], body[long], chunk))
    vectors = np.flatnonzero((grain == 16) & (body > 0) & (body <= SMALL_VECTOR_BYTES))
    sections.append((vectors, head[vectors], body[vectors]))
    heads, tails = np.flatnonzero(head), np.flatnonzero(tail)
    bytewise = np.flatnonzero((grain == 1) & (body <= SMALL_BYTES))
    sections.append(
        (
            np.concatenate([heads, tails, bytewise]),
            np.concatenate([np.zeros_like(heads), (head + body)[tails], np.zeros_like(bytewise)]),
            np.concatenate([head[heads], tail[tails], body[bytewise]]),
        )
    )
    block, at, count = (np.concatenate([section[i] for section in sections]) for i in range(3))
    table = np.zeros(ROWS_AT + len(block) * ROW_WORDS, np.int64)
    lengths = [len(section[0]) for section in sections]
    table[: len(lengths)] = lengths
    table[HEADER_WORDS:ROWS_AT] = _rotations(pattern)
    rows = table[ROWS_AT:].reshape(-1, ROW_WORDS)
    rows[:, 0] = first[block] if fixed_source else first[block] + at
    rows[:, 1] = target[block] + at
    rows[:, 2] = count
    rows[:, 3] = at % PATTERN_BYTES
    units = sum(lengths[:3]) + sum(-(-length // config.group_rows) for length in lengths[3:])
    return table, units


def _chunk_bytes(total_bytes: int, num_programs: int, config: Config) -> int:
    """How much of a large block a program takes at a time, a multiple of the tile."""
    even = min(total_bytes // (num_programs * CHUNKS_PER_PROGRAM), MAX_CHUNK_BYTES)
    return max(1, -(-even // config.tile_bytes)) * config.tile_bytes


def _chunks(block: Column, head: Column, body: Column, chunk: int) -> tuple[Column, Column, Column]:
    """Blocks cut into chunks: block, offset in it and bytes of each, the full chunks before what is left over."""
    pieces = -(-body // chunk)
    owner = np.repeat(np.arange(len(block)), pieces)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    at = nth * chunk
    count = np.minimum(body[owner] - at, chunk)
    order = np.argsort(-count, kind="stable")
    return block[owner][order], (head[owner] + at)[order], count[order]


def _rotations(pattern: bytes) -> np.ndarray:
    """The pattern begun at each of its 16 bytes, as 32 words."""
    twice = np.frombuffer(pattern + pattern, np.uint8)
    return np.concatenate([twice[i : i + PATTERN_BYTES] for i in range(PATTERN_BYTES)]).view(np.int64)
