"""Addresses for a replay: storages in one range of the budget's bytes, so that free bytes may lie apart.

Invariant: `placed` holds the storages with addresses, lowest first; no two overlap, and all lie in [0, budget).
Best fit takes the smallest hole, at its lower end. What costly operations make takes its upper end under Coop (cheap
tensor partitioning), so that cheap storages, which are evicted together, are neighbours.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import inner
from stalloc.eviction.instructions import Instructions
from stalloc.eviction.scores import cheapest_window, is_costly

_cheapest_window = inner()(cheapest_window)


def costly_operations(program: Instructions) -> Column:
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
def has_hole(t, c, size):
    """Whether a storage fits somewhere."""
    for row in range(c.num_placed + 1):
        begin, end = _hole_before(t, c, row)
        if end - begin >= size:
            return True
    return False


@inner()
def put_in_place(t, c, storage, from_top):
    """Give a storage an address; there is a hole for it."""
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
def forget_place(t, c, storage):
    """A storage is freed."""
    if t.storages[storage].size == 0:
        return
    c.num_placed -= 1
    for row in range(_row_of(t, c, storage), c.num_placed):
        t.rows[row].placed = t.rows[row + 1].placed


@inner()
def free_beside(t, c, storage):
    """Free bytes right before and after a storage."""
    row = _row_of(t, c, storage)
    begin, end = _hole_before(t, c, row)
    begin_behind, end_behind = _hole_before(t, c, row + 1)
    return end - begin + end_behind - begin_behind


@inner()
def choose_window(t, c, size):
    """Write the storages of the cheapest window that makes room into `window`; how many there are comes back."""
    num, part = c.num_placed, 0
    for row in range(num + 1):
        begin, end = _hole_before(t, c, row)
        if end > begin:
            t.part_begin[part], t.part_end[part], t.part_cost[part], t.part_of[part] = begin, end, 0.0, -1
            part += 1
        if row < num:
            storage = t.rows[row].placed
            t.part_begin[part] = t.storages[storage].address
            t.part_end[part] = t.storages[storage].address + t.storages[storage].size
            t.part_cost[part], t.part_of[part] = t.storages[storage].window_cost, storage
            part += 1
    first, last = _cheapest_window(t.part_begin[:part], t.part_end[:part], t.part_cost[:part], size)
    found = 0
    for row in range(first, last):
        if t.part_of[row] >= 0:
            t.rows[found].window = t.part_of[row]
            found += 1
    return found
