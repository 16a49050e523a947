"""Memory of CUDA graphs that is idle between their replays, lent to a thread that asked for that.

Contract: the lock is held, except where Python calls. What is lent is free in the pool of graphs: no live tensor has
it, so a replay writes before it reads there. It is lent only on the stream of all replays of that pool so far, while
none is being launched and no graph is captured, so what a graph does there, what a borrower does, and what the next
replay does come in this order. Python begins no replay of a pool while a loan of it lives, and lets a replay on another
stream, as whatever may reuse the memory otherwise, wait for the device.
"""

from stalloc.compiled import BORROWING, inner
from stalloc.core.constants import LASTING_BIT, LENT_BY_GRAPHS, POOL_PINNED, UNORDERED
from stalloc.core.heap import begin_life
from stalloc.core.intrinsics import this_thread, under_lock
from stalloc.core.lookup import live_is_full
from stalloc.core.pages import cut_out, has_rows
from stalloc.core.records import block_at, graph_pool_at, pool_at, segment_at
from stalloc.core.segments import best_fit, is_before, pool_of

# a quarter of the free block that it is cut from: with a half or an eighth one of six servers is lent less
# (scripts/bench/graphs --lend, 35 and 51 sizes)
_LITTLE_SHIFT = 2


@inner()
def borrow(state, size, requested):
    """Serve a request on the last stream from what graphs leave idle; its address, 0: it is not lent any.

    The best fit of all pools that may lend to the stream; what is little there lies at its end, so that a tensor which
    lives on among larger ones parts no room that the largest need.
    """
    lends = state.hot.private_kind == 0 and state.loans.num_launching == 0 and not live_is_full(state)
    if not lends or this_thread() != state.loans.borrower:
        return 0
    best = 0
    for row in range(1, state.loans.graph_pools_used):
        graphs = graph_pool_at(state, row)
        number = graphs.first_pool if graphs.stream == state.hot.last_stream and graphs.is_unseen == 0 else 0
        while number != 0:
            pool = pool_at(state, number - 1)
            fit = best_fit(state, number - 1, size) if pool.status == POOL_PINNED else 0
            if fit != 0 and (best == 0 or is_before(state, fit, best)):
                best = fit
            number = pool.next_of_graphs
    if best == 0 or not has_rows(state, 2):
        return 0
    begin, free = block_at(state, best).address, block_at(state, best).size_bytes
    best = cut_out(state, best, begin + free - size if size << _LITTLE_SHIFT <= free else begin, size)
    address = begin_life(state, best, requested)
    block_at(state, best).born = LENT_BY_GRAPHS
    graphs = graph_pool_at(state, pool_at(state, pool_of(state, best)).graphs)
    graphs.num_loans += 1
    graphs.num_uses += 1
    graphs.has_lent = 1
    return address


@inner(forceinline=True)
def is_loan(state, block):
    """Whether a block lives in memory that graphs have lent."""
    return block_at(state, block).born == LENT_BY_GRAPHS


@inner()
def stream_of_loan(state, block):
    """The stream (handle) that a loan is used on: while it lives its pool lends to no other one."""
    return graph_pool_at(state, pool_at(state, pool_of(state, block)).graphs).stream


@inner()
def end_loan(state, block):
    """A loan is about to be free."""
    graph_pool_at(state, pool_at(state, pool_of(state, block)).graphs).num_loans -= 1


@under_lock()
def let_lend(state, kind):
    """Let a private kind of pool lend, all its pools of now; the row of its GraphPool, 0: the table is full."""
    row = 1
    while row < state.loans.graph_pools_used and graph_pool_at(state, row).kind != kind:
        row += 1
    if row == state.loans.graph_pools_used:
        if row < state.loans.graph_pools_capacity:
            state.loans.graph_pools_used = row + 1
            graph_pool_at(state, row).kind = kind
            graph_pool_at(state, row).stream = UNORDERED
        else:
            row = 0
    for number in range(state.heap.pools_mask + 1 if row != 0 else 0):
        pool = pool_at(state, number)
        if pool.status != 0 and (pool.kind | LASTING_BIT) == (kind | LASTING_BIT) and pool.graphs == 0:
            pool.graphs = row
            pool.next_of_graphs = graph_pool_at(state, row).first_pool
            graph_pool_at(state, row).first_pool = number + 1
    return row


@under_lock()
def begin_borrowing(state, thread):
    """Let a thread borrow, if no other one does; who did before (0: nobody)."""
    before = state.loans.borrower
    if before == 0:
        state.loans.borrower = thread
    return before


@under_lock()
def end_borrowing(state):
    """Nobody borrows any more."""
    state.loans.borrower = 0


@under_lock()
def begin_launch(state, row, stream):
    """Lend nothing from here on, since a replay of a pool is to be launched on a stream (handle).

    How many loans of it live, in which case nothing has begun; and whether the stream has to wait for the device.
    """
    graphs = graph_pool_at(state, row)
    num_loans, waits = graphs.num_loans, graphs.has_lent == 1 and graphs.stream != stream
    if num_loans == 0:
        state.loans.num_launching += 1
        graphs.num_uses += 1
        if graphs.stream != stream:
            graphs.stream = UNORDERED
        if not waits:
            graphs.has_lent = 0
    return num_loans, waits


@under_lock()
def hold(state):
    """Lend nothing until `end_launch`; how many loans live, and whether some were given back."""
    state.loans.num_launching += 1
    num_loans, has_lent = 0, False
    for row in range(1, state.loans.graph_pools_used):
        num_loans += graph_pool_at(state, row).num_loans
        has_lent = has_lent or graph_pool_at(state, row).has_lent == 1
    return num_loans, has_lent


@under_lock()
def forget_lent(state, chosen):
    """The device has done all that it was given since no loan lived in a pool, or in any (row 0)."""
    for row in range(1, state.loans.graph_pools_used):
        if chosen in (0, row):
            graph_pool_at(state, row).has_lent = 0


@under_lock()
def end_launch(state):
    """Lend again, if nothing else is being launched."""
    state.loans.num_launching -= 1


@under_lock(**BORROWING)
def find_unordered(state, stream, uses):
    """Whether some pool that may lend does not lend to a stream (handle), as a replay was on another.

    Writes what `order` has to be told, a word for each row of the table.
    """
    found = False
    for row in range(1, state.loans.graph_pools_used):
        graphs = graph_pool_at(state, row)
        uses[row] = graphs.num_uses if state.loans.num_launching == 0 else -1
        found = found or (graphs.stream != stream and graphs.is_unseen == 0)
    return found


@under_lock(**BORROWING)
def order(state, stream, uses):
    """The device has done all that it was given since `find_unordered`: lend what was not used since to a stream."""
    for row in range(1, state.loans.graph_pools_used if state.loans.num_launching == 0 else 0):
        graphs = graph_pool_at(state, row)
        if graphs.num_uses == uses[row] and graphs.num_loans == 0 and graphs.stream != stream:
            graphs.stream = stream
            graphs.has_lent = 0


@under_lock()
def lend_no_more(state, row):
    """Never lend from a pool again: its graphs may be launched without a word to stalloc."""
    graph_pool_at(state, row).is_unseen = 1


@under_lock(**BORROWING)
def find_loans(state, addresses, sizes):
    """Write where loans are that live, and the bytes asked for, as many as there is room for; how many."""
    count = 0
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        row = segment.first if segment.address != 0 and pool_at(state, segment.pool).graphs != 0 else 0
        while row != 0 and count < len(addresses):
            block = block_at(state, row)
            if is_loan(state, row):
                addresses[count] = block.address
                sizes[count] = block.requested_bytes
                count += 1
            row = block.next
    return count
