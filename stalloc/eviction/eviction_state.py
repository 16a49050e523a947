"""The state of a replay: tables of storages, tensors and operations, and counts, as compiled code takes them.

Invariant: `allocated` is the sum of the sizes of resident storages; a storage is in the pool of evictable ones, a list
linked by `before` and `behind`, if it is resident, unlocked and no constant.
"""

from typing import Any, NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.eviction.instructions import Instructions

_COUNTS = (
    "budget", "limit", "policy", "around", "has_places", "by_window",  # what is asked for
    "allocated", "peak", "clock", "ticks", "ending",
    "evictions", "evicted_bytes", "extra_evictions", "recomputed", "recomputed_bytes",
    "first", "last",  # of the pool
    "current",  # the operation that was called last
    "stamp",  # of the last walk
    "num_classes", "num_placed", "random",
)  # fmt: skip
_MOST_CLASSES = 1 << 20  #: evictions whose classes are told apart: a run has twice its time for them


class Tables(NamedTuple):
    """One row a storage, unless said otherwise."""

    size: Column
    is_constant: Column
    cost_of_all: Column  #: ticks of all operations that put something there
    cost: Column  #: of those of them that were called so far
    resident: Column
    locks: Column
    names: Column  #: how many the program has for its tensors
    used: Column  #: when it was read or made last
    version: Column  #: grows by every eviction
    in_pool: Column
    before: Column
    behind: Column
    fresh: Column  #: made by the call that runs
    seen: Column  #: stamp of the walk that came by last
    stack: Column
    tensor_storage: Column  #: of each tensor
    tensor_op: Column
    is_view: Column
    made_in: Column  #: of each tensor: the version of its storage that it was made in
    held: Column  #: of each tensor
    op_ticks: Column  #: of each operation
    op_work_bytes: Column
    arg_begin: Column
    args: Column
    is_locked: Column  #: of each argument of a call that waits or runs
    out_begin: Column
    outs: Column
    frame_op: Column  #: the calls that wait for their arguments, the innermost last
    frame_row: Column
    source_begin: Column  #: what each storage is made from
    sources: Column
    source_op: Column  #: the operation by which
    user_begin: Column  #: what is made from it
    users: Column
    user_op: Column
    class_of: Column  #: of an evicted storage; -1: none
    class_share: Column  #: what it added to the cost of its class
    class_parent: Column
    class_cost: Column
    class_seen: Column
    address: Column
    placed: Column  #: storages with addresses, lowest first
    window: Column
    window_cost: Column
    part_begin: Column  #: of storages and holes in the order of addresses, for Coop's window
    part_end: Column
    part_cost: Column
    part_of: Column  #: the storage; -1: a hole


def make_tables(program: Instructions, *, classes: bool, seed: int) -> tuple[Tables, Any]:
    """The state before the first step, and the counts, a table of one record."""
    num, num_tensors, num_ops = len(program.size), len(program.tensor_storage), len(program.op_ticks)
    counts = np.zeros(1, [(name, np.int64) for name in _COUNTS])
    counts["first"] = counts["last"] = counts["current"] = -1
    counts["random"] = 1 + seed % 2147483646
    of_tensor = program.tensor_op >= 0
    cost = np.zeros(num, np.int64)
    np.add.at(cost, program.tensor_storage[of_tensor], program.op_ticks[program.tensor_op[of_tensor]])
    source, user, by = _edges(program)
    up, down = np.argsort(user, kind="stable"), np.argsort(source, kind="stable")
    rows = np.arange(num + 1)

    def zeros(dtype: Any = np.int64, length: int = num) -> Column:
        return np.zeros(length, dtype)

    num_classes = _MOST_CLASSES if classes else 1
    return Tables(
        program.size, program.is_constant, cost, zeros(), zeros(bool), zeros(), zeros(), zeros(), zeros(), zeros(bool),
        zeros(), zeros(), zeros(bool), zeros(), zeros(length=num + 1),
        program.tensor_storage, program.tensor_op, program.is_view,
        np.full(num_tensors, -1, np.int64), zeros(length=num_tensors),
        program.op_ticks, program.op_work_bytes,
        program.arg_begin, program.args, zeros(bool, len(program.args)), program.out_begin, program.outs,
        zeros(length=num_ops + 1), zeros(length=num_ops + 1),
        np.searchsorted(user[up], rows), source[up], by[up],
        np.searchsorted(source[down], rows), user[down], by[down],
        np.full(num, -1, np.int64), zeros(), zeros(length=num_classes), zeros(length=num_classes),
        zeros(length=num_classes), zeros(), zeros(), zeros(), zeros(np.float64),
        zeros(length=2 * num + 1), zeros(length=2 * num + 1), zeros(np.float64, 2 * num + 1), zeros(length=2 * num + 1),
    ), counts  # fmt: skip


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
    return pairs[:, 0], pairs[:, 1], pairs[:, 2]
