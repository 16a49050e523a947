"""From a table of blocks to the table that a launch reads: which program does what.

Contract: the rows cover every byte of every block exactly once. Bytes that lie off the 16-byte grid are cut off into
rows of their own, so that the rest goes by 128-bit words; large blocks are cut into chunks, so that one of them keeps
all programs busy; small ones are grouped, so that a program does several at once.

The table is one column of 64-bit words: a header, the pattern in its 16 rotations, the rows. Rows lie in sections, one
for each way to do them, the largest first; `unit` counts what a program takes at a time: a row of a long section, or a
group of rows of a small one.
"""

import numpy as np

from .block_columns import PATTERN_BYTES, Column
from .configs import Config
from .rows import count_rows, write_rows

HEADER_WORDS = 8  # rows in each section: long by 16 bytes, long by 4, long by 1, small by 16, small by 1
PATTERN_WORDS = 32  # 16 rotations of 16 bytes
ROWS_AT = HEADER_WORDS + PATTERN_WORDS
ROW_WORDS = 4  # source (for a check: where its count goes), target, bytes, rotation of the pattern

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
    alone = source is None or fixed_source
    chunk = _chunk_bytes(int(size.sum()), num_programs, config)
    first, target, size = (np.ascontiguousarray(column) for column in (first, target, size))
    lengths = np.zeros(5, np.int64)
    count_rows(first, target, size, alone, chunk, lengths)
    table = np.zeros(ROWS_AT + int(lengths.sum()) * ROW_WORDS, np.int64)
    table[:5] = lengths
    table[HEADER_WORDS:ROWS_AT] = _rotations(pattern)
    write_rows(
        first, target, size, alone, fixed_source, chunk, np.cumsum(lengths) - lengths, table[ROWS_AT:].reshape(-1, 4)
    )
    counts = lengths.tolist()
    units = sum(counts[:3]) + sum(-(-count // config.group_rows) for count in counts[3:])
    return table, units


def _chunk_bytes(total_bytes: int, num_programs: int, config: Config) -> int:
    """How much of a large block a program takes at a time, a multiple of the tile."""
    even = min(total_bytes // (num_programs * CHUNKS_PER_PROGRAM), MAX_CHUNK_BYTES)
    return max(1, -(-even // config.tile_bytes)) * config.tile_bytes


def _rotations(pattern: bytes) -> np.ndarray:
    """The pattern begun at each of its 16 bytes, as 32 words."""
    twice = np.frombuffer(pattern + pattern, np.uint8)
    return np.concatenate([twice[i : i + PATTERN_BYTES] for i in range(PATTERN_BYTES)]).view(np.int64)
