// Handles, events and streams: all work is done by the time anybody asks, so only times and captures are kept.
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
    if (event) *event = (Event){NULL, 0, 0};
    return event;
}

void event_destroy(void *handle) {
    if (!handle) return;
    pthread_mutex_lock(&stream_lock);
    ((Event *)handle)->next_unused = unused_events;
    unused_events = handle;
    pthread_mutex_unlock(&stream_lock);
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
    if (capture && num_capturing && !capture_id(stream)) capture_join(stream, capture);
}
