// The order of work: what each stream and the host can rely on to be done, and what accesses memory without relying on it.
//
// Contract: nothing here is kept or said below the level that it is for.  ORDER_AT_ONCE: all work is done by the time
// anybody asks.  ORDER_LATE: no work is done before the host waits for it.  ORDER_TIMED: work is done once the host's
// clock has passed its end, as virtual_timeline.c has both.  ORDER_STRICT: work is late, every access of memory that is
// known is checked against those before it, and calls that a GPU would refuse are refused and noted.
// The lock of this part is the innermost: it calls nothing of the other parts while it holds it.
#ifndef STALLOC_VIRTUAL_ORDER_H
#define STALLOC_VIRTUAL_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ORDER_AT_ONCE, ORDER_LATE, ORDER_TIMED, ORDER_STRICT };
extern int order_level;

// virtual_clocks.c: streams and what is done before their next operation.
enum { MAX_ROWS = 256 }; // streams in use at a time; those beyond share the last row, and are taken to be one stream
typedef struct {
    uint32_t ticks[MAX_ROWS]; // of each row, how many of its operations are done before
    int64_t ns;               // on the timeline, when that is so
    uint32_t num_queries;     // of an event, that were answered "not ready"
    uint64_t queried_at;      // the number of records when it was queried last
} Clock;
void order_stream_made(void *stream, bool waits_for_legacy);
void order_stream_gone(void *stream);
void order_record(Clock **event, void *stream); // makes the event's clock where there is none
void order_wait(void *stream, const Clock *event);
void order_host_waits_for_event(const Clock *event);
void order_host_waits_for_stream(void *stream);
void order_host_waits_for_device(void);
bool order_event_is_done(Clock *event); // is asked by a query: after some, work is done although nobody waited
bool order_stream_is_done(void *stream);

// For the other files of this part: under order_lock.
#include <pthread.h>
extern pthread_mutex_t order_lock;
extern Clock host_clock;
int order_row(void *stream);
uint32_t order_advance(int row); // an operation is given to a stream: its tick
const Clock *order_clock(int row);
bool order_has_waited(int row, int other); // the one's stream for an event after work of the other's
void *order_handle(int row);
int order_device(int row);
int64_t order_spend(int row, int64_t begin_ns, int64_t ns); // work that begins no sooner; when it ends
bool order_is_legacy(void *stream);
bool order_is_destroyed(void *stream);

// virtual_timeline.c: how long work takes, at the level ORDER_TIMED.
void order_work(void *stream, int64_t ns);
void order_timed_copy(void *stream, const void *to, const void *from, size_t size_bytes);
void order_timed_collective(void *stream, size_t moved_bytes);

typedef struct Finding Finding;

// virtual_accesses.c: memory, by physical page, and who used it last.
enum { READS = 0, WRITES = 1, IS_NEW = 2, FREES = 4 }; // IS_NEW: an allocator has just given it to the program
void order_access(void *stream, const void *address, size_t size_bytes, int how);
enum { MOST_DIMENSIONS = 64 };
typedef struct {
    const void *address;
    size_t item_bytes;
    int num_dimensions;
    const ptrdiff_t *shape, *strides; // strides in bytes
} Strided;
void order_access_strided(void *stream, const Strided *array, int how); // one access of all its items
uint32_t order_num_accesses(void);
void order_replayed_access(void *stream, uintptr_t address, size_t size_bytes, int how, uint32_t captured);
void order_host_access_strided(const Strided *array, int how);
void order_copy(void *stream, void *to, const void *from, size_t size_bytes, bool host_waits);
void order_copy_rows(void *stream, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                     size_t height, bool host_waits);
void order_memory_gone(const void *address, size_t size_bytes);
void order_freed_on(void *stream, const void *address);
void order_addresses_reserved(uintptr_t address, size_t size_bytes);
void order_addresses_freed(uintptr_t address, size_t size_bytes);
void order_pages_made(void *handle, size_t size_bytes);
void order_pages_released(void *handle); // and mapped nowhere any more
void order_mapped(uintptr_t address, size_t size_bytes, size_t offset, void *handle);
void order_unmapped(uintptr_t address, size_t size_bytes);
void order_opened(uintptr_t address, size_t size_bytes, bool is_open); // what is mapped, to a device

// virtual_captures.c: what a capture forbids, and what its graph accesses when it is launched.
bool order_forbids(const char *call);                 // to this thread, now; the captures are spoilt
bool order_forbids_on(const char *call, uint64_t capture); // and for a stream or an event that is captured
bool order_forbids_on_device(const char *call);            // and while any stream of the device is captured
bool order_forbids_wait(void *stream, uint64_t capture);   // of a stream for an event of a capture, 0: of none
int order_exchange_mode(int mode);                         // of this thread; what it was
void order_capture_began(uint64_t capture, void *stream, int mode);
bool order_capture_ended(uint64_t capture, void *graph); // false: it was spoilt, and there is no graph
void order_capture_record(uint64_t capture, void *stream, Clock **event); // its ticks are those of the capture
void order_capture_wait(uint64_t capture, void *stream, const Clock *event);
void order_captured_access(uint64_t capture, Finding *finding, int how); // with its place, and what is accessed
void order_captured_work(uint64_t capture, int64_t ns);
bool order_captured_event(uint64_t capture, void *event, bool is_wait); // that each launch records, or waits for
void order_graph_copied(void *graph, void *copy);        // an executable graph is made of one
void order_graph_gone(void *graph);
void order_graph_launched(void *graph, void *stream);

// virtual_kernels.c: what kernels access that were compiled at run time.
char *kernels_of_source(const char *source); // the image of a compiled program, NULL where it does not matter
void kernels_loaded(void *module, const void *image);
void kernel_found(void *function, void *module, const char *name);
void kernel_launched(void *function, void *stream, void **parameters);

// virtual_findings.c: what was found, and where in the program it was.
enum {
    FOUND_RACE = 1,     // two accesses that nothing orders
    FOUND_HANDED_ON,    // the same, and the memory was given to somebody else in between
    FOUND_HOST,         // the host accesses what a stream may still use
    FOUND_NO_PAGE,      // an access of addresses without memory
    FOUND_FREED,        // an access of memory that was given back
    FOUND_IN_USE,       // memory is taken away from work that may use it
    FOUND_NOT_MAPPED,   // unmapping what is not mapped
    FOUND_MAPPED_OVER,  // mapping over a mapping
    FOUND_NOT_RESERVED, // mapping outside of reserved addresses
    FOUND_STILL_MAPPED, // giving back addresses that have memory
    FOUND_DESTROYED,    // use of a stream that was destroyed
    FOUND_CAPTURE,      // a call that a capture forbids
    FOUND_GRAPH_MEMORY, // a graph accesses memory that was given to somebody else since its capture
    FOUND_CLOSED,       // an access of mapped memory that no device may access
};
struct Finding {
    int kind;
    int writes, other_writes; // FREES: it is given back in the order of a stream
    int has_waited; // this stream, for the other one, before the access in question
    uint32_t place, other_place;
    uint64_t num_seen;
    uintptr_t address;
    size_t size_bytes;
    void *stream, *other_stream;
    int device, other_device;
    char call[64];
};
void order_found(Finding *finding); // its place is looked up where it has none; not under order_lock
uint32_t order_place(void);         // where the program is, for work that is given to a stream
void order_set_call(Finding *finding, const char *call);

#endif
