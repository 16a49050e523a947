"""What the numbers in records mean, and the sizes that the core goes by."""

from stalloc.sizes import ALIGNMENT_BYTES, LITTLE_BYTES, PAGE_BYTES

# sizes, bytes
ALIGNMENT = ALIGNMENT_BYTES  # every size is rounded up to it, as by torch and CuPy
TINY = 512  # requests up to this size are never planned: they come and go with the program's whims
SMALL_LIMIT = 1 << 20  # requests up to this size share segments
GRANULE = PAGE_BYTES  # segments are multiples of it, and it is the size of a page
LITTLE = LITTLE_BYTES
# where memory is short, requests that leave more than 1 / 2 ** WASTE_SHIFT of a segment of their own share larger ones
WASTE_SHIFT = 5
MAX_SHARED_SEGMENT = 64 << 20
MAX_REQUEST = 1 << 47  # no device has more, and keys and kinds of pools have room for it

# streams: their index is the lower part of a key
STREAM_BITS = 10
MAX_STREAMS = 1 << STREAM_BITS
NO_HANDLE = -1  # in the table of streams: a row whose stream was forgotten
NO_STREAM = -1  # of an interval: several streams use it

# clocks of Linux: the second ticks every few milliseconds and takes a fifth of the time
CLOCK, COARSE_CLOCK = 1, 6

# State.hot.mode: heap only; follow the schedule without serving it; serve it
MODE_HEAP, MODE_FOLLOW, MODE_PLANNED = 0, 1, 2
AT_ANY_REQUEST = 2  # State.triggers.ask_at_boundary: at any request that may be planned
BYPASS, BYPASS_NEXT_ITERATION = 1, 2  # Follow.bypassed: from within an iteration on; from the start of another

# why the core enters Python; 0, MARK: Python itself enters as the core does, since the program marks a step
MARK, NEED_SEGMENT, AT_BOUNDARY, CHECK, STALE, POLL, REFUSED, NEED_PAGES, OUT_OF_MEMORY = range(9)
POLL_FOR_PLACE, NEED_EVENTS = 9, 10  # freed blocks wait, maybe in the place of a request; streams use more blocks
IN_CAPTURE = 11  # a graph is captured of which nobody told, or one that was is maybe over
OVER_CAP = 12  # allocated_bytes are about to become more than State.triggers.ask_above
IS_LOAN = 1  # Outcome.reason of what was served from memory of CUDA graphs
REASON_BITS = 4  # of what Python gets; above it is what the reason is about
FULL_STREAMS, FULL_POOLS, FULL_LIVE = 1, 2, 3  # with REFUSED: the table that is full, 0: the request is too large

# how far a request has come: nothing was tried; somebody was asked before the schedule moved; only the heap is left;
# Python was asked for the pages of its place in the arena; blocks that waited, maybe in its place, were freed if they
# are over
FIRST_TRY, ASKED, HEAP_ONLY, GOT_PAGES, POLLED = 0, 1, 2, 3, 4

# Pool.kind. Leased: intervals of the arena. Retired: what lives there stays, nothing is served from there. Persistent:
# for what is meant to last.
SMALL_KIND, GENERAL_KIND, LEASED_KIND, PERSISTENT_KIND = range(4)
PRIVATE_KINDS = 1 << 50  # from here on: a pool that belongs to CUDA graphs
LASTING_BIT = 1  # of a private kind: what outlives the capture, so that what does not shares one piece of memory
UNORDERED = -1  # GraphPool.stream
LENT_BY_GRAPHS = -2  # Block.born
# Pool.status; pinned: its memory belongs to graphs, live or not; asleep: some of it has no pages, it serves nobody
POOL_USED, POOL_PINNED, POOL_ASLEEP = 1, 2, 3

# Block.state and Slot.state. Shared: other streams use it; deferred: freed, but they may not be done; in handover:
# being freed, for another stream. Of a shared or deferred block the bits above STATE_BITS are its first StreamUse
BLOCK_FREE, BLOCK_LIVE, BLOCK_SHARED, BLOCK_DEFERRED, BLOCK_IN_HANDOVER = range(5)
BLOCK_UNMAPPED = 5  # Block.state: addresses without memory, whole pages; nobody can have them
BLOCK_LENT = 6  # Block.state: its memory has another address in a stitched segment, and is used from there
UNMAPPED = -1  # Interval.lease: some of its memory is missing, so that nobody can have it

STATE_BITS, STATE_MASK = 3, 7

# StreamUse.status: the block lives; it was freed, and the event is being recorded; is not recorded yet; is recorded;
# the stream is done with the block
USE_LIVE, USE_BEING_RECORDED, USE_UNRECORDED, USE_RECORDED, USE_OVER = range(5)
DRIVER_STATUS = 0xFFFF_FFFF  # the driver's functions return 32 bits
NOT_READY = 600  # what cuEventQuery returns for work that is not done

# State.plan.previous_users: nobody yet; from UNRECORDED_USER down: a stream (UNRECORDED_USER - index) without an event
NO_PREVIOUS_USER = -1
UNRECORDED_USER = -2

# Event.action, as in trace.record
ACTION_ALLOC, ACTION_FREE_REQUESTED, ACTION_FREE_COMPLETED, ACTION_SEGMENT_ALLOC, ACTION_SEGMENT_FREE = range(5)
ACTION_SEGMENT_MAP, ACTION_SEGMENT_UNMAP, ACTION_OOM = 5, 6, 7

# lifespans are learnt for so many parts of an iteration and classes of sizes
LIFESPAN_PLACES_BITS, LIFESPAN_PLACES, LIFESPAN_SIZES = 6, 1 << 6, 64
LIFESPAN_ROWS = LIFESPAN_PLACES * LIFESPAN_SIZES  # and from here on for each dynamic request that a step has
LIFESPAN_BITS = 20  # of a row in their table
MOST_DYNAMIC = (1 << LIFESPAN_BITS) - LIFESPAN_ROWS

ITERATION_LOG_ROWS = 4096
