// Vector clocks: a row for each stream, which says how many operations of every stream are done before its next one.
//
// An operation of a stream comes after all that the host had waited for when it was given to the stream, after those
// before it in the stream, and after the events that the stream waited for.  The legacy default stream and the streams
// of its device that are not "non-blocking" wait for each other.  All threads of the host count as one.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <stdlib.h>
#include <string.h>

// How often one event is "not ready" when it is asked for again and again with none recorded in between.  Late work is
// done only when the host waits, but a program that polls in a loop has to go on at last; the checker wants both to
// happen: work that a query does not find done, and soon after work that it does.
enum { LATE_QUERIES = 10000, STRICT_QUERIES = 3 };
// What a query takes of the host on the timeline, so that a loop of them ends when the work does: that of a call that
// looks at memory.
enum { QUERY_NS = 500 };

int order_level = ORDER_AT_ONCE;
pthread_mutex_t order_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(order_lock)
Clock host_clock; // what the host has waited for

typedef struct {
    void *handle;
    int device;
    bool waits_for_legacy, is_gone;
    uint32_t num_queries;
    uint32_t tick_at_start; // of this stream: the row may have been another's
    Clock clock;
    Clock waited; // what of it follows from events that the stream waited for
} Row;
static Row *rows[MAX_ROWS]; // under order_lock, as all below
static int num_rows;
static uint64_t num_records;

// Streams that the program made.  Handles are never used again, so one that was destroyed is known for ever.
typedef struct Stream {
    void *handle;
    struct Stream *next;
    int device, row; // -1: has no row yet
    bool waits_for_legacy, is_gone;
} Stream;
enum { NUM_BUCKETS = 1024 };
static Stream *streams[NUM_BUCKETS];

void stalloc_virtual_set_order(int level) { order_level = level; }

static Stream *find(void *handle) {
    Stream *stream = streams[(uintptr_t)handle / 16 % NUM_BUCKETS];
    while (stream && stream->handle != handle) stream = stream->next;
    return stream;
}

bool order_is_legacy(void *stream) { return (uintptr_t)stream <= 1; }

static Stream *add(void *handle, bool waits_for_legacy) {
    Stream *stream = malloc(sizeof *stream), **bucket = &streams[(uintptr_t)handle / 16 % NUM_BUCKETS];
    if (!stream) abort();
    *stream = (Stream){handle, *bucket, current_device, -1, waits_for_legacy, false};
    return *bucket = stream;
}

void order_stream_made(void *handle, bool waits_for_legacy) {
    if (order_level == ORDER_AT_ONCE) return;
    pthread_mutex_lock(&order_lock);
    add(handle, waits_for_legacy);
    pthread_mutex_unlock(&order_lock);
}

void order_stream_gone(void *handle) {
    if (order_level == ORDER_AT_ONCE) return;
    pthread_mutex_lock(&order_lock);
    Stream *stream = find(handle);
    if (stream) {
        stream->is_gone = true;
        if (stream->row >= 0 && stream->row < MAX_ROWS - 1) rows[stream->row]->is_gone = true;
    }
    pthread_mutex_unlock(&order_lock);
}

bool order_is_destroyed(void *handle) {
    pthread_mutex_lock(&order_lock);
    Stream *stream = find(handle);
    bool is_gone = stream && stream->is_gone;
    pthread_mutex_unlock(&order_lock);
    return is_gone;
}

// A row whose stream is gone can be another's, once the host has waited for all that it was given: every later
// operation comes after that.
static int free_row(void) {
    for (int i = 0; i < num_rows; i++)
        if (rows[i]->is_gone && rows[i]->clock.ticks[i] <= host_clock.ticks[i]) return i;
    if (num_rows == MAX_ROWS) return MAX_ROWS - 1;
    rows[num_rows] = calloc(1, sizeof(Row));
    if (!rows[num_rows]) abort();
    return num_rows++;
}

static int take_row(void *handle, int device, bool waits_for_legacy) {
    int row = free_row();
    rows[row]->handle = handle;
    rows[row]->device = device;
    rows[row]->waits_for_legacy = waits_for_legacy;
    rows[row]->is_gone = false;
    rows[row]->waited = (Clock){0};
    rows[row]->tick_at_start = rows[row]->clock.ticks[row];
    return row;
}

// Default streams have no maker: the legacy one of a device, and the one that a thread has of its own.
static int default_row(void *handle) {
    static __thread char own;
    void *name = order_is_legacy(handle) ? NULL : (void *)&own;
    for (int i = 0; i < num_rows; i++)
        if (rows[i]->handle == name && rows[i]->device == current_device) return i;
    return take_row(name, current_device, true);
}

int order_row(void *handle) {
    if ((uintptr_t)handle <= 2) return default_row(handle);
    Stream *stream = find(handle);
    if (!stream) stream = add(handle, false);
    if (stream->row < 0) stream->row = take_row(handle, stream->device, stream->waits_for_legacy);
    return stream->row;
}

const Clock *order_clock(int row) { return &rows[row]->clock; }
bool order_has_waited(int row, int other) { return rows[row]->waited.ticks[other] > rows[other]->tick_at_start; }
void *order_handle(int row) { return rows[row]->handle; }
int order_device(int row) { return rows[row]->device; }

static void join(Clock *to, const Clock *from) {
    if (from->ns > to->ns) to->ns = from->ns;
    for (int i = 0; i < num_rows; i++)
        if (from->ticks[i] > to->ticks[i]) to->ticks[i] = from->ticks[i];
}

static bool covers(const Clock *done, const Clock *what) {
    for (int i = 0; i < num_rows; i++)
        if (what->ticks[i] > done->ticks[i]) return false;
    return true;
}

uint32_t order_advance(int row) {
    Row *own = rows[row];
    join(&own->clock, &host_clock);
    for (int i = 0; i < num_rows && own->waits_for_legacy; i++) {
        Row *other = rows[i];
        if (i == row || other->device != own->device || !other->waits_for_legacy) continue;
        if (!own->handle || !other->handle) join(&own->clock, &other->clock);
    }
    return ++own->clock.ticks[row];
}

int64_t order_spend(int row, int64_t begin_ns, int64_t ns) {
    order_advance(row);
    Clock *clock = &rows[row]->clock;
    if (begin_ns > clock->ns) clock->ns = begin_ns;
    return clock->ns += ns;
}

void order_record(Clock **event, void *stream) {
    if (order_level == ORDER_AT_ONCE) return;
    if (!*event) *event = calloc(1, sizeof **event);
    if (!*event) return;
    pthread_mutex_lock(&order_lock);
    int row = order_row(stream);
    order_advance(row);
    memcpy((*event)->ticks, rows[row]->clock.ticks, (size_t)num_rows * sizeof(uint32_t));
    (*event)->ns = rows[row]->clock.ns;
    (*event)->num_queries = 0;
    num_records++;
    pthread_mutex_unlock(&order_lock);
}

void order_wait(void *stream, const Clock *event) {
    if (order_level == ORDER_AT_ONCE || !event) return;
    pthread_mutex_lock(&order_lock);
    int row = order_row(stream);
    order_advance(row);
    join(&rows[row]->clock, event);
    join(&rows[row]->waited, event);
    pthread_mutex_unlock(&order_lock);
}

void order_host_waits_for_event(const Clock *event) {
    if (order_level == ORDER_AT_ONCE || !event) return;
    pthread_mutex_lock(&order_lock);
    join(&host_clock, event);
    pthread_mutex_unlock(&order_lock);
}

void order_host_waits_for_stream(void *stream) {
    if (order_level == ORDER_AT_ONCE) return;
    pthread_mutex_lock(&order_lock);
    int row = order_row(stream);
    order_advance(row); // which for the legacy stream comes after those that it waits for
    join(&host_clock, &rows[row]->clock);
    pthread_mutex_unlock(&order_lock);
}

void order_host_waits_for_device(void) {
    if (order_level == ORDER_AT_ONCE) return;
    pthread_mutex_lock(&order_lock);
    for (int i = 0; i < num_rows; i++)
        if (rows[i]->device == current_device) join(&host_clock, &rows[i]->clock);
    pthread_mutex_unlock(&order_lock);
}

// The host learns from the answer as from a wait.
static bool answers_done(const Clock *what, uint32_t *num_queries) {
    bool is_done;
    if (order_level == ORDER_TIMED) {
        is_done = what->ns <= host_clock.ns;
        host_clock.ns += QUERY_NS;
    } else {
        is_done = covers(&host_clock, what) ||
                  ++*num_queries > (order_level == ORDER_LATE ? (uint32_t)LATE_QUERIES : (uint32_t)STRICT_QUERIES);
    }
    if (is_done) join(&host_clock, what);
    return is_done;
}

bool order_event_is_done(Clock *event) {
    if (order_level == ORDER_AT_ONCE || !event) return true;
    pthread_mutex_lock(&order_lock);
    if (order_level == ORDER_LATE && event->queried_at != num_records) event->num_queries = 0;
    event->queried_at = num_records;
    bool is_done = answers_done(event, &event->num_queries);
    pthread_mutex_unlock(&order_lock);
    return is_done;
}

bool order_stream_is_done(void *stream) {
    if (order_level == ORDER_AT_ONCE) return true;
    pthread_mutex_lock(&order_lock);
    Row *row = rows[order_row(stream)];
    bool is_done = answers_done(&row->clock, &row->num_queries);
    if (is_done) row->num_queries = 0;
    pthread_mutex_unlock(&order_lock);
    return is_done;
}
