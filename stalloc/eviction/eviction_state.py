"""The state of a replay: tables of storages, tensors and operations, and counts, as compiled code takes them.

Invariant: `allocated` is the sum of the sizes of resident storages; a storage is in the pool of evictable ones, a list
linked by `before` and `behind`, if it is resident, unlocked and no constant. `placed` has the storages with addresses,
lowest first.
"""

from typing import Any, NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.eviction.instructions import Instructions

_COUNTS = (
    "budget", "limit", "policy", "around", "has_places", "by_window", "constants_stay",  # what is asked for
    "allocated", "peak", "clock", "again", "ending",
    "evictions", "evicted_bytes", "extra_evictions", "recomputed", "recomputed_bytes",
    "first", "last",  # of the pool
    "current",  # the operation that was called last
    "stamp",  # of the last walk
    "num_classes", "num_placed", "random",
)  # fmt: skip
_STORAGE = (
    ("size", np.int64), ("is_constant", bool),
    ("cost", np.int64),  # ticks of all operations called so far that put something there
    ("resident", bool), ("locks", np.int64),
    ("names", np.int64),  # how many the program has for its tensors
    ("used", np.int64),  # when it was read or made last
    ("version", np.int64),  # grows by every eviction
    ("in_pool", bool), ("before", np.int64), ("behind", np.int64),
    ("fresh", bool),  # made by the call that runs
    ("seen", np.int64),  # stamp of the walk that came by last
    ("class_of", np.int64),  # of a storage that is not there; -1: none
    ("address", np.int64), ("window_cost", np.float64),
)  # fmt: skip
_TENSOR = (
    ("storage", np.int64), ("op", np.int64), ("is_view", bool),
    ("made_in", np.int64),  # the version of its storage that it was made in
)  # fmt: skip
_OPERATION = (
    ("ticks", np.int64), ("work_bytes", np.int64), ("is_costly", bool),
    ("arg_begin", np.int64), ("out_begin", np.int64),
    # calls that wait for their arguments, by depth
    ("frame_op", np.int64), ("frame_row", np.int64), ("frame_wanted", np.int64),
)  # fmt: skip
_ARGUMENT = (("tensor", np.int64), ("is_locked", bool))
_CLASS = (("parent", np.int64), ("cost", np.int64), ("seen", np.int64))
_ROW = (("stack", np.int64), ("placed", np.int64), ("window", np.int64))
_MOST_CLASSES = 1 << 20  #: evictions whose classes are told apart: a run has twice its time for them


class Tables(NamedTuple):
    """What changes, and what the program is."""

    storages: Column
    tensors: Column
    operations: Column  #: and one row behind them
    arguments: Column
    outs: Column  #: tensors
    source_begin: Column
    sources: Column  #: what each storage is made from
    source_op: Column  #: the first operation by which
    user_begin: Column
    users: Column  #: what is made from each
    user_op: Column
    classes: Column
    rows: Column  #: lists of storages: of a walk, of those with addresses, of a window
    part_begin: Column  #: storages and holes in the order of addresses, for Coop's window
    part_end: Column
    part_cost: Column
    part_of: Column  #: the storage; -1: a hole


def make_tables(program: Instructions, *, classes: bool, seed: int) -> tuple[Tables, Any]:
    """The state before the first step, and the counts, a table of one record."""
    num, num_ops = len(program.size), len(program.op_ticks)
    counts = np.zeros(1, [(name, np.int64) for name in _COUNTS])
    counts["first"] = counts["last"] = counts["current"] = -1
    counts["random"] = 1 + seed % 2147483646
    storages = _filled(_STORAGE, num, size=program.size, is_constant=program.is_constant, class_of=-1)
    tensors = _filled(
        _TENSOR,
        len(program.tensor_storage),
        storage=program.tensor_storage,
        op=program.tensor_op,
        is_view=program.is_view,
        made_in=-1,
    )
    operations = _filled(_OPERATION, num_ops + 1, arg_begin=program.arg_begin, out_begin=program.out_begin)
    operations["ticks"][:num_ops], operations["work_bytes"][:num_ops] = program.op_ticks, program.op_work_bytes
    source, user, by = _edges(program)
    up, down = np.argsort(user, kind="stable"), np.argsort(source, kind="stable")
    bounds = np.arange(num + 1)
    return Tables(
        storages,
        tensors,
        operations,
        _filled(_ARGUMENT, len(program.args), tensor=program.args),
        program.outs,
        np.searchsorted(user[up], bounds),
        source[up],
        by[up],
        np.searchsorted(source[down], bounds),
        user[down],
        by[down],
        _filled(_CLASS, _MOST_CLASSES if classes else 1),
        _filled(_ROW, num + 1),
        np.zeros(2 * num + 1, np.int64),
        np.zeros(2 * num + 1, np.int64),
        np.zeros(2 * num + 1),
        np.zeros(2 * num + 1, np.int64),
    ), counts


def _filled(fields: tuple[tuple[str, Any], ...], num: int, **columns: Any) -> Column:
    """A table of so many rows, zero but for the columns that are given."""
    table = np.zeros(num, list(fields))
    for name, column in columns.items():
        table[name] = column
    return table


def _edges(program: Instructions) -> tuple[Column, Column, Column]:
    """Pairs of storages, of which the second is made from the first, and the first operation by which."""
    first: dict[tuple[int, int], int] = {}
    storage_of = program.tensor_storage.tolist()
    args, outs = program.args.tolist(), program.outs.tolist()
    arg_begin, out_begin = program.arg_begin.tolist(), program.out_begin.tolist()
    for op in range(len(program.op_ticks)):
        read = {storage_of[one] for one in args[arg_begin[op] : arg_begin[op + 1]]}
        for tensor in outs[out_begin[op] : out_begin[op + 1]]:
            for one in read - {storage_of[tensor]}:
                first.setdefault((one, storage_of[tensor]), op)
    pairs = np.array([(*pair, op) for pair, op in first.items()], np.int64).reshape(-1, 3)
    return pairs[:, 0].copy(), pairs[:, 1].copy(), pairs[:, 2].copy()
