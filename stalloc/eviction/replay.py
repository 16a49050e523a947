"""Online eviction replayed: what a program takes under a budget if a policy evicts whenever something does not fit.

Source: Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, algorithm and appendix on the simulator.
Contract: at no moment is more allocated than the budget. A storage is evictable while it is allocated, nobody has it
locked, and it can be made again. A call locks what it reads, one argument after the other; an argument that was evicted
is made again first, and so on down. A call that is repeated first locks those of its arguments that are there. The
clock counts calls, first ones and repeated ones alike; a storage was used when a call that reads it begins, and when
one that makes it ends. What nobody holds any more is freed if it is not locked; if it has to be made again later, it
stays until it is chosen. Of equal candidates the one that became evictable last goes. What the program still holds at
the end has to be there. A run that takes twice its time is given up.
"""

import enum
from dataclasses import dataclass

import numpy as np

from stalloc.compiled import inner, njit
from stalloc.eviction.eviction_state import make_tables
from stalloc.eviction.instructions import Instructions, Step
from stalloc.eviction.places import choose_window, forget_place, free_beside, has_hole, put_in_place
from stalloc.eviction.scores import (
    POLICIES,
    Around,
    Candidate,
    dtr,
    largest_first,
    least_recently_used,
    local_cost,
    memory_saved_per_second,
    random_choice,
    tensor_evicting,
    window_cost,
)

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
    added_seconds: (
        float | None
    )  #: by calls that were repeated; None where the recording does not say how long they take


_NAMES = tuple(POLICIES)
_, _EQ, _LOCAL, _LRU, _SIZE, _MSPS, _RANDOM, _DTE, _COOP = range(len(_NAMES))
_NOTHING, _NEIGHBOURS, _CLASSES, _SOURCES = (int(one) for one in Around)
_CONSTANT, _CALL, _HOLD, _LET_GO = (int(one) for one in Step)
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
    tables, counts = make_tables(program, classes=chosen.around == Around.CLASSES, seed=seed)
    base = int(program.op_ticks.sum())
    counts["budget"], counts["limit"] = budget, int(LONGEST * base)
    counts["policy"], counts["around"] = _NAMES.index(policy), int(chosen.around)
    counts["has_places"], counts["by_window"] = has_places, has_places and chosen.by_window
    made = np.flatnonzero(~program.is_constant & (program.size > 0))
    total = int(program.size[made].sum())
    density = float(tables.cost_of_all[made].sum()) / total if total else 0.0
    _run(tables, counts[0], program.step_kind, program.step_of, density)
    told = counts[0]
    ending = Ending(int(told["ending"]))
    seconds = program.ticks_per_second
    return Replayed(
        policy=policy,
        budget_bytes=budget,
        ending=ending,
        overhead=int(told["ticks"]) / base if ending == Ending.COMPLETE and base else None,
        peak_bytes=int(told["peak"]),
        evictions=int(told["evictions"]),
        evicted_bytes=int(told["evicted_bytes"]),
        recomputed_calls=int(told["recomputed"]),
        recomputed_bytes=int(told["recomputed_bytes"]),
        extra_evictions=int(told["extra_evictions"]),
        added_seconds=None if seconds is None else (int(told["ticks"]) - base) / seconds,
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
def _walk(t, c, storage, begin, edges, edge_op, since):
    """The cost of evicted storages that lead on from one through evicted ones; not those that were seen `since`."""
    c.stamp += 1
    stack, total = 0, 0
    t.stack[0] = storage
    t.seen[storage] = c.stamp
    stack = 1
    while stack > 0:
        stack -= 1
        one = t.stack[stack]
        for row in range(begin[one], begin[one + 1]):
            other = edges[row]
            if edge_op[row] > c.current or t.resident[other] or t.is_constant[other]:
                continue
            if t.seen[other] == c.stamp:
                continue
            if t.seen[other] < since:
                total += t.cost[other]
            t.seen[other] = c.stamp
            t.stack[stack] = other
            stack += 1
    return total


@inner()
def _root(t, node):
    while t.class_parent[node] != node:
        t.class_parent[node] = t.class_parent[t.class_parent[node]]
        node = t.class_parent[node]
    return node


@inner()
def _classes_beside(t, c, storage, begin, edges, edge_op):
    """The cost of the classes of direct neighbours on one side, each counted once under the current stamp."""
    total = 0
    for row in range(begin[storage], begin[storage + 1]):
        other = edges[row]
        if edge_op[row] <= c.current and t.class_of[other] >= 0:
            root = _root(t, t.class_of[other])
            if t.class_seen[root] != c.stamp:
                t.class_seen[root] = c.stamp
                total += t.class_cost[root]
    return total


@inner()
def _around(t, c, storage):
    if c.around == _NOTHING:
        return 0
    if c.around == _CLASSES:
        c.stamp += 1
        total = _classes_beside(t, c, storage, t.source_begin, t.sources, t.source_op)
        return total + _classes_beside(t, c, storage, t.user_begin, t.users, t.user_op)
    first = c.stamp + 1
    total = _walk(t, c, storage, t.source_begin, t.sources, t.source_op, first)
    if c.around == _NEIGHBOURS:
        total += _walk(t, c, storage, t.user_begin, t.users, t.user_op, first)
    return total


@inner()
def _draw(c):
    """The next number of a generator of Park and Miller: the same on every machine."""
    c.random = (c.random * 48271) % 2147483647
    return c.random / 2147483647.0


@inner()
def _score_of(t, c, storage):
    age = max(c.clock - t.used[storage], 1)
    beside = 0
    if c.policy == _DTE and c.has_places:
        beside = free_beside(t, c, storage)
    draw = 0.0
    if c.policy == _RANDOM:
        draw = _draw(c)
    around = _around(t, c, storage)
    return _score(
        c.policy,
        Candidate(float(t.cost[storage]), float(around), float(t.size[storage]), float(age), float(beside), draw),
    )


@inner()
def _join_pool(t, c, storage):
    t.before[storage] = c.last
    t.behind[storage] = -1
    if c.last >= 0:
        t.behind[c.last] = storage
    else:
        c.first = storage
    c.last = storage
    t.in_pool[storage] = True


@inner()
def _leave_pool(t, c, storage):
    if not t.in_pool[storage]:
        return
    before, behind = t.before[storage], t.behind[storage]
    if before >= 0:
        t.behind[before] = behind
    else:
        c.first = behind
    if behind >= 0:
        t.before[behind] = before
    else:
        c.last = before
    t.in_pool[storage] = False


@inner()
def _lock(t, c, storage):
    t.locks[storage] += 1
    _leave_pool(t, c, storage)


@inner()
def _unlock(t, c, storage):
    t.locks[storage] -= 1
    if t.locks[storage] == 0 and t.resident[storage] and not t.is_constant[storage]:
        _join_pool(t, c, storage)


@inner()
def _join_classes(t, c, storage, begin, edges, edge_op):
    for row in range(begin[storage], begin[storage + 1]):
        other = edges[row]
        if edge_op[row] <= c.current and t.class_of[other] >= 0:
            one, two = _root(t, t.class_of[storage]), _root(t, t.class_of[other])
            if one != two:
                t.class_parent[one] = two
                t.class_cost[two] += t.class_cost[one]


@inner()
def _free(t, c, storage):
    """An allocated storage is evicted, by choice or since nobody holds it."""
    _leave_pool(t, c, storage)
    t.resident[storage] = False
    c.allocated -= t.size[storage]
    t.version[storage] += 1  # its tensors are gone
    if c.has_places:
        forget_place(t, c, storage)
    if c.around == _CLASSES and c.num_classes < len(t.class_parent):
        node = c.num_classes
        c.num_classes += 1
        t.class_parent[node], t.class_cost[node], t.class_of[storage] = node, t.cost[storage], node
        t.class_share[storage] = t.cost[storage]
        _join_classes(t, c, storage, t.source_begin, t.sources, t.source_op)
        _join_classes(t, c, storage, t.user_begin, t.users, t.user_op)


@inner()
def _evict(t, c, storage, is_extra):
    c.evictions += 1
    c.evicted_bytes += t.size[storage]
    c.extra_evictions += is_extra
    _free(t, c, storage)


@inner()
def _choose(t, c):
    """The evictable storage of the lowest score; the last of equals. -1 if there is none."""
    best, lowest = -1, 0.0
    one = c.first
    while one >= 0:
        if t.size[one] > 0:
            score = _score_of(t, c, one)
            if best < 0 or score <= lowest:
                best, lowest = one, score
        one = t.behind[one]
    return best


@inner()
def _evict_window(t, c, size):
    """Evict neighbours in memory, which leave one hole of the size. False if there are none."""
    for row in range(c.num_placed):
        storage = t.placed[row]
        t.window_cost[storage] = _score_of(t, c, storage) if t.in_pool[storage] else np.inf
    num = choose_window(t, c, size)
    for row in range(num):
        _evict(t, c, t.window[row], c.budget - c.allocated >= size and row == 0)
    return num > 0


@inner()
def _make_hole(t, c, size):
    """Evict until there is a hole for a storage; False after a failure, which is noted."""
    while not has_hole(t, c, size):
        is_there = c.budget - c.allocated >= size
        if c.by_window:
            done = _evict_window(t, c, size)
        else:
            chosen = _choose(t, c)
            done = chosen >= 0
            if done:
                _evict(t, c, chosen, is_there)
        if not done:
            c.ending = _FRAGMENTED if is_there else _OUT_OF_MEMORY
            return False
    return True


@inner()
def _make_room(t, c, needed):
    """Evict until so many bytes are free; False after a failure, which is noted."""
    while c.allocated + needed > c.budget:
        chosen = _choose(t, c)
        if chosen < 0:
            c.ending = _OUT_OF_MEMORY
            return False
        _evict(t, c, chosen, False)
    return True


@inner()
def _allocate(t, c, storage, density):
    """A storage is there from now on; False after a failure. Without places the room was made before."""
    if c.has_places and t.size[storage] > 0:
        if not _make_hole(t, c, t.size[storage]):
            return False
        from_top = c.by_window and not t.is_constant[storage] and t.cost[storage] > density * t.size[storage]
        put_in_place(t, c, storage, from_top)
    t.resident[storage] = True
    c.allocated += t.size[storage]
    c.peak = max(c.peak, c.allocated)
    if c.around == _CLASSES and t.class_of[storage] >= 0:
        t.class_cost[_root(t, t.class_of[storage])] -= t.class_share[storage]
        t.class_of[storage] = -1
    return True


@inner()
def _is_made(t, tensor):
    storage = t.tensor_storage[tensor]
    return t.is_constant[storage] or (t.resident[storage] and t.made_in[tensor] == t.version[storage])


@inner()
def _make_outputs(t, c, op, is_first, density):
    """A call whose arguments are there and locked; False after a failure."""
    for row in range(t.arg_begin[op], t.arg_begin[op + 1]):
        t.used[t.tensor_storage[t.args[row]]] = c.clock
    low, high = t.out_begin[op], t.out_begin[op + 1]
    needed = t.op_work_bytes[op]
    for row in range(low, high):
        storage = t.tensor_storage[t.outs[row]]
        if not t.is_view[t.outs[row]] and not t.resident[storage]:
            needed += t.size[storage]
    if (not c.has_places or t.op_work_bytes[op] > 0) and not _make_room(t, c, needed):
        return False
    for row in range(low, high):
        tensor = t.outs[row]
        storage = t.tensor_storage[tensor]
        if not t.is_view[tensor] and not t.resident[storage]:
            t.locks[storage] += 1
            if not _allocate(t, c, storage, density):
                return False
            t.fresh[storage] = True
            if not is_first:
                c.recomputed_bytes += t.size[storage]
        t.made_in[tensor] = t.version[storage]
    c.peak = max(c.peak, c.allocated + t.op_work_bytes[op])
    c.clock += t.op_ticks[op]
    c.ticks += t.op_ticks[op]
    c.recomputed += not is_first
    if c.ticks > c.limit:
        c.ending = _TOO_LONG
        return False
    for row in range(low, high):
        t.used[t.tensor_storage[t.outs[row]]] = c.clock
    for row in range(t.arg_begin[op], t.arg_begin[op + 1]):
        _unlock(t, c, t.tensor_storage[t.args[row]])
        t.is_locked[row] = False
    for row in range(low, high):
        storage = t.tensor_storage[t.outs[row]]
        if t.fresh[storage]:
            t.fresh[storage] = False
            _unlock(t, c, storage)
    return True


@inner()
def _lock_those_there(t, c, op):
    """Before arguments of a repeated call are made again: the others must not be evicted for them."""
    for row in range(t.arg_begin[op], t.arg_begin[op + 1]):
        if _is_made(t, t.args[row]):
            _lock(t, c, t.tensor_storage[t.args[row]])
            t.is_locked[row] = True


@inner()
def _perform(t, c, op, is_first, density):
    """A call, after all that has to be made again for it; False after a failure."""
    depth = 1
    t.frame_op[0], t.frame_row[0] = op, t.arg_begin[op]
    while depth > 0:
        one, row = t.frame_op[depth - 1], t.frame_row[depth - 1]
        if row == t.arg_begin[one + 1]:
            depth -= 1
            if not _make_outputs(t, c, one, is_first and depth == 0, density):
                return False
            continue
        t.frame_row[depth - 1] = row + 1
        if t.is_locked[row]:
            continue
        tensor = t.args[row]
        _lock(t, c, t.tensor_storage[tensor])
        t.is_locked[row] = True
        if not _is_made(t, tensor):
            maker = t.tensor_op[tensor]
            t.frame_op[depth], t.frame_row[depth] = maker, t.arg_begin[maker]
            depth += 1
            _lock_those_there(t, c, maker)
    return True


@inner()
def _begin_call(t, c, op):
    """What the operation adds to the cost of the storages that it puts something into."""
    c.current = op
    for row in range(t.out_begin[op], t.out_begin[op + 1]):
        t.cost[t.tensor_storage[t.outs[row]]] += t.op_ticks[op]


@inner()
def _end(t, c, density):
    """What the program still holds has to be there at once."""
    for tensor in range(len(t.held)):
        if t.held[tensor] > 0:
            _lock(t, c, t.tensor_storage[tensor])
    for tensor in range(len(t.held)):
        if t.held[tensor] > 0 and not _is_made(t, tensor) and not _perform(t, c, t.tensor_op[tensor], False, density):
            return


@njit(nogil=True)
def _run(t, c, step_kind, step_of, density):
    """Follow all steps; what came of it is in the counts."""
    for row in range(len(step_kind)):
        kind, of = step_kind[row], step_of[row]
        if kind == _CALL:
            _begin_call(t, c, of)
            if not _perform(t, c, of, True, density):
                return
        elif kind == _HOLD:
            t.held[of] += 1
            t.names[t.tensor_storage[of]] += 1
        elif kind == _LET_GO:
            storage = t.tensor_storage[of]
            t.held[of] -= 1
            t.names[storage] -= 1
            if t.names[storage] == 0 and t.resident[storage] and t.locks[storage] == 0:
                _free(t, c, storage)
        elif kind == _CONSTANT:
            if not c.has_places and not _make_room(t, c, t.size[of]):
                return
            if not _allocate(t, c, of, density):
                return
    _end(t, c, density)
