// Handles, events and streams: all work is done by the time anybody asks, so only times and captures are kept.  Where
// events are to be late, nothing is done before the host waits for it: the latest that hardware can be.
#define _GNU_SOURCE
#include "virtual_gpu.h"

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
    uint64_t number; // of the record, 0: there was none
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
    ((Event *)handle)->next_unused = unused_events;
    unused_events = handle;
    pthread_mutex_unlock(&stream_lock);
}

// What the host has waited for, under stream_lock.  A stream that waited for an event is done only when that is.
#define MAX_STREAMS 256
#define MAX_JOINS 4096
#define MOST_POLLS 10000 // of one event, with none recorded in between, after which a program that polls may go on
static int events_are_late;
static uint64_t last_number, all_done; // records and waits are numbered in one row
static struct {
    void *stream;
    uint64_t done; // up to this number
} streams[MAX_STREAMS];
static int num_streams; // that events were recorded on; those beyond MAX_STREAMS are done when all are
static struct {
    void *waiting, *stream;
    uint64_t at, number; // the wait's, and that of the record that it is for
} joins[MAX_JOINS]; // the last ones
static uint64_t num_joins;
static Event *polled;
static int num_polls, were_queried;

void stalloc_virtual_set_late_events(int late) { events_are_late = late; }
// Whether an event of another stream than the default one was asked for, as PyTorch does for blocks that streams share.
int stalloc_virtual_shares_blocks(void) { return were_queried; }

static int row_of(void *stream) {
    for (int i = 0; i < num_streams; i++)
        if (streams[i].stream == stream) return i;
    if (num_streams == MAX_STREAMS) return -1;
    streams[num_streams].stream = stream;
    return num_streams++;
}

static void complete(void *stream, uint64_t number) {
    int row = row_of(stream);
    if (row < 0 || streams[row].done >= number) return;
    streams[row].done = number;
    for (uint64_t i = num_joins > MAX_JOINS ? num_joins - MAX_JOINS : 0; i < num_joins; i++) {
        typeof(joins[0]) *join = &joins[i % MAX_JOINS];
        if (join->waiting == stream && join->at <= number) complete(join->stream, join->number);
    }
}

void host_waits_for_event(void *handle) {
    pthread_mutex_lock(&stream_lock);
    if (handle) complete(((Event *)handle)->stream, ((Event *)handle)->number);
    pthread_mutex_unlock(&stream_lock);
}

void host_waits_for_stream(void *stream) {
    pthread_mutex_lock(&stream_lock);
    complete(stream, last_number);
    pthread_mutex_unlock(&stream_lock);
}

void host_waits_for_all(void) {
    pthread_mutex_lock(&stream_lock);
    all_done = last_number;
    pthread_mutex_unlock(&stream_lock);
}

int event_query(void *handle) {
    if (!handle) return INVALID_HANDLE;
    Event *event = handle;
    pthread_mutex_lock(&stream_lock);
    were_queried |= event->stream || num_streams > 1;
    int row = events_are_late ? row_of(event->stream) : -1;
    int is_done = !events_are_late || event->number <= all_done || (row >= 0 && event->number <= streams[row].done);
    num_polls = event == polled ? num_polls + 1 : 0;
    polled = event;
    pthread_mutex_unlock(&stream_lock);
    return is_done || num_polls > MOST_POLLS ? SUCCESS : NOT_READY;
}

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
    event->recorded_ms = now_ms() + (double)atomic_load(&delay_ms);
    event->capture = capture_id(stream);
    pthread_mutex_lock(&stream_lock);
    row_of(stream);
    event->stream = stream;
    event->number = ++last_number;
    polled = NULL;
    pthread_mutex_unlock(&stream_lock);
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
    Event *its = event;
    uint64_t capture = its->capture;
    pthread_mutex_lock(&stream_lock);
    if (its->number) {
        typeof(joins[0]) *join = &joins[num_joins++ % MAX_JOINS];
        join->waiting = stream, join->stream = its->stream, join->at = ++last_number, join->number = its->number;
    }
    pthread_mutex_unlock(&stream_lock);
    if (capture && num_capturing && !capture_id(stream)) capture_join(stream, capture);
}
