"""Online eviction replayed: what a program takes under a budget if a policy evicts whenever something does not fit.

Source: Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, algorithm and appendix on the simulator.
Contract: at no moment is more allocated than the budget. A storage is evictable while it is allocated, nobody has it
locked, and it can be made again. A call locks those of what it reads that are there; the others, which were evicted,
are made again, one after the other, and so on down, and locked then. A call makes all its results again, for a moment
also those that are there, so that it needs room for all. The clock counts the ticks of calls, first ones and repeated
ones alike; a storage was used when a call that reads it was asked for, before anything was made again for that, and
when the call that first makes it ends. What nobody holds any more is freed; if it has to be made again later, it stays
until it is chosen. Of equal candidates the one that became evictable last goes, but the first that costs nothing. What
the program still holds at the end has to be there, and is made and kept in the order of its names. A run that repeats
calls for as long as the program takes is given up.

Invariant: `allocated` is the sum of the sizes of resident storages; a storage is in the pool of evictable ones, a list
linked by `before` and `behind`, if it is resident, unlocked and no constant. `placed` has the storages with addresses,
lowest first; no two overlap, and all lie in [0, budget). Best fit takes the smallest hole, at its lower end. What
costly operations make takes its upper end under Coop (cheap tensor partitioning), so that cheap storages, which are
evicted together, are neighbours.
"""

import enum
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import inner, njit
from stalloc.eviction.instructions import Instructions, Step
from stalloc.eviction.scores import (
    POLICIES,
    Around,
    Candidate,
    cheapest_window,
    dtr,
    is_costly,
    largest_first,
    least_recently_used,
    local_cost,
    memory_saved_per_second,
    random_choice,
    tensor_evicting,
    window_cost,
)

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
_PART = (("begin", np.int64), ("end", np.int64), ("cost", np.float64), ("storage", np.int64))  # -1: a hole
_MOST_CLASSES = 1 << 20  #: evictions whose classes are told apart: a run has twice its time for them


class _Edges(NamedTuple):
    """Storages beside each, in the order of theirs, and the first operation by which."""

    begin: Column
    other: Column
    op: Column


class _Tables(NamedTuple):
    storages: Column
    tensors: Column
    operations: Column  #: and one row behind them
    arguments: Column
    outs: Column  #: tensors
    sources: _Edges  #: what each storage is made from
    users: _Edges  #: what is made from each
    classes: Column
    rows: Column  #: lists of storages: of a walk, of those with addresses, of a window
    parts: Column  #: storages and holes in the order of addresses, for Coop's window


def _make_tables(program: Instructions, *, classes: bool, seed: int) -> tuple[_Tables, Any]:
    num, num_ops, of = len(program.size), len(program.op_ticks), program.tensor_storage
    counts = np.zeros(1, [(name, np.int64) for name in _COUNTS])
    counts["first"] = counts["last"] = counts["current"] = -1
    counts["random"] = 1 + seed % 2147483646
    operations = _filled(_OPERATION, num_ops + 1, arg_begin=program.arg_begin, out_begin=program.out_begin)
    operations["ticks"][:num_ops], operations["work_bytes"][:num_ops] = program.op_ticks, program.op_work_bytes
    return _Tables(
        _filled(_STORAGE, num, size=program.size, is_constant=program.is_constant, class_of=-1),
        _filled(_TENSOR, len(of), storage=of, op=program.tensor_op, is_view=program.is_view, made_in=-1),
        operations,
        _filled(_ARGUMENT, len(program.args), tensor=program.args),
        program.outs,
        *_edges(program),
        _filled(_CLASS, _MOST_CLASSES if classes else 1),
        _filled(_ROW, num + 1),
        _filled(_PART, 2 * num + 1),
    ), counts


def _filled(fields: tuple[tuple[str, Any], ...], num: int, **columns: Any) -> Column:
    table = np.zeros(num, list(fields))
    for name, column in columns.items():
        table[name] = column
    return table


def _edges(program: Instructions) -> tuple[_Edges, _Edges]:
    """What each storage is made from, and what is made from it."""
    first: dict[tuple[int, int], int] = {}  # of pairs, of which the second is made from the first
    storage_of = program.tensor_storage.tolist()
    args, outs = program.args.tolist(), program.outs.tolist()
    arg_bounds, out_bounds = (itertools.pairwise(one.tolist()) for one in (program.arg_begin, program.out_begin))
    for op, (arg_bound, out_bound) in enumerate(zip(arg_bounds, out_bounds, strict=True)):
        read = {storage_of[one] for one in args[slice(*arg_bound)]}
        for tensor in outs[slice(*out_bound)]:
            for one in read - {storage_of[tensor]}:
                first.setdefault((one, storage_of[tensor]), op)
    source, user, by = np.array([(*pair, op) for pair, op in first.items()], np.int64).reshape(-1, 3).T
    edges = []
    for own, other in ((user, source), (source, user)):
        order = np.argsort(own, kind="stable")
        edges.append(_Edges(np.searchsorted(own[order], np.arange(len(program.size) + 1)), other[order], by[order]))
    return edges[0], edges[1]


_cheapest_window = inner()(cheapest_window)


def _costly_operations(program: Instructions) -> Column:
    """Which operations, (k,) bool, take longer for each byte that they make than those of the program on average."""
    made = np.where(program.is_view[program.outs], 0, program.size[program.tensor_storage[program.outs]])
    made_bytes = np.diff(np.append(0, np.cumsum(made))[program.out_begin])
    return np.asarray(is_costly(program.op_ticks, made_bytes, program.op_ticks.sum() / max(made_bytes.sum(), 1)))


@inner()
def _hole_before(t, c, row):
    """The free range below one of the placed storages, or at the end below the top: begin and end."""
    begin = 0
    if row > 0:
        storage = t.rows[row - 1].placed
        begin = t.storages[storage].address + t.storages[storage].size
    end = c.budget
    if row < c.num_placed:
        end = t.storages[t.rows[row].placed].address
    return begin, end


@inner()
def _has_hole(t, c, size):
    for row in range(c.num_placed + 1):
        begin, end = _hole_before(t, c, row)
        if end - begin >= size:
            return True
    return False


@inner()
def _put_in_place(t, c, storage, from_top):
    size, best, smallest = t.storages[storage].size, -1, c.budget + 1
    for row in range(c.num_placed + 1):
        begin, end = _hole_before(t, c, row)
        if size <= end - begin < smallest:
            best, smallest = row, end - begin
    begin, end = _hole_before(t, c, best)
    t.storages[storage].address = end - size if from_top else begin
    for row in range(c.num_placed, best, -1):
        t.rows[row].placed = t.rows[row - 1].placed
    t.rows[best].placed = storage
    c.num_placed += 1


@inner()
def _row_of(t, c, storage):
    low, high = 0, c.num_placed
    while low < high:
        middle = (low + high) // 2
        if t.storages[t.rows[middle].placed].address < t.storages[storage].address:
            low = middle + 1
        else:
            high = middle
    return low


@inner()
def _forget_place(t, c, storage):
    if t.storages[storage].size == 0:
        return
    c.num_placed -= 1
    for row in range(_row_of(t, c, storage), c.num_placed):
        t.rows[row].placed = t.rows[row + 1].placed


@inner()
def _free_beside(t, c, storage):
    row = _row_of(t, c, storage)
    begin, end = _hole_before(t, c, row)
    begin_behind, end_behind = _hole_before(t, c, row + 1)
    return end - begin + end_behind - begin_behind


@inner()
def _choose_window(t, c, size):
    """Write the storages of the cheapest window that makes room into `window`; how many there are comes back."""
    num, part = c.num_placed, 0
    for row in range(num + 1):
        begin, end = _hole_before(t, c, row)
        if end > begin:
            hole = t.parts[part]
            hole.begin, hole.end, hole.cost, hole.storage = begin, end, 0.0, -1
            part += 1
        if row < num:
            taken, storage = t.parts[part], t.storages[t.rows[row].placed]
            taken.begin, taken.end = storage.address, storage.address + storage.size
            taken.cost, taken.storage = storage.window_cost, t.rows[row].placed
            part += 1
    parts = t.parts[:part]
    first, last = _cheapest_window(parts["begin"], parts["end"], parts["cost"], size)
    found = 0
    for row in range(first, last):
        if t.parts[row].storage >= 0:
            t.rows[found].window = t.parts[row].storage
            found += 1
    return found


LONGEST = 2.0  #: times of a run without a budget, from which on one is given up, as the paper's evaluation does


class Ending(enum.IntEnum):
    """How a replay ended."""

    COMPLETE = 0
    TOO_LONG = 1  #: it took LONGEST times as long as without a budget
    OUT_OF_MEMORY = 2  #: nothing evictable was left, and the bytes were not there
    FRAGMENTED = 3  #: nothing evictable was left, and the bytes were there, but not next to each other


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A policy under a budget."""

    policy: str
    budget_bytes: int
    ending: Ending
    overhead: float | None  #: time over that without a budget; None unless complete
    peak_bytes: int
    evictions: int  #: chosen by the policy, not counting what nobody held any more
    evicted_bytes: int
    recomputed_calls: int
    recomputed_bytes: int  #: made again
    extra_evictions: int  #: of those, chosen though enough bytes were free, but not next to each other
    added_seconds: float | None  #: by calls that were repeated; None where nothing says how long they take


_NAMES = tuple(POLICIES)
_DTR, _EQ, _LOCAL, _LRU, _SIZE, _MSPS, _RANDOM, _DTE, _COOP = range(len(_NAMES))
_BY_AGE = (_DTR, _EQ, _LOCAL, _DTE)  #: policies by which what was used this very moment has no score
_NOTHING, _NEIGHBOURS, _CLASSES, _SOURCES = (int(one) for one in Around)
_CONSTANT, _CALL, _HOLD, _LET_GO, _KEEP = (int(one) for one in Step)
_COMPLETE, _TOO_LONG, _OUT_OF_MEMORY, _FRAGMENTED = (int(one) for one in Ending)

_dtr, _local, _lru, _size = inner()(dtr), inner()(local_cost), inner()(least_recently_used), inner()(largest_first)
_msps, _random, _dte = inner()(memory_saved_per_second), inner()(random_choice), inner()(tensor_evicting)
_coop = inner()(window_cost)


def peak_of(program: Instructions) -> int:
    """The most that a program has allocated without a budget, in bytes."""
    return replay(program, "lru", None).peak_bytes


def replay(
    program: Instructions, policy: str, budget_bytes: int | None, *, places: bool = False, seed: int = 0
) -> Replayed:
    """Run a program under a budget; None: without one.

    With `places` storages have addresses in a range of that many bytes, best fit, as policies that go by place always
    have: what is free but not in one piece does not help then.
    """
    chosen = POLICIES[policy]
    has_places = (places or chosen.by_place) and budget_bytes is not None
    budget = int(budget_bytes) if budget_bytes is not None else 1 << 62
    tables, counts = _make_tables(program, classes=chosen.around == Around.CLASSES, seed=seed)
    base = int(program.op_ticks.sum())
    counts["budget"], counts["limit"] = budget, int((LONGEST - 1) * base)
    counts["constants_stay"] = program.constants_stay and budget_bytes is not None
    counts["policy"], counts["around"] = _NAMES.index(policy), int(chosen.around)
    counts["has_places"], counts["by_window"] = has_places, has_places and chosen.by_window
    if counts["by_window"][0]:
        tables.operations["is_costly"][:-1] = _costly_operations(program)
    _run(tables, counts[0], program.step_kind, program.step_of)
    told = {name: int(counts[0][name]) for name in _COUNTS}
    ending, seconds = Ending(told["ending"]), program.ticks_per_second
    return Replayed(
        policy=policy,
        budget_bytes=budget,
        ending=ending,
        overhead=1 + told["again"] / base if ending == Ending.COMPLETE and base else None,
        peak_bytes=told["peak"],
        recomputed_calls=told["recomputed"],
        **{name: told[name] for name in ("evictions", "evicted_bytes", "recomputed_bytes", "extra_evictions")},
        added_seconds=None if seconds is None else told["again"] / seconds,
    )


@inner()
def _score(policy, one):
    if policy <= _EQ:
        return _dtr(one)
    if policy == _LOCAL:
        return _local(one)
    if policy == _LRU:
        return _lru(one)
    if policy == _SIZE:
        return _size(one)
    if policy == _MSPS:
        return _msps(one)
    if policy == _DTE:
        return _dte(one)
    if policy == _COOP:
        return _coop(one)
    return _random(one)


@inner()
def _walk(t, c, storage, edges):
    """The cost of evicted storages that lead on from one through evicted ones."""
    c.stamp += 1
    t.rows[0].stack = storage
    t.storages[storage].seen = c.stamp
    stack, total = 1, 0
    while stack > 0:
        stack -= 1
        one = t.rows[stack].stack
        for row in range(edges.begin[one], edges.begin[one + 1]):
            other = t.storages[edges.other[row]]
            if edges.op[row] <= c.current and not other.resident and not other.is_constant and other.seen != c.stamp:
                total += other.cost
                other.seen = c.stamp
                t.rows[stack].stack = edges.other[row]
                stack += 1
    return total


@inner()
def _root(t, node):
    while t.classes[node].parent != node:
        t.classes[node].parent = t.classes[t.classes[node].parent].parent
        node = t.classes[node].parent
    return node


@inner()
def _classes_beside(t, c, storage, edges):
    """The cost of the classes of direct neighbours on one side, each counted once under the current stamp."""
    total = 0
    for row in range(edges.begin[storage], edges.begin[storage + 1]):
        other = edges.other[row]
        if edges.op[row] <= c.current and t.storages[other].class_of >= 0:
            root = _root(t, t.storages[other].class_of)
            if t.classes[root].seen != c.stamp:
                t.classes[root].seen = c.stamp
                total += t.classes[root].cost
    return total


@inner()
def _around(t, c, storage):
    if c.around == _NOTHING:
        return 0
    if c.around == _CLASSES:
        c.stamp += 1
        total = _classes_beside(t, c, storage, t.sources)
        return total + _classes_beside(t, c, storage, t.users)
    total = _walk(t, c, storage, t.sources)
    if c.around == _NEIGHBOURS:
        total += _walk(t, c, storage, t.users)
    return total


@inner()
def _draw(c):
    """The next number of a generator of Park and Miller: the same on every machine."""
    c.random = (c.random * 48271) % 2147483647
    return c.random / 2147483647.0


@inner()
def _score_of(t, c, storage):
    one, age = t.storages[storage], c.clock - t.storages[storage].used
    if (one.size == 0 and c.policy != _LRU) or (age == 0 and c.policy in _BY_AGE):
        return np.inf
    beside = float(_free_beside(t, c, storage)) if c.policy == _DTE and c.has_places else 0.0
    draw = _draw(c) if c.policy == _RANDOM else 0.0
    age = age + 1 if c.policy == _LRU else max(age, 1)
    around = float(_around(t, c, storage))
    return _score(c.policy, Candidate(float(one.cost), around, float(one.size), float(age), beside, draw))


@inner()
def _join_pool(t, c, storage):
    one = t.storages[storage]
    one.before, one.behind, one.in_pool = c.last, -1, True
    if c.last >= 0:
        t.storages[c.last].behind = storage
    else:
        c.first = storage
    c.last = storage


@inner()
def _leave_pool(t, c, storage):
    one = t.storages[storage]
    if not one.in_pool:
        return
    one.in_pool = False
    if one.before >= 0:
        t.storages[one.before].behind = one.behind
    else:
        c.first = one.behind
    if one.behind >= 0:
        t.storages[one.behind].before = one.before
    else:
        c.last = one.before


@inner()
def _lock(t, c, storage):
    t.storages[storage].locks += 1
    _leave_pool(t, c, storage)


@inner()
def _unlock(t, c, storage):
    one = t.storages[storage]
    one.locks -= 1
    if one.locks == 0 and one.resident and not one.is_constant:
        _join_pool(t, c, storage)


@inner()
def _begin_class(t, c, storage, cost):
    """A storage that is not there is a class of its own."""
    node = c.num_classes
    if c.around != _CLASSES or node == len(t.classes):
        return False
    c.num_classes += 1
    t.classes[node].parent, t.classes[node].cost, t.storages[storage].class_of = node, cost, node
    return True


@inner()
def _join_classes(t, c, storage, edges):
    for row in range(edges.begin[storage], edges.begin[storage + 1]):
        other = edges.other[row]
        if edges.op[row] <= c.current and t.storages[other].class_of >= 0:
            one, two = _root(t, t.storages[storage].class_of), _root(t, t.storages[other].class_of)
            if one != two:
                t.classes[one].parent = two
                t.classes[two].cost += t.classes[one].cost


@inner()
def _free(t, c, storage):
    """An allocated storage is evicted, by choice or since nobody holds it."""
    _leave_pool(t, c, storage)
    t.storages[storage].resident = False
    c.allocated -= t.storages[storage].size
    t.storages[storage].version += 1  # its tensors are gone
    if c.has_places:
        _forget_place(t, c, storage)
    if _begin_class(t, c, storage, t.storages[storage].cost):
        _join_classes(t, c, storage, t.sources)
        _join_classes(t, c, storage, t.users)


@inner()
def _evict(t, c, storage, is_extra):
    c.evictions += 1
    c.evicted_bytes += t.storages[storage].size
    c.extra_evictions += is_extra
    _free(t, c, storage)


@inner()
def _evict_one(t, c, is_extra):
    """Evict the storage of the lowest score: the last of equals, or the first that costs nothing; False for none."""
    best, lowest = -1, 0.0
    one = c.first
    while one >= 0:
        score = _score_of(t, c, one)
        if best < 0 or score <= lowest:
            best, lowest = one, score
        if score == 0:
            break
        one = t.storages[one].behind
    if best >= 0:
        _evict(t, c, best, is_extra)
    return best >= 0


@inner()
def _evict_window(t, c, size):
    """Evict neighbours in memory, which leave one hole of the size. False if there are none."""
    for row in range(c.num_placed):
        storage = t.rows[row].placed
        t.storages[storage].window_cost = _score_of(t, c, storage) if t.storages[storage].in_pool else np.inf
    num = _choose_window(t, c, size)
    for row in range(num):
        _evict(t, c, t.rows[row].window, c.budget - c.allocated >= size and row == 0)
    return num > 0


@inner()
def _make_hole(t, c, size):
    """Evict until there is a hole for a storage; False after a failure, which is noted."""
    while not _has_hole(t, c, size):
        is_there = c.budget - c.allocated >= size
        if not (_evict_window(t, c, size) if c.by_window else _evict_one(t, c, is_there)):
            c.ending = _FRAGMENTED if is_there else _OUT_OF_MEMORY
            return False
    return True


@inner()
def _make_room(t, c, needed):
    """Evict until so many bytes are free; False after a failure, which is noted."""
    while c.allocated + needed > c.budget:
        if not _evict_one(t, c, False):
            c.ending = _OUT_OF_MEMORY
            return False
    return True


@inner()
def _allocate(t, c, storage, from_top):
    """A storage is there from now on; False after a failure. Without places the room was made before."""
    one = t.storages[storage]
    if c.has_places and one.size > 0:
        if not _make_hole(t, c, one.size):
            return False
        _put_in_place(t, c, storage, from_top)
    one.resident = True
    c.allocated += one.size
    c.peak = max(c.peak, c.allocated)
    if c.around == _CLASSES and one.class_of >= 0:
        t.classes[_root(t, one.class_of)].cost -= one.cost
        one.class_of = -1
    return True


@inner()
def _is_made(t, tensor):
    storage = t.storages[t.tensors[tensor].storage]
    return storage.is_constant or (storage.resident and t.tensors[tensor].made_in == storage.version)


@inner()
def _make_outputs(t, c, op, wanted, is_first):
    """A call whose arguments are there and locked, for one of its results; False after a failure."""
    low, high = t.operations[op].out_begin, t.operations[op + 1].out_begin
    passing = needed = t.operations[op].work_bytes
    by_bytes = not c.has_places or passing > 0
    for row in range(low, high):
        if not t.tensors[t.outs[row]].is_view:
            needed += t.storages[t.tensors[t.outs[row]].storage].size
            by_bytes = by_bytes or t.storages[t.tensors[t.outs[row]].storage].resident
    if by_bytes and not _make_room(t, c, needed):
        return False
    for row in range(low, high):
        tensor = t.outs[row]
        storage = t.tensors[tensor].storage
        if not t.tensors[tensor].is_view and t.storages[storage].resident:
            passing += t.storages[storage].size  # made once more, and freed again at once
        elif not t.tensors[tensor].is_view:
            t.storages[storage].locks += 1
            if not _allocate(t, c, storage, t.operations[op].is_costly):
                return False
            t.storages[storage].fresh = True
            if not is_first:
                c.recomputed_bytes += t.storages[storage].size
        t.tensors[tensor].made_in = t.storages[storage].version
    c.peak = max(c.peak, c.allocated + passing)
    c.clock += t.operations[op].ticks
    if is_first:
        for row in range(low, high):
            t.storages[t.tensors[t.outs[row]].storage].used = c.clock
    else:
        c.recomputed += 1
        c.again += t.operations[op].ticks
        if c.again > c.limit:
            c.ending = _TOO_LONG
            return False
    for row in range(low, high):
        if t.outs[row] != wanted:
            _unlock_fresh(t, c, t.tensors[t.outs[row]].storage)
    if wanted >= 0:
        _unlock_fresh(t, c, t.tensors[wanted].storage)
    for row in range(t.operations[op].arg_begin, t.operations[op + 1].arg_begin):
        _unlock(t, c, t.tensors[t.arguments[row].tensor].storage)
        t.arguments[row].is_locked = False
    return True


@inner()
def _unlock_fresh(t, c, storage):
    if t.storages[storage].fresh:
        t.storages[storage].fresh = False
        _unlock(t, c, storage)


@inner()
def _begin_frame(t, c, depth, op, wanted):
    """A call waits for its arguments: those that are there are locked before any is made again."""
    t.operations[depth].frame_op, t.operations[depth].frame_row = op, t.operations[op].arg_begin
    t.operations[depth].frame_wanted = wanted
    for row in range(t.operations[op].arg_begin, t.operations[op + 1].arg_begin):
        tensor = t.arguments[row].tensor
        t.storages[t.tensors[tensor].storage].used = c.clock
        if _is_made(t, tensor):
            _lock(t, c, t.tensors[tensor].storage)
            t.arguments[row].is_locked = True


@inner()
def _perform(t, c, op, wanted, is_first):
    """A call for one of its results, after all that has to be made again for it; False after a failure."""
    depth = 1
    _begin_frame(t, c, 0, op, wanted)
    while depth > 0:
        one, row = t.operations[depth - 1].frame_op, t.operations[depth - 1].frame_row
        if row == t.operations[one + 1].arg_begin:
            depth -= 1
            if not _make_outputs(t, c, one, t.operations[depth].frame_wanted, is_first and depth == 0):
                return False
            continue
        tensor = t.arguments[row].tensor
        if not _is_made(t, tensor):
            _begin_frame(t, c, depth, t.tensors[tensor].op, tensor)
            depth += 1
            continue
        if not t.arguments[row].is_locked:
            _lock(t, c, t.tensors[tensor].storage)
            t.arguments[row].is_locked = True
        t.operations[depth - 1].frame_row = row + 1
    return True


@inner()
def _begin_call(t, c, op):
    """What the operation adds to the cost of the storages that it puts something into, once for each."""
    c.current = op
    c.stamp += 1
    for row in range(t.operations[op].out_begin, t.operations[op + 1].out_begin):
        storage = t.tensors[t.outs[row]].storage
        if t.storages[storage].seen != c.stamp:
            t.storages[storage].seen = c.stamp
            t.storages[storage].cost += t.operations[op].ticks
            if not t.tensors[t.outs[row]].is_view:
                _begin_class(t, c, storage, 0)


@njit(nogil=True)
def _run(t, c, step_kind, step_of):
    for row in range(len(step_kind)):
        kind, of = step_kind[row], step_of[row]
        if kind == _CALL:
            _begin_call(t, c, of)
            low, high = t.operations[of].out_begin, t.operations[of + 1].out_begin
            if not _perform(t, c, of, t.outs[low] if low < high else -1, True):
                return
        elif kind == _HOLD:
            t.storages[t.tensors[of].storage].names += 1
        elif kind == _LET_GO:
            storage = t.tensors[of].storage
            t.storages[storage].names -= 1
            stays = t.storages[storage].is_constant and c.constants_stay
            if t.storages[storage].names == 0 and t.storages[storage].resident and not stays:
                _free(t, c, storage)
        elif kind == _CONSTANT:
            if not c.has_places and not _make_room(t, c, t.storages[of].size):
                return
            if not _allocate(t, c, of, False):
                return
        elif kind == _KEEP:
            if not _is_made(t, of) and not _perform(t, c, t.tensors[of].op, of, False):
                return
            _lock(t, c, t.tensors[of].storage)
