// A timeline: when work ends that takes as long as it would on a GPU that is not there.
//
// Streams run side by side, each its work in order; an operation begins when its stream is free and the host has asked
// for it.  Copies in one direction between host and device share a link, and take it in the order in which they are
// asked for.  How long anything takes is told from outside: operations each, links by their rates.  All that is said
// here is in nanoseconds on one clock, which only moves on as the host works and waits.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

// Beyond this a copy from memory of the host that is not pinned is waited for: it goes through a buffer of the driver's.
enum { STAGED_BYTES = 64 << 10 };
enum { TO_DEVICE, TO_HOST, NUM_LINKS };

static double start_ns, host_ns_per_byte, peer_ns_per_byte;
static int64_t free_at[MAX_DEVICES][NUM_LINKS]; // under order_lock

void stalloc_virtual_set_links(double start, double host_per_byte, double peer_per_byte) {
    start_ns = start;
    host_ns_per_byte = host_per_byte;
    peer_ns_per_byte = peer_per_byte;
}

void stalloc_virtual_host_works(int64_t ns) {
    pthread_mutex_lock(&order_lock);
    host_clock.ns += ns;
    pthread_mutex_unlock(&order_lock);
}

void order_work(void *stream, int64_t ns) {
    if (order_level != ORDER_TIMED || ns <= 0) return;
    uint64_t capture = capture_id(stream);
    if (capture) {
        order_captured_work(capture, ns);
        return;
    }
    pthread_mutex_lock(&order_lock);
    order_spend(order_row(stream), 0, ns);
    pthread_mutex_unlock(&order_lock);
}

void stalloc_virtual_work(int device, void *stream, int64_t ns) {
    int before = current_device;
    current_device = device; // whose default stream it may be
    order_work(stream, ns);
    current_device = before;
}

static int64_t time_of(size_t size_bytes, double ns_per_byte) {
    return (int64_t)(start_ns + (double)size_bytes * ns_per_byte);
}

void order_timed_collective(void *stream, size_t moved_bytes) {
    order_work(stream, time_of(moved_bytes, peer_ns_per_byte));
}

// Of a copy on one device nothing is counted here: where it is an operation of PyTorch's, that is.
void order_timed_copy(void *stream, const void *to, const void *from, size_t size_bytes) {
    if (order_level != ORDER_TIMED || !size_bytes) return;
    Block target, source;
    bool knows_target = memory_find(to, &target), knows_source = memory_find(from, &source);
    bool to_device = knows_target && target.kind == MEMORY_DEVICE;
    bool from_device = knows_source && source.kind == MEMORY_DEVICE;
    if (to_device && from_device) {
        if (target.device != source.device) order_work(stream, time_of(size_bytes, peer_ns_per_byte));
        return;
    }
    if (!to_device && !from_device) return;
    int64_t ns = time_of(size_bytes, host_ns_per_byte);
    if (capture_id(stream)) {
        order_work(stream, ns);
        return;
    }
    pthread_mutex_lock(&order_lock);
    int row = order_row(stream);
    int64_t *link = &free_at[to_device ? target.device : source.device][to_device ? TO_DEVICE : TO_HOST];
    *link = order_spend(row, *link, ns);
    pthread_mutex_unlock(&order_lock);
    if (to_device && !knows_source && size_bytes > STAGED_BYTES) order_host_waits_for_stream(stream);
}
