"""What the compiled core remembers: one record a data structure, one line a field; `device_record.py` has the first.

Who may write: the core, while it holds `State.lock`; Python only through the core's functions, or where a field says
so. Rows are numbers of rows in a table; row 0 of blocks and segments means none. A stream is its index in the table of
streams. Bytes are rounded up to ALIGNMENT unless they are called requested. Schedule time counts the requests that the
schedule was followed by: the clock of leases.

Everything that turns an address and a row into a record is at the end of this file.
"""

from typing import Annotated

from stalloc.core.device_record import State
from stalloc.core.record_types import (
    Record,
    Words,
    dtype_of,
    field_of,
    offset_of,
    path_of,
    record_at,
    row_address,
    row_at,
    row_of,
    shares_word,
    table,
    view_at,
    word_of,
)

__all__ = ["dtype_of", "offset_of", "path_of", "table", "view_at"]  # and what is declared here


class Word(Record):
    """A word that is reached through another record: a link between blocks, a root, a set of bits, an address."""

    value: int


class Block(Record):
    """A range of a segment, one line of the cache.

    address + size_bytes = address of the next one, or the end of the segment; no two neighbours are free
    """

    address: int
    size_bytes: int
    previous: int  # the neighbour below, 0: the segment begins here
    next: int  # the neighbour above
    state: int  # BLOCK_FREE and so on
    segment: int
    left: int  # of a free or unmapped block: the one before it in its list, or those below it in its tree
    right: int
    requested_bytes: int = shares_word("left")  # of a block that is not free
    # of an unplanned request: schedule time when it was made << LIFESPAN_BITS | its row among the lifespans;
    # LENT_BY_GRAPHS; else -1
    born: int = shares_word("right")


class Segment(Record):
    """A range of the device's memory that one pool has, or a lease: intervals of the arena that the heap borrows.

    num_live = number of its blocks that are not free; what allocating and freeing need comes first, in one line
    """

    address: int  # 0: nobody uses this row
    pool: int
    num_live: int
    first: int  # block
    interval_low: int  # a lease has the intervals [interval_low, interval_high)
    interval_high: int  # 0: it is no lease
    until: int  # of a lease: schedule time at which its intervals are needed
    last_used: int  # State.iterations.iterations_ever when the last block was taken from it
    size_bytes: int
    group: int  # segments of one group (0: none) came from the device as one piece, and go back as one
    mapped_bytes: int  # those of size_bytes that have memory
    is_paged: int  # 1: it gets and loses memory by pages
    tail: int  # of a stitched segment: the block whose memory it begins with, 0: none
    head: int  # the one that it ends with, 0: none
    begins_line = True


class Pool(Record):
    """The segments of a stream that serve one kind of request."""

    status: int  # POOL_USED and so on; 0: nobody uses this row
    stream: int
    kind: int  # SMALL_KIND and so on
    root: int  # the tree of its free blocks, if it has no bins
    bins: int  # address of its Bins, 0: none
    graphs: int  # row of the GraphPool that it is a part of, 0: none
    next_of_graphs: int  # row + 1 of another pool that is, 0: there is none
    begins_line = True


class GraphPool(Record):
    """The pools of one private kind whose graphs are replayed by torch, so that what is idle in them can be lent.

    num_loans = number of their blocks that are not free and born LENT_BY_GRAPHS
    """

    kind: int
    first_pool: int  # row + 1; Pool.next_of_graphs leads on
    # handle: all work on their memory so far was given to this stream, or is done; UNORDERED: or to others
    stream: int
    num_uses: int  # replays and loans, ever
    num_loans: int
    has_lent: int  # 1: there was a loan since the last replay, so that `stream` may still be at work on it
    is_unseen: int  # 1: their graphs may be launched without a word, so nothing is lent
    begins_line = True


class Bins(Record):
    """The free blocks of a pool by size, see free_lists.py: bit i of filled is 1 if roots[i] is not 0."""

    roots: Annotated[Words, 2176]  # the first block or the root of each bin
    filled: Annotated[Words, 40]
    summary: int  # a bit for each word of `filled` that is not 0
    begins_line = True


class LiveBlock(Record):
    """Where a block that is not free stands in the hash table, by its address."""

    address: int  # 0: an empty row
    block: int


class Event(Record):
    """Something that a program did, as it is recorded."""

    action: int  # ACTION_ALLOC and so on | stream << 8
    address: int
    requested_bytes: int  # of a segment: its bytes
    time_ns: int  # monotonic; 0 of a completed free
    is_noise: int  # 1: a request of any size, which is no part of a step; Python says so


class ScheduleEntry(Record):
    """A request that the plan expects, and its place: the intervals [interval_low, interval_high), which are whole."""

    key: int  # bytes << STREAM_BITS | stream
    offset: int  # in the arena; -1: it has no place, the heap serves it
    interval_low: int
    interval_high: int
    slot: int  # row of the slot of its offset
    event: int  # of the driver; 0: none of its intervals is another stream's
    hands_over: int  # 1: the event is to be recorded when it is freed
    # row of the gap before it; 0: a step has nothing there that the schedule has not, and does not leave it out
    gap: int
    begins_line = True


class CaptureEntry(Record):
    """A request of the warm-up of a capture, and its place."""

    size_bytes: int  # 0: the capture has asked for it
    offset: int


class Slot(Record):
    """What lives at an offset of the arena; all offsets of the schedule have one, in a hash table."""

    offset: int  # -1: an empty row
    entry: int  # -1: nobody lives there
    requested_bytes: int
    state: int  # BLOCK_LIVE and so on


class Gap(Record):
    """What a step may have, or leave out, where an entry is expected."""

    first_dynamic: int  # row in the table of lifespans of the first of the dynamic requests that come there
    num_dynamic: int
    longest_dynamic: int  # row of the one of them that lives longest
    least_dynamic: int
    next_sure: int  # entry: the next one that no step leaves out; the end of the cycle if there is none
    without: int  # entry: the one that a request like that one is where no dynamic one came before it


class Ratio(Record):
    """How the size of a dynamic request is to that of the one before it."""

    times: int  # 0: not known
    over: int


class Interval(Record):
    """A range of the arena that no entry of the schedule has a part of: it ends where the next one begins."""

    offset: int
    stream: int  # NO_STREAM: several use it
    lease: int  # segment that has borrowed it; UNMAPPED
    needed_at: int  # schedule time when the plan needs it next; below now: not known


class Key(Record):
    """The entries that ask for the same: places[first] to places[end]."""

    key: int  # 0: an empty row
    first: int
    end: int
    padding: int  # rows are reached by a shift


class Cycle(Record):
    """One of several schedules: its entries are [begin, end)."""

    begin: int
    end: int


class IterationRow(Record):
    """An iteration that ended."""

    time_ns: int  # monotonic
    hits: int
    misses: int
    allocated_peak: int
    reserved_peak: int
    begins_line = True


class ExpectedStep(Record):
    """A step that the schedule has, and what is followed after it."""

    end: int  # entry that the cursor is at when it is over
    num_entries: int
    cycle_start: int  # of the step after it
    cycle_end: int
    cursor: int
    schedules: int
    num_events: int  # in the record, when it was over
    begins_line = True


class StreamUse(Record):
    """A stream other than its own that uses a block."""

    address: int  # of the block
    stream: int  # handle
    event: int  # of the driver: the row's for good
    status: int  # USE_LIVE and so on
    next: int  # another use of the block, 0: there is none; of a row that nobody uses: the next such row
    next_freed: int  # in the block's first use: that of the one that was freed after it
    number: int  # State.shared.num_unrecorded when its event turned out not to be recorded
    begins_line = True


class Owner(Record):
    """What is known of the block at an address."""

    size_bytes: int
    raw_stream: int  # handle
    state: int  # BLOCK_ state
    is_private: int  # 1: it belongs to CUDA graphs
    is_loan: int  # 1: they have lent it


state_at = record_at(State)  # (address of a state)
block_at = row_of("heap.blocks", Block)  # (state, row), and so on
segment_at = row_of("heap.segments", Segment)
pool_at = row_of("heap.pools", Pool)
graph_pool_at = row_of("loans.graph_pools", GraphPool)
bins_at = record_at(Bins)  # (address)
unused_bins_at = row_address("heap.bins", Bins)
live_at = row_of("lookup.live", LiveBlock)
live_row = row_at(LiveBlock)  # (address of a table, row)
event_at = row_of("log.events", Event)
entry_at = row_of("follow.schedule", ScheduleEntry)
slot_at = row_of("plan.slots", Slot)
slot_row = row_at(Slot)
key_row = row_at(Key)
interval_at = row_of("plan.intervals", Interval)
gap_at = row_of("tables.gaps", Gap)
ratio_at = row_of("tables.ratios", Ratio)
key_at = row_of("tables.keys", Key)
cycle_at = row_of("tables.schedules", Cycle)
iteration_at = row_of("iterations.iteration_log", IterationRow)
expected_step_at = row_of("expected", ExpectedStep)  # (known steps, which one)
stream_at = row_of("lookup.streams", Word)
place_at = row_of("tables.places", Word)
use_at = row_of("tables.uses", Word)
use_start_at = row_of("tables.use_starts", Word)
lifespan_at = row_of("tables.lifespans", Word)
stream_use_at = row_of("shared.stream_uses", StreamUse)
previous_user_at = row_of("plan.previous_users", Word)
history_at = word_of("follow.history", Word)
persistent_size_at = row_of("capture.persistent_sizes", Word)
capture_entry_at = row_of("capture.capture_plan", CaptureEntry)
root_at = word_of("roots", Word)
filled_at = word_of("filled", Word)
word_at = row_at(Word)  # (address of words, which one)
left_of = field_of("left", Word)
right_of = field_of("right", Word)
root_of = field_of("root", Word)
mode_of_asker = field_of("driver.mode_of_asker", Word)
owner_at = record_at(Owner)  # (address)
