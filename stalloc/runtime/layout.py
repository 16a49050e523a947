"""Where every word of the runtime's state lives: one state a device, in tables of 64-bit words.

The compiled core (heap.py, core.py) and Python (state.py) both go by this file. Words below `LOCK` are guarded by
it, whoever touches them; Python writes them through the core's functions or while it holds the lock. Row 0 of the
block table is "no block". Indices are word indices; `*_ROW` is the number of words in a row of a table.
"""

# --- the state block -------------------------------------------------------------------------------------------
LOCK = 0  # 1 while a thread is inside; alone in its cache line
MODE = 8  # what the core does with a request, see below
SLOW_FUNCTION = 9  # C function (device, reason, argument) -> 1 try again, 0 out of memory
DEVICE = 10
FAILED = 41  # what the driver said when memory was refused for that, 0: memory has run out
SCRATCH = 12  # two words for the clock
HANDING = 15  # 1: the arena has cells that several streams use, one after the other
LASTING = 14  # 1: large requests are meant to last and get segments that hold nothing else
TIGHT = 11  # 1: memory is short: segments are cut to what is asked for and holes of all pools are used
PRIVATE = 62  # the kind of the pool that serves everything while a CUDA graph is captured, else 0

# tables (addresses) and their fill
BLOCKS, BLOCKS_USED, BLOCKS_CAPACITY, BLOCKS_SPARE = 16, 17, 18, 19
CHUNKS, CHUNKS_USED, CHUNKS_CAPACITY, CHUNKS_FREE = 20, 21, 22, 23
POOLS, POOLS_MASK, LIVE, LIVE_MASK, LIVE_COUNT = 24, 25, 26, 27, 28
POOLS_USED = 39
STREAMS, NUM_STREAMS, LAST_STREAM, LAST_STREAM_INDEX = 29, 30, 31, 32
EVENTS, NUM_EVENTS, EVENTS_CAPACITY, RECORDING = 33, 34, 35, 36
NUM_SIZABLE, CHECK_AT = 37, 38  # requests above TINY seen while recording; ask Python for a look at this many

# statistics, bytes rounded up to ALIGNMENT unless said
RESERVED, RESERVED_PEAK = 42, 43  # this peak: since the program reset it
STEP_ALLOCATED_PEAK, STEP_RESERVED_PEAK = 48, 49  # peaks since the last step began
NUM_SEGMENT_ALLOCS, NUM_SEGMENT_FREES, NUM_OOMS, NUM_UNKNOWN_FREES = 50, 51, 52, 53
NUM_RETRIES, NUM_DEFERRED, BYTES_DEFERRED = 55, 56, 57

EXPECTED_PEAK = 63  # allocated at most before the plan, or what its arena holds; 0: not known
SPAN_ALLOCATED_PEAK, SPAN_RESERVED_PEAK = 60, 61  # over the steps that ended since the plan was put in force (or ever)

# the tape
TAPE, TAPE_LENGTH, RING_START, CURSOR = 64, 65, 66, 67
ARENA, ARENA_BYTES, ARENA_LIVE, CELLS = 68, 69, 70, 71
SLOTS, SLOTS_MASK = 72, 73
HITS, MISSES, CONFLICTS, MISS_RUN = 74, 75, 76, 77
LAST_MISS = 78  # HISTORY_COUNT at the last request that did not match: what it has grown by since are matches in a row
ASK_AT_BOUNDARY = 79  # enter Python when the ring begins again (1), or at any request that may be planned (2)
HISTORY, HISTORY_COUNT = 80, 84  # the keys of the last four requests, whatever became of them
HITS_BEFORE, STEP_MISSES, STEP_LOG, STEP_COUNT = 85, 86, 87, 88  # HITS when the step began
OOM_TEXT, OOM_TEXT_LENGTH = 58, 59  # what an out-of-memory error is to say: address and bytes
SURPLUS_MISSES, ASK_AFTER_MISSES = 89, 90  # by how much misses outnumber matches; enter Python at this many
STEP_UNPLANNED, BAD_PASSES = 91, 92  # entries without a place in this pass; passes in a row that missed much

# the arena's cells and what is lent from them, see lending.py
CELL_INFO, NUM_CELLS, USE_STARTS, USES = 93, 94, 95, 96  # USES 0: nothing is known of when cells are needed
PASS_BASE, NUM_LEASES, BYTES_LEASED, LIFESPANS = 97, 98, 99, 100  # PASS_BASE: tape time at which this pass began
NUM_LENT, NUM_REVOKED = 101, 102  # requests served from leases; leases called back for a planned request
# several tapes: rows of begin and end; the one that is followed is [RING_START, TAPE_LENGTH)
TAPES, NUM_TAPES = 103, 104
STEPS_EVER = 105  # passes that ended, whatever plan was in force
BINS, BINS_USED, BINS_CAPACITY = 106, 107, 108
KEYS, KEYS_MASK, PLACES = 109, 110, 111  # where on the tapes each key stands: PLACES are entries by key and position
# what is known of idle cells: the streams that have any (a bit for each index modulo 64), and the last search in vain,
# which holds until cells are given back again
CELL_STREAMS, CELLS_FREED, VAIN_SIZE, VAIN_LASTS, VAIN_STREAM, VAIN_AT = 113, 114, 115, 116, 117, 118
# planned requests whose places are taken displace others in turn: a pass in which they may take more memory ends that
CONFLICTS_BEFORE, HEALING, HEAL_AFTER = 128, 129, 130  # CONFLICTS when the pass began; 1: in this pass; not before
MOST_LIVE = 112  # LIVE_MASK of the largest table of live blocks

# memory that passes from one stream to another, see handing.py
GIVERS, RECORD_EVENT, WAIT_EVENT, IS_CAPTURING = 120, 121, 122, 123  # a word a cell: who used it last; the driver's
NUM_WAITS = 124  # functions; waits of a stream for an event of another

# statistics as torch has them, see counting.py: bytes as allocated and as requested, ever; the part of small requests
SMALL_BYTES_DEFERRED, SMALL_DEFERRED = 143, 144
ACTIVE_PEAKS = 145  # while blocks were deferred: of bytes, all, large and small, and of blocks likewise
SEGMENTS, SEGMENTS_PEAK, SEGMENTS_EVER, RESERVED_EVER = 151, 152, 153, 154  # the arena is a segment
SMALL_SEGMENTS, SMALL_SEGMENTS_EVER, SMALL_RESERVED, SMALL_RESERVED_EVER = 155, 156, 157, 158
SEGMENT_PEAKS = 159  # of reserved bytes, large and small, and of segments likewise

# counts that change with every request, in fours that one instruction changes together: bytes, bytes as requested,
# blocks (live: without those deferred), requests served; all, then those above SMALL_LIMIT and those up to it
ALLOCATED, REQUESTED, NUM_LIVE, NUM_ALLOCS = 192, 193, 194, 195
ALLOCATED_PEAK, REQUESTED_PEAK, LIVE_PEAK = 196, 197, 198  # since the program reset them
LARGE, SMALL = 200, 216  # the same of a part of the requests; its peaks at + PEAKS, its bytes ever at + EVER
PEAKS, EVER = 4, 8
SMALL_ALLOCATED, SMALL_REQUESTED, SMALL_LIVE, SMALL_ALLOCS = 216, 217, 218, 219
LARGE_PEAKS, SMALL_PEAKS = 204, 220
LARGE_BYTES_EVER, LARGE_REQUESTED_EVER, SMALL_BYTES_EVER, SMALL_REQUESTED_EVER = 208, 209, 224, 225

STATE_WORDS = 240

# --- values ----------------------------------------------------------------------------------------------------
ALIGNMENT = 512  # bytes; every size is rounded up to it, as by torch and CuPy
TINY = 512  # bytes; requests up to this size are never planned: they come and go with the program's whims
SMALL_LIMIT = 1 << 20  # bytes; requests up to this size share segments
GRANULE = 2 << 20  # bytes; segments are multiples of it
# where memory is short, requests that leave more than 1 / 2 ** WASTE_SHIFT of a segment of their own share larger ones
WASTE_SHIFT, MOST_FOR_SEVERAL = 5, 64 << 20
LARGEST = 1 << 47  # bytes; no device has more, and keys and kinds of pools have room for it
# kinds of pools. Leased: from the arena. Fenced: what lives there stays, nothing is served from there. Lasting: its
# segments hold only what is meant to last.
SMALL_KIND, GENERAL_KIND, LEASED_KIND, FENCED_KIND, LASTING_KIND = range(5)
PRIVATE_KINDS = 1 << 50  # from here on: a pool that belongs to CUDA graphs

MODE_HEAP, MODE_FOLLOW, MODE_REPLAY = 0, 1, 2  # heap only; follow the tape without serving it; serve it

NEED_SEGMENT, AT_BOUNDARY, CHECK, STALE, POLL, DEFER, REFUSED = range(1, 8)  # why the core enters Python
MARK = 0  # Python itself enters as the core does: the program marks a step
AT_ANY_REQUEST = 2
WAY_FIRST, WAY_AFTER_ASKING, WAY_HEAP = 0, 1, 2  # how much of the way of a request is still to be gone
REASON_BITS = 3
FULL_STREAMS, FULL_POOLS, FULL_LIVE = 1, 2, 3  # with REFUSED: the table that is full, 0: the request is too large
NO_HANDLE = -1  # in the table of streams: a row whose stream was forgotten

# --- rows ------------------------------------------------------------------------------------------------------
BLOCK_ROW = 8  # one line of the cache
B_ADDRESS, B_SIZE, B_PREVIOUS, B_NEXT, B_STATE, B_CHUNK = range(6)
B_LEFT, B_RIGHT = 6, 7  # of a free block: those below it among the free blocks of its pool
# of a block that is not free: bytes requested; of an unplanned request the tape time when it was made << LIFESPAN_BITS
# | its row in the table of lifespans, else -1
B_REQUESTED, B_BORN = 6, 7
# shared: other streams use it; deferred: freed, but they may not be done; handed: being freed, for another stream
BLOCK_FREE, BLOCK_LIVE, BLOCK_SHARED, BLOCK_DEFERRED, BLOCK_HANDED = range(5)

CHUNK_ROW = 16
# what allocating and freeing look at comes first, in one line of the cache
C_BASE, C_POOL, C_LIVE, C_FIRST = range(4)
C_LOW, C_HIGH, C_UNTIL = 4, 5, 6  # a lease: its cells [C_LOW, C_HIGH), C_HIGH 0: none; tape time when they are needed
C_USED = 7  # STEPS_EVER when the last block was taken from it
C_SIZE = 8
C_GROUP = 9  # chunks of one group (0: none) came from the device as one piece, and go back as one

POOL_ROW = 8
P_USED, P_STREAM, P_KIND, P_ROOT, P_BINS = range(5)  # the root of its free blocks, or the address of its bins (0: none)
POOL_USED, POOL_PINNED, POOL_FENCED = 1, 2, 3  # pinned: its memory belongs to graphs, live or not

BINS_ROW = 2240  # the roots of the bins, then a bit for each that holds any, then one for each word of those bits
BN_BITS, BN_SUMMARY = 2176, 2216

LIVE_ROW = 2
L_ADDRESS, L_BLOCK = range(2)

EVENT_ROW = 4
E_ACTION, E_ADDRESS, E_SIZE, E_TIME = range(4)  # action | stream index << 8; bytes requested; nanoseconds
ACTION_ALLOC, ACTION_FREE_REQUESTED, ACTION_FREE_COMPLETED, ACTION_SEGMENT_ALLOC, ACTION_SEGMENT_FREE, ACTION_OOM = (
    0,
    1,
    2,
    3,
    4,
    7,
)

TAPE_ROW = 8
T_KEY, T_OFFSET, T_CELL_LOW, T_CELL_HIGH, T_SLOT = range(5)  # key: rounded size << STREAM_BITS | stream index
T_EVENT, T_GIVES, T_STATUS = 5, 6, 7  # the entry's event, 0: none of its cells is another stream's; 1: to be recorded
# when it is freed; scratch
STREAM_BITS = 10
MAX_STREAMS = 1 << STREAM_BITS

KEY_ROW = 4
K_KEY, K_FIRST, K_END = range(3)  # key 0: no row; its places are [K_FIRST, K_END) of PLACES

SLOT_ROW = 4
S_OFFSET, S_ENTRY, S_REQUESTED, S_STATE = range(4)  # offset -1: no slot; entry -1: nobody lives there

TAPES_ROW = 2
TP_BEGIN, TP_END = range(2)

CELL_ROW = 4
CI_OFFSET, CI_STREAM, CI_LEASE, CI_NEXT = range(4)  # stream index; chunk of the lease; tape time when needed next
NO_STREAM = -1
NOBODY = -1  # a giver: an entry whose event is recorded, or nobody yet, or from here down: a stream without an event
GIVEN_UNRECORDED = -2

# parts of a pass, and classes of sizes, for which lifespans are learnt
LIFESPAN_PLACES_BITS, LIFESPAN_PLACES, LIFESPAN_SIZES = 6, 1 << 6, 64
LIFESPAN_BITS = 12  # of a row in their table

STEP_ROW = 8
STEP_LOG_ROWS = 4096
ST_TIME, ST_HITS, ST_MISSES, ST_ALLOCATED_PEAK, ST_RESERVED_PEAK = range(5)
