"""What the compiled core remembers: one record a data structure, one line a field.

Who may write: the core, while it holds `State.lock`; Python only through the core's functions, or where a field says
so. Rows are numbers of rows in a table; row 0 of blocks and segments means none. A stream is its index in the table of
streams. Bytes are rounded up to ALIGNMENT unless they are called requested. Schedule time counts the requests that the
schedule was followed by: the clock of leases.

Tables of a device come first, then `State` with its parts, then everything that turns an address and a row into a
record.
"""

from typing import Annotated

from stalloc.core.record_types import (
    LineStart,
    Record,
    Words,
    dtype_of,
    field_of,
    offset_of,
    path_of,
    record_at,
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


class Segment(Record, begins_line=True):
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


class Pool(Record, begins_line=True):
    """The segments of a stream that serve one kind of request."""

    status: int  # POOL_USED and so on; 0: nobody uses this row
    stream: int
    kind: int  # SMALL_KIND and so on
    graphs: int  # row of the GraphPool that it is a part of, 0: none
    next_of_graphs: int  # row + 1 of another pool that is, 0: there is none


class GraphPool(Record, begins_line=True):
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


class Bins(Record, begins_line=True):
    """The free blocks of a pool by size, see segments.py: bit i of filled is 1 if roots[i] is not 0."""

    roots: Annotated[Words, 2176]  # the first block or the root of each bin
    filled: Annotated[Words, 40]
    summary: int  # a bit for each word of `filled` that is not 0


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


class ScheduleEntry(Record, begins_line=True):
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


class IterationRow(Record, begins_line=True):
    """An iteration that ended."""

    time_ns: int  # monotonic
    hits: int
    misses: int
    allocated_peak: int
    reserved_peak: int


class ExpectedStep(Record, begins_line=True):
    """A step that the schedule has, and what is followed after it."""

    end: int  # entry that the cursor is at when it is over
    num_entries: int
    cycle_start: int  # of the step after it
    cycle_end: int
    cursor: int
    schedules: int
    num_events: int  # in the record, when it was over


class StreamUse(Record, begins_line=True):
    """A stream other than its own that uses a block."""

    address: int  # of the block
    stream: int  # handle
    event: int  # of the driver: the row's for good
    status: int  # USE_LIVE and so on
    next: int  # another use of the block, 0: there is none; of a row that nobody uses: the next such row
    next_freed: int  # in the block's first use: that of the one that was freed after it
    number: int  # State.shared.num_unrecorded when its event turned out not to be recorded


class Total(Record, begins_line=True):
    """All requests together. Four words in a row change in one instruction.

    allocated_bytes = sum of the bytes of the num_live blocks; each peak >= what it is the peak of
    """

    allocated_bytes: int
    requested_bytes: int  # those deferred included, as torch counts them
    num_live: int  # blocks, without those deferred
    num_allocs: int  # requests served, ever
    allocated_peak: int  # the peaks since the program reset them
    requested_peak: int
    live_peak: int


class Part(Record, begins_line=True):
    """The requests of up to SMALL_LIMIT bytes, or those above: large + small = total, word by word (peaks apart)."""

    allocated_bytes: int
    requested_bytes: int
    num_live: int
    num_allocs: int
    allocated_peak: int
    requested_peak: int
    live_peak: int
    allocated_ever: LineStart  # bytes
    requested_ever: int  # bytes


class Peaks(Record):
    """The most of something since the program reset the peaks: of all, and of both parts."""

    total: int
    large: int
    small: int


class Clock(Record):
    """Where the C library writes the time."""

    seconds: int
    nanoseconds: int


class FailedSearch(Record):
    """The last search for idle intervals that found none: larger ones find none until intervals are given back."""

    size_bytes: int
    lasts: int  # schedule time that the intervals were wanted for
    stream: int
    released_before: int  # how often intervals had been given back then; -1: there was no search


class KnownSteps(Record):
    """Steps that are expected, of which Python is told later; with counts as of the mark of the last that came.

    Python reads it while `num_expected` is 0.
    """

    num_expected: int
    count: int  # how many of them came
    expected: int  # table of ExpectedStep
    overdue: int  # requests after which a mark should have come
    misses: int
    hits: int
    conflicts: int
    followed: int  # history_count
    num_allocs: int
    requested_ever: int  # bytes
    allocated_bytes: int
    place: int  # entries from where the cycle begins


class Hot(Record, begins_line=True):
    """What every request reads."""

    mode: int  # MODE_HEAP, MODE_FOLLOW or MODE_PLANNED
    private_kind: int  # Python: the kind of pool that serves everything while a CUDA graph is captured, else 0
    recording: int  # 1: requests are written to the table of events
    has_handovers: int  # 1: the arena has intervals that several streams use, one after the other
    num_deferred: int  # blocks that were freed while other streams use them
    last_stream: int  # handle of the stream that asked last
    last_stream_index: int
    iteration_allocated_peak: int  # bytes, since the iteration began


class Follow(Record, begins_line=True):
    """Where the program is in the schedule: what every planned request reads and writes.

    cycle_start <= cursor < cycle_end once the first iteration has begun
    """

    schedule: int  # table of ScheduleEntry
    cycle_start: int  # the cycle that is followed is [cycle_start, cycle_end)
    cycle_end: int
    cursor: int  # entry that is expected next
    hits: int  # requests served from the plan
    miss_run: int  # requests in a row that are not on the schedule
    misses_over_matches: int  # misses - matches, never below 0
    history_count: int
    history: Annotated[Words, 4]  # keys of the last four requests, whatever became of them, at history_count modulo 4
    num_schedules: int
    bypassed: int  # BYPASS, …: the heap serves what the plan has, too, as its arena has no memory; 0: it does not
    left_out: int  # entries of this step that the cursor passed over for one close by; Python sets it to 0 at marks


class Triggers(Record):
    """When the core enters Python, which alone writes this, through `state.py`; 0: never, or not for this."""

    ask_at_boundary: int  # when the cycle begins again (1), or AT_ANY_REQUEST that may be planned
    ask_above: int  # before allocated_bytes become more than this
    ask_after_iterations: int  # when the cycle begins again, after so many of them
    ask_after_misses: int  # when misses_over_matches are this many
    doubt_at: int  # at a miss, when so many requests were served
    check_at: int  # when num_sizable are this many, to search the record


class Loans(Record):
    """Memory of CUDA graphs that is lent between their replays."""

    borrower: int  # thread that is served from it, 0: none
    num_launching: int  # replays and captures that begin now, while nothing is lent
    graph_pools: int  # table of GraphPool
    graph_pools_used: int  # rows, with row 0, which means none
    graph_pools_capacity: int


class PlanInForce(Record, begins_line=True):
    """The arena, and who has which of its intervals.

    arena_live = number of slots with an entry = hits - frees of planned blocks since the plan was put in force
    """

    arena: int  # address
    arena_bytes: int  # addresses of it; 0: there is none
    arena_live: int  # planned blocks that live
    arena_mapped_bytes: int  # those of its addresses that have memory
    arena_pages: int  # a bit for each page: 1 if it has memory; 0: all of the arena has
    interval_bits: int  # a bit for each interval: 1 if it is taken
    intervals: int  # table of Interval
    num_intervals: int
    interval_streams: int  # the streams that have any intervals: a bit for each index modulo 64
    slots: int  # hash table of Slot
    slots_mask: int
    # a word an interval: the entry that used it last, NO_PREVIOUS_USER, or from UNRECORDED_USER down
    previous_users: int


class ScheduleIndex(Record):
    """The tables that a schedule's requests and the uses of its intervals are found by."""

    num_entries: int  # of the schedule
    use_starts: int  # the entries that need interval i are uses[use_starts[i]] to uses[use_starts[i + 1]], in order
    uses: int  # 0: nothing is known of when intervals are needed
    lifespans: int  # how long unplanned requests lived, by part of the iteration and class of size, schedule time
    schedules: int  # table of Cycle
    keys: int  # hash table of Key
    keys_mask: int
    places: int  # entries of the schedules, by key and position
    gaps: int  # table of Gap; 0: steps have what the schedule has and nothing else
    ratios: int  # table of Ratio, one for each dynamic request that a step has


class Dynamic(Record):
    """Requests that the plan leaves room for, and leases of idle intervals."""

    num_dynamic: int  # requests where steps differ, which are neither hits nor misses
    gap_time: int  # schedule time at which the last of them came
    dynamic_in_gap: int  # how many came there
    known_in_gap: int  # of these, the last in a row that the schedule has elsewhere
    last_dynamic_bytes: int
    early_time: int  # schedule time after a match that fewer of them preceded than in any step before
    early_number: int  # how many did
    num_leases: int
    leased_bytes: int
    num_lent: int  # requests served from leases
    num_revoked: int  # leases revoked for a planned request
    intervals_released: int  # how often intervals were given back, other than by planned requests that were freed
    failed_search: FailedSearch


class Iterations(Record):
    """The iteration that runs, and those before."""

    iteration_start: int  # schedule time at which this iteration began
    last_miss: int  # history_count at the last miss: what it has grown by since are matches in a row
    misses: int  # requests above TINY that are not on the schedule
    conflicts: int  # requests that the schedule has, without a place or with one that is taken
    iterations_ever: int  # iterations that ended, whatever plan was in force
    iteration_log: int  # table of IterationRow
    iteration_count: int  # iterations since the plan was put in force
    iteration_misses: int
    iteration_unplanned: int  # entries without a place, of the misses
    hits_before: int  # hits when the iteration began
    conflicts_before: int
    iteration_reserved_peak: int
    span_allocated_peak: int  # over the iterations that ended since the plan was put in force (or ever)
    span_reserved_peak: int
    bad_iterations: int  # iterations in a row that missed much


class Driver(Record):
    """Functions of the driver, and what the core enters Python with."""

    record_event: int
    wait_event: int
    is_capturing: int
    query_event: int
    exchange_mode: int
    mode_of_asker: int  # how the thread that asks which uses are over heeds captures, while it does not
    num_waits: int  # of a stream for an event of another
    slow_function: int  # C function (device, request, argument) -> 1: try again, 0: out of memory
    device: int
    driver_error: int  # status of the driver when it last refused memory; 0: out of memory
    oom_text: int  # address of what an out-of-memory error is to say
    oom_text_length: int
    clock: Clock


class Capture(Record):
    """A capture of a CUDA graph, and what its warm-up requested. Python writes it."""

    capture_is_unannounced: int  # 1: private_kind is for a capture that nobody told of, and may be over
    persistent_sizes: int  # bytes (rounded) of requests that outlive a capture, one word each
    num_persistent_sizes: int
    capture_plan: int  # table of CaptureEntry, what the warm-up of a capture requested
    capture_plan_length: int  # 0: nothing is planned
    capture_plan_first: int  # the capture has asked for all entries before it
    capture_plan_base: int  # the address they are from; 0: Python is to be asked for it
    capture_plan_lacks: int  # where a planned place lacks memory, for which Python is asked; 0: it has it


class SharedBlocks(Record):
    """Blocks that several streams use."""

    stream_uses: int  # table of StreamUse; row 0 means none
    stream_uses_used: int  # rows that have an event
    free_stream_use: int  # the first of those that nobody uses; StreamUse.next leads on
    first_freed_use: int  # the first use of the block that was freed before all others that wait
    last_freed_use: int
    num_unrecorded: int  # uses that became USE_UNRECORDED, ever
    is_asking: int  # 1: a thread asks which uses are over
    frees_in_python: int  # Python, 1: it frees blocks that waited
    small_deferred: int
    deferred_bytes: int
    small_deferred_bytes: int
    active_bytes_peak: Peaks  # while blocks were deferred; else those of what is allocated
    active_blocks_peak: Peaks


class Heap(Record):
    """The tables of the heap."""

    blocks: int  # table of Block
    blocks_used: int  # rows that were ever used, with row 0
    blocks_capacity: int
    free_block_row: int  # the first of those that were used and are not; Block.next leads on
    segments: int  # table of Segment
    segments_used: int
    segments_capacity: int
    free_segment_row: int  # Segment.first leads on
    pools: int  # hash table of Pool
    pools_mask: int
    pools_used: int
    bins: int  # table of Bins, a row for each pool
    first_unmapped: int  # block of addresses without memory; Block.right leads on, Block.left back


class Lookup(Record):
    """Blocks by address, and streams by handle."""

    live: int  # hash table of LiveBlock; small at first, the next one lies behind it
    live_mask: int
    live_count: int
    max_live_mask: int
    streams: int  # table of handles
    num_streams: int


class Policy(Record):
    """What Python has decided for the heap; it alone writes this."""

    allocating_persistent: int  # 1: large requests are meant to last and get segments that hold nothing else
    memory_is_short: int  # 1: segments are cut to what is asked for and holes of all pools are used
    small_apart: int  # 1: small blocks get no places of the plan by chance, as the device may be filled
    expects_marks: int  # 1: the program marks steps, or has an optimizer, whose steps will be marked
    expected_peak: int  # allocated at most before the plan, or what its arena holds; 0: not known


class Log(Record):
    """The record of what the program does."""

    events: int  # table of Event
    num_events: int  # since the record began, those that a ring has lost included
    events_capacity: int
    events_wrap: int  # 1: the last events are kept instead of the first
    events_clock: int  # CLOCK, or COARSE_CLOCK while nobody looks for steps in them
    num_sizable: int  # requests above TINY seen while recording


class Statistics(Record):
    """What is counted beside the requests; of small requests and segments it is a part of the others."""

    reserved_bytes: int  # the arena is a segment
    small_reserved_bytes: int
    reserved_ever: int
    small_reserved_ever: int
    num_segments: int
    small_segments: int
    segments_ever: int
    small_segments_ever: int
    reserved_peak: Peaks
    segments_peak: Peaks
    num_segment_allocs: int
    num_segment_frees: int
    num_ooms: int
    num_unknown_frees: int
    num_retries: int  # Python: requests that were served after memory had been given back to the device


class State(Record):
    """One device; what every request reads lies together, and the lock by itself.

    reserved_bytes = sum of the bytes that are mapped of segments + arena_mapped_bytes
    total.allocated_bytes + deferred_bytes <= reserved_bytes
    """

    lock: int  # 1 while a thread is inside; alone in its line of the cache
    hot: Hot
    follow: Follow
    triggers: Triggers
    loans: Loans
    plan: PlanInForce
    tables: ScheduleIndex
    dynamic: Dynamic
    iterations: Iterations
    known_steps: KnownSteps
    driver: Driver
    capture: Capture
    shared: SharedBlocks
    heap: Heap
    lookup: Lookup
    policy: Policy
    log: Log
    statistics: Statistics

    total: Total
    large: Part
    small: Part


state_at = record_at(State)  # (address of a state)
block_at = row_of("heap.blocks", Block)  # (state, row), and so on
segment_at = row_of("heap.segments", Segment)
pool_at = row_of("heap.pools", Pool)
graph_pool_at = row_of("loans.graph_pools", GraphPool)
bins_at = row_of("heap.bins", Bins)  # (state, row of the pool)
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
mode_of_asker = field_of("driver.mode_of_asker", Word)
