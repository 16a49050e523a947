// What the capture of a graph forbids, by its mode and its thread, and what the graph accesses when it is launched.
//
// A call that is forbidden is refused, spoils the captures that forbid it, and is a finding.  The rules are those of
// cuThreadExchangeStreamCaptureMode and of "Prohibited and Unhandled Operations" in the CUDA C++ Programming Guide.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <stdlib.h>
#include <string.h>

enum { GLOBAL, OF_THREAD, RELAXED };
enum { MOST_CAPTURES = 64, NUM_BUCKETS = 1024, MOST_COMPARED = 64, MOST_EVENTS = 64 };

enum { MOST_BRANCHES = 64 }; // streams of one capture; those beyond share the last, and are taken to be one stream
typedef struct {
    uintptr_t address;
    size_t size_bytes;
    int how, branch;
    uint32_t tick, place; // of its branch
} Touch;
// A stream of a capture, with how many of the operations of each are captured as coming before its next one.
typedef struct {
    void *stream;
    uint32_t ticks[MOST_BRANCHES];
} Branch;
typedef struct {
    int num_users; // handles
    uint32_t captured;
    size_t num, capacity;
    Touch *touches;
    int64_t ns; // that its work takes, one after the other
    int num_events;
    struct {
        void *event;
        bool is_wait; // each launch waits for it; else records it
    } events[MOST_EVENTS];
} Accesses;
typedef struct Graph { // or an executable one
    void *handle;
    struct Graph *next;
    Accesses *accesses;
    Clock *launched; // the last time: an executable graph runs once at a time, whatever streams it is launched on
} Graph;
static struct {
    uint64_t capture;
    pthread_t thread;
    int mode, device;
    bool is_spoilt;
    Accesses *accesses;
    int num_branches;
    Branch branches[MOST_BRANCHES]; // the first is the stream that it began on
} captures[MOST_CAPTURES]; // under order_lock, as all below
static int num_captures;
static Graph *graphs[NUM_BUCKETS];
static __thread int thread_mode = GLOBAL;

int order_exchange_mode(int mode) {
    int before = thread_mode;
    thread_mode = mode;
    return before;
}

static int index_of(uint64_t capture) {
    for (int i = 0; i < num_captures; i++)
        if (captures[i].capture == capture) return i;
    return -1;
}

static bool report(const char *call) {
    Finding finding = {.kind = FOUND_CAPTURE, .device = current_device};
    order_set_call(&finding, call);
    order_found(&finding);
    return true;
}

static bool is_forbidden_here(int i) {
    if (thread_mode == RELAXED || captures[i].mode == RELAXED) return false;
    return pthread_equal(captures[i].thread, pthread_self()) || (thread_mode == GLOBAL && captures[i].mode == GLOBAL);
}

static bool forbids(const char *call, uint64_t capture, bool any_of_device) {
    if (order_level < ORDER_STRICT || !num_captures) return false;
    bool is_forbidden = false;
    pthread_mutex_lock(&order_lock);
    for (int i = 0; i < num_captures; i++) {
        bool is_meant = captures[i].capture == capture || (any_of_device && captures[i].device == current_device);
        if (!is_meant && !is_forbidden_here(i)) continue;
        captures[i].is_spoilt = is_forbidden = true;
    }
    pthread_mutex_unlock(&order_lock);
    return is_forbidden && report(call);
}

bool order_forbids(const char *call) { return forbids(call, 0, false); }
bool order_forbids_on(const char *call, uint64_t capture) { return forbids(call, capture, false); }
bool order_forbids_on_device(const char *call) { return forbids(call, 0, true); }

// A stream that is captured waits for nothing outside of its capture: what would come of it at each launch is unknown.
bool order_forbids_wait(void *stream, uint64_t of_event) {
    if (order_level < ORDER_STRICT || !num_captures) return false;
    uint64_t capture = capture_id(stream);
    if (!capture || capture == of_event) return false;
    pthread_mutex_lock(&order_lock);
    int i = index_of(capture);
    if (i >= 0) captures[i].is_spoilt = true;
    pthread_mutex_unlock(&order_lock);
    return report("cudaStreamWaitEvent, for an event of outside,");
}

static Branch *branch_of(int i, void *stream) {
    int num = captures[i].num_branches, k = 0;
    while (k < num && captures[i].branches[k].stream != stream) k++;
    if (k == MOST_BRANCHES) k--;
    if (k == num) captures[i].branches[captures[i].num_branches++] = (Branch){.stream = stream};
    return &captures[i].branches[k];
}

void order_capture_began(uint64_t capture, void *stream, int mode) {
    if (order_level < ORDER_TIMED) return;
    pthread_mutex_lock(&order_lock);
    if (num_captures < MOST_CAPTURES) {
        int i = num_captures++;
        captures[i].capture = capture;
        captures[i].thread = pthread_self();
        captures[i].mode = mode;
        captures[i].device = current_device;
        captures[i].is_spoilt = false;
        captures[i].accesses = calloc(1, sizeof(Accesses));
        captures[i].num_branches = 0;
        branch_of(i, stream);
    }
    pthread_mutex_unlock(&order_lock);
}

static Graph **find(void *handle) {
    Graph **link = &graphs[(uintptr_t)handle / 16 % NUM_BUCKETS];
    while (*link && (*link)->handle != handle) link = &(*link)->next;
    return link;
}

static void give(void *handle, Accesses *accesses) {
    Graph *graph = malloc(sizeof *graph), **bucket = &graphs[(uintptr_t)handle / 16 % NUM_BUCKETS];
    if (!graph || !accesses) return;
    *graph = (Graph){handle, *bucket, accesses, NULL};
    *bucket = graph;
    accesses->num_users++;
}

static void let_go(Accesses *accesses) {
    if (!accesses || --accesses->num_users > 0) return;
    free(accesses->touches);
    free(accesses);
}

void order_capture_record(uint64_t capture, void *stream, Clock **event) {
    if (order_level < ORDER_STRICT) return;
    if (!*event) *event = calloc(1, sizeof **event);
    pthread_mutex_lock(&order_lock);
    int i = index_of(capture);
    if (i >= 0 && *event) memcpy((*event)->ticks, branch_of(i, stream)->ticks, sizeof(uint32_t) * MOST_BRANCHES);
    pthread_mutex_unlock(&order_lock);
}

void order_capture_wait(uint64_t capture, void *stream, const Clock *event) {
    if (order_level < ORDER_STRICT || !event) return;
    pthread_mutex_lock(&order_lock);
    int i = index_of(capture);
    Branch *branch = i >= 0 ? branch_of(i, stream) : NULL;
    for (int k = 0; branch && k < MOST_BRANCHES; k++)
        if (event->ticks[k] > branch->ticks[k]) branch->ticks[k] = event->ticks[k];
    pthread_mutex_unlock(&order_lock);
}

// Whether the stream that a capture began on comes after all that was captured of the others.
static bool is_joined(int i) {
    const Branch *branches = captures[i].branches;
    for (int k = 1; k < captures[i].num_branches; k++)
        if (branches[0].ticks[k] < branches[k].ticks[k]) return false;
    return true;
}

bool order_capture_ended(uint64_t capture, void *graph) {
    if (order_level < ORDER_TIMED) return true;
    pthread_mutex_lock(&order_lock);
    int i = index_of(capture);
    bool is_whole = i < 0 || captures[i].is_spoilt || is_joined(i);
    pthread_mutex_unlock(&order_lock);
    if (!is_whole) report("cudaStreamEndCapture, with a stream that was not joined,");
    pthread_mutex_lock(&order_lock);
    i = index_of(capture);
    bool is_spoilt = !is_whole || (i >= 0 && captures[i].is_spoilt);
    if (i >= 0) {
        Accesses *accesses = captures[i].accesses;
        if (accesses) accesses->captured = order_num_accesses();
        if (!is_spoilt) give(graph, accesses);
        else let_go(accesses);
        captures[i] = captures[--num_captures];
    }
    pthread_mutex_unlock(&order_lock);
    return !is_spoilt;
}

// What a capture has, and the access does not come after.
static void compare(int i, const Touch *touch, Finding *finding) {
    const Accesses *before = captures[i].accesses;
    const Branch *branches = captures[i].branches;
    for (size_t k = before->num; k-- > 0 && captures[i].num_branches > 1;) {
        const Touch *other = &before->touches[k];
        bool is_same = touch->address < other->address + other->size_bytes &&
                       other->address < touch->address + touch->size_bytes;
        bool is_after = branches[touch->branch].ticks[other->branch] >= other->tick;
        if (!is_same || is_after || !((touch->how | other->how) & WRITES)) continue;
        finding->kind = FOUND_RACE;
        finding->writes = touch->how;
        finding->other_writes = other->how;
        finding->other_place = other->place;
        finding->other_stream = branches[other->branch].stream;
        finding->has_waited = branches[touch->branch].ticks[other->branch] > 0;
        finding->device = finding->other_device = captures[i].device;
        return;
    }
}

void order_captured_access(uint64_t capture, Finding *finding, int how) {
    if (how == IS_NEW) return; // of the graph's own memory, from then on
    Touch touch = {finding->address, finding->size_bytes, how & WRITES, 0, 0, finding->place};
    pthread_mutex_lock(&order_lock);
    int i = index_of(capture);
    Accesses *to = i < 0 ? NULL : captures[i].accesses;
    if (to) {
        Branch *branch = branch_of(i, finding->stream);
        touch.branch = (int)(branch - captures[i].branches);
        touch.tick = ++branch->ticks[touch.branch];
        compare(i, &touch, finding);
    }
    bool is_there = !to;
    for (size_t k = to && to->num > MOST_COMPARED ? to->num - MOST_COMPARED : 0; !is_there && k < to->num; k++) {
        Touch *other = &to->touches[k];
        is_there = other->address == touch.address && other->size_bytes == touch.size_bytes &&
                   other->how == touch.how && other->branch == touch.branch;
        if (is_there) *other = touch;
    }
    if (!is_there && to->num == to->capacity) {
        size_t capacity = to->capacity ? 2 * to->capacity : 64;
        Touch *more = realloc(to->touches, capacity * sizeof *more);
        if (more) to->touches = more, to->capacity = capacity;
    }
    if (!is_there && to->num < to->capacity) to->touches[to->num++] = touch;
    pthread_mutex_unlock(&order_lock);
    if (finding->kind) order_found(finding);
}

bool order_captured_event(uint64_t capture, void *event, bool is_wait) {
    if (order_level < ORDER_TIMED) return false;
    pthread_mutex_lock(&order_lock);
    int i = index_of(capture);
    Accesses *to = i < 0 ? NULL : captures[i].accesses;
    bool is_kept = to && to->num_events < MOST_EVENTS;
    if (is_kept) {
        to->events[to->num_events].event = event;
        to->events[to->num_events++].is_wait = is_wait;
    }
    pthread_mutex_unlock(&order_lock);
    return is_kept;
}

void order_captured_work(uint64_t capture, int64_t ns) {
    pthread_mutex_lock(&order_lock);
    int i = index_of(capture);
    if (i >= 0 && captures[i].accesses) captures[i].accesses->ns += ns;
    pthread_mutex_unlock(&order_lock);
}

void order_graph_copied(void *graph, void *copy) {
    if (order_level < ORDER_TIMED) return;
    pthread_mutex_lock(&order_lock);
    Graph *found = *find(graph);
    if (found) give(copy, found->accesses);
    pthread_mutex_unlock(&order_lock);
}

void order_graph_gone(void *handle) {
    if (order_level < ORDER_TIMED) return;
    pthread_mutex_lock(&order_lock);
    Graph **link = find(handle), *graph = *link;
    if (graph) {
        *link = graph->next;
        let_go(graph->accesses);
        free(graph->launched);
        free(graph);
    }
    pthread_mutex_unlock(&order_lock);
}

// All that a graph does counts as done at once: how its parts are ordered was looked at when they were captured.
void order_graph_launched(void *handle, void *stream) {
    if (order_level < ORDER_TIMED) return;
    pthread_mutex_lock(&order_lock);
    Graph *graph = *find(handle);
    Accesses *accesses = graph ? graph->accesses : NULL;
    if (accesses) accesses->num_users++;
    pthread_mutex_unlock(&order_lock);
    if (graph) order_wait(stream, graph->launched);
    for (int i = 0; accesses && i < accesses->num_events; i++)
        if (accesses->events[i].is_wait) stream_wait(stream, accesses->events[i].event);
    if (accesses) order_work(stream, accesses->ns);
    for (size_t i = 0; accesses && i < accesses->num; i++) {
        Touch *touch = &accesses->touches[i];
        order_replayed_access(stream, touch->address, touch->size_bytes, touch->how, accesses->captured);
    }
    if (graph) order_record(&graph->launched, stream);
    for (int i = 0; accesses && i < accesses->num_events; i++)
        if (!accesses->events[i].is_wait) event_record(accesses->events[i].event, stream);
    pthread_mutex_lock(&order_lock);
    let_go(accesses);
    pthread_mutex_unlock(&order_lock);
}
