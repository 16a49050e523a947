// What the capture of a graph forbids, by its mode and its thread, and what the graph accesses when it is launched.
//
// A call that is forbidden is refused, spoils the captures that forbid it, and is a finding.  The rules are those of
// cuThreadExchangeStreamCaptureMode and of "Prohibited and Unhandled Operations" in the CUDA C++ Programming Guide.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <stdlib.h>

enum { GLOBAL, OF_THREAD, RELAXED };
enum { MOST_CAPTURES = 64, NUM_BUCKETS = 1024, MOST_COMPARED = 64 };

typedef struct {
    uintptr_t address;
    size_t size_bytes;
    int how;
} Touch;
typedef struct {
    int num_users; // handles
    uint32_t captured;
    size_t num, capacity;
    Touch *touches;
    int64_t ns; // that its work takes, one after the other
} Accesses;
typedef struct Graph { // or an executable one
    void *handle;
    struct Graph *next;
    Accesses *accesses;
} Graph;
static struct {
    uint64_t capture;
    pthread_t thread;
    int mode, device;
    bool is_spoilt;
    Accesses *accesses;
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

void order_capture_began(uint64_t capture, int mode) {
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
    *graph = (Graph){handle, *bucket, accesses};
    *bucket = graph;
    accesses->num_users++;
}

static void let_go(Accesses *accesses) {
    if (!accesses || --accesses->num_users > 0) return;
    free(accesses->touches);
    free(accesses);
}

bool order_capture_ended(uint64_t capture, void *graph) {
    if (order_level < ORDER_TIMED) return true;
    pthread_mutex_lock(&order_lock);
    int i = index_of(capture);
    bool is_spoilt = i >= 0 && captures[i].is_spoilt;
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

void order_captured_access(uint64_t capture, uintptr_t address, size_t size_bytes, int how) {
    if (how == IS_NEW) return; // of the graph's own memory, from then on
    Touch touch = {address, size_bytes, how & WRITES};
    pthread_mutex_lock(&order_lock);
    int i = index_of(capture);
    Accesses *to = i < 0 ? NULL : captures[i].accesses;
    bool is_there = !to;
    for (size_t k = to && to->num > MOST_COMPARED ? to->num - MOST_COMPARED : 0; !is_there && k < to->num; k++)
        is_there = to->touches[k].address == touch.address && to->touches[k].size_bytes == touch.size_bytes &&
                   to->touches[k].how == touch.how;
    if (!is_there && to->num == to->capacity) {
        size_t capacity = to->capacity ? 2 * to->capacity : 64;
        Touch *more = realloc(to->touches, capacity * sizeof *more);
        if (more) to->touches = more, to->capacity = capacity;
    }
    if (!is_there && to->num < to->capacity) to->touches[to->num++] = touch;
    pthread_mutex_unlock(&order_lock);
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
        free(graph);
    }
    pthread_mutex_unlock(&order_lock);
}

// All that a graph does counts as done at once: how its parts are ordered is not kept.
void order_graph_launched(void *handle, void *stream) {
    if (order_level < ORDER_TIMED) return;
    pthread_mutex_lock(&order_lock);
    Graph *graph = *find(handle);
    Accesses *accesses = graph ? graph->accesses : NULL;
    if (accesses) accesses->num_users++;
    pthread_mutex_unlock(&order_lock);
    if (accesses) order_work(stream, accesses->ns);
    for (size_t i = 0; accesses && i < accesses->num; i++) {
        Touch *touch = &accesses->touches[i];
        order_replayed_access(stream, touch->address, touch->size_bytes, touch->how, accesses->captured);
    }
    pthread_mutex_lock(&order_lock);
    let_go(accesses);
    pthread_mutex_unlock(&order_lock);
}
