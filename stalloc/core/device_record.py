"""What the compiled core remembers of one device beside its tables: one line a field.

`records.py` says who may write what, and what bytes, streams and schedule time are.
"""

from typing import Annotated

from stalloc.core.record_types import LineStart, Record, Words


class Total(Record):
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
    begins_line = True


class Part(Record):
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
    begins_line = True


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


class Hot(Record):
    """What every request reads."""

    mode: int  # MODE_HEAP, MODE_FOLLOW or MODE_PLANNED
    private_kind: int  # Python: the kind of pool that serves everything while a CUDA graph is captured, else 0
    recording: int  # 1: requests are written to the table of events
    has_handovers: int  # 1: the arena has intervals that several streams use, one after the other
    num_deferred: int  # blocks that were freed while other streams use them
    last_stream: int  # handle of the stream that asked last
    last_stream_index: int
    iteration_allocated_peak: int  # bytes, since the iteration began
    begins_line = True


class Follow(Record):
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
    begins_line = True


class Triggers(Record):
    """When the core enters Python, which alone writes this, through `device_triggers.py`; 0: never, or not for this."""

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


class PlanInForce(Record):
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
    begins_line = True


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
    bins: int  # table of Bins
    bins_used: int
    bins_capacity: int
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
