// Handles, events and streams: times and captures are kept here, and what is done when by virtual_clocks.c.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

void *new_handle(void) {
    static atomic_uintptr_t next = 0x10000;
    return (void *)(atomic_fetch_add(&next, 16));
}

typedef struct Event {
    struct Event *next_unused;
    double recorded_ms;
    uint64_t capture; // the capture that the event was recorded in, 0 for none
    void *stream;
    Clock *clock; // what is done once it is, where that is not everything
} Event;

static pthread_mutex_t stream_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(stream_lock)
static Event *unused_events; // records are reused, never given back: a stale handle cannot crash the program

void *event_create(void) {
    pthread_mutex_lock(&stream_lock);
    Event *event = unused_events;
    if (event) unused_events = event->next_unused;
    pthread_mutex_unlock(&stream_lock);
    if (!event) event = malloc(sizeof *event);
    if (event) *event = (Event){0};
    return event;
}

void event_destroy(void *handle) {
    if (!handle) return;
    pthread_mutex_lock(&stream_lock);
    free(((Event *)handle)->clock);
    ((Event *)handle)->clock = NULL;
    ((Event *)handle)->next_unused = unused_events;
    unused_events = handle;
    pthread_mutex_unlock(&stream_lock);
}

// Whether an event of another stream than the default one was asked for, as PyTorch does for blocks that streams share.
static void *first_recorded; // a stream
static int were_recorded, were_several, were_queried;
int stalloc_virtual_shares_blocks(void) { return were_queried; }

void host_waits_for_event(void *handle) {
    if (handle && !((Event *)handle)->capture) order_host_waits_for_event(((Event *)handle)->clock);
}

int event_query(void *handle) {
    if (!handle) return INVALID_HANDLE;
    Event *event = handle;
    were_queried |= event->stream || were_several;
    return event->capture || order_event_is_done(event->clock) ? SUCCESS : NOT_READY;
}

uint64_t event_capture(void *handle) { return handle ? ((Event *)handle)->capture : 0; }

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static _Atomic int64_t delay_ms; // of all work so far that would have been slow
void work_takes(int64_t ms) { atomic_fetch_add(&delay_ms, ms); }

int event_record(void *handle, void *stream) {
    if (!handle) return INVALID_HANDLE;
    Event *event = handle;
    event->capture = capture_id(stream);
    event->stream = stream;
    if (!were_recorded) first_recorded = stream;
    were_recorded = 1;
    were_several |= stream != first_recorded;
    if (event->capture) order_capture_record(event->capture, stream, &event->clock);
    else order_record(&event->clock, stream);
    bool is_timed = order_level == ORDER_TIMED && event->clock;
    event->recorded_ms = (is_timed ? 1e-6 * (double)event->clock->ns : now_ms()) + (double)atomic_load(&delay_ms);
    return SUCCESS;
}

int event_elapsed_ms(float *ms, void *start, void *end) {
    if (!start || !end) return INVALID_HANDLE;
    *ms = (float)(((Event *)end)->recorded_ms - ((Event *)start)->recorded_ms);
    return SUCCESS;
}

// Streams that are being captured: the one that a capture began on, and those that joined by waiting for an event
// of it.  A handful at most, so a short array does.
#define MAX_CAPTURING 256
static struct {
    void *stream;
    uint64_t capture;
} capturing[MAX_CAPTURING]; // under stream_lock
static atomic_int num_capturing;

uint64_t capture_id(void *stream) {
    if (!num_capturing) return 0;
    uint64_t found = 0;
    pthread_mutex_lock(&stream_lock);
    for (int i = 0; i < num_capturing && !found; i++)
        if (capturing[i].stream == stream) found = capturing[i].capture;
    pthread_mutex_unlock(&stream_lock);
    return found;
}

static int capture_join(void *stream, uint64_t capture) {
    int status = OUT_OF_MEMORY;
    pthread_mutex_lock(&stream_lock);
    if (num_capturing < MAX_CAPTURING) {
        capturing[num_capturing].stream = stream;
        capturing[num_capturing].capture = capture;
        num_capturing++;
        status = SUCCESS;
    }
    pthread_mutex_unlock(&stream_lock);
    return status;
}

int capture_begin(void *stream) {
    static atomic_ullong last_capture;
    if (capture_id(stream)) return INVALID_VALUE;
    return capture_join(stream, ++last_capture);
}

int capture_end(void *stream) {
    uint64_t ending = capture_id(stream);
    if (!ending) return INVALID_VALUE;
    pthread_mutex_lock(&stream_lock);
    int kept = 0;
    for (int i = 0; i < num_capturing; i++)
        if (capturing[i].capture != ending) capturing[kept++] = capturing[i];
    num_capturing = kept;
    pthread_mutex_unlock(&stream_lock);
    return SUCCESS;
}

void stream_wait(void *stream, void *event) {
    if (!event) return;
    uint64_t capture = ((Event *)event)->capture;
    if (!capture && !capture_id(stream)) order_wait(stream, ((Event *)event)->clock);
    if (capture && num_capturing && !capture_id(stream)) capture_join(stream, capture);
    if (capture) order_capture_wait(capture, stream, ((Event *)event)->clock);
}
