// What the checker of the order of work found, told once for each pair of places, with a count.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <dlfcn.h>
#include <string.h>

enum { MOST_FINDINGS = 1024 };
static Finding findings[MOST_FINDINGS]; // under findings_lock
static int num_findings;
static pthread_mutex_t findings_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(findings_lock)

// Python knows where the program is: it says so before an operation that it watches, and is asked for other work.
static __thread uint32_t current_place;
static uint32_t (*ask_for_place)(void);
void stalloc_virtual_order_at(uint32_t place) { current_place = place; }
void stalloc_virtual_order_ask(uint32_t (*ask)(void)) { ask_for_place = ask; }

static bool python_says(const char *name) {
    int (*function)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, name);
    return function && function();
}
static bool is_of_python(void) {
    void *(*function)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    return function && function();
}

// Libraries hold no lock of their own when they give work to a stream, so that Python's may be waited for.
uint32_t order_place(void) {
    if (current_place || !ask_for_place || !is_of_python()) return current_place;
    return ask_for_place();
}

static int of_kind(const Finding *finding) { return finding->kind == FOUND_HANDED_ON ? FOUND_RACE : finding->kind; }

static bool are_the_same(const Finding *one, const Finding *other) {
    return of_kind(one) == of_kind(other) && one->place == other->place && one->other_place == other->other_place &&
           !strcmp(one->call, other->call);
}

void order_set_call(Finding *finding, const char *call) { strncpy(finding->call, call, sizeof finding->call - 1); }

void order_found(Finding *finding) {
    // allocators call the driver while they hold a lock, for which another thread may wait with Python's
    if (!finding->place) finding->place = current_place;
    if (!finding->place && ask_for_place && python_says("PyGILState_Check")) finding->place = ask_for_place();
    finding->num_seen = 1;
    pthread_mutex_lock(&findings_lock);
    int i = 0;
    while (i < num_findings && !are_the_same(&findings[i], finding)) i++;
    if (i < num_findings) findings[i].num_seen++;
    else if (num_findings < MOST_FINDINGS) findings[num_findings++] = *finding;
    pthread_mutex_unlock(&findings_lock);
}

// The findings from the `first` one on; how many there are in all.
int stalloc_virtual_order_findings(Finding *into, int first, int most) {
    pthread_mutex_lock(&findings_lock);
    for (int i = first; i < num_findings && i < first + most; i++) into[i - first] = findings[i];
    int num = num_findings;
    pthread_mutex_unlock(&findings_lock);
    return num;
}

// Of a device, whose default stream may be meant, whichever one the thread is at.
void stalloc_virtual_order_touch_strided(int device, void *stream, const void *address, size_t item_bytes,
                                         int num_dimensions, const ptrdiff_t *shape, const ptrdiff_t *strides, int how) {
    int before = current_device;
    current_device = device;
    order_access_strided(stream, &(Strided){address, item_bytes, num_dimensions, shape, strides}, how);
    current_device = before;
}
void stalloc_virtual_order_touch(int device, void *stream, const void *address, size_t size_bytes, int how) {
    stalloc_virtual_order_touch_strided(device, stream, address, size_bytes, 0, NULL, NULL, how);
}
void stalloc_virtual_order_touch_by_host(const void *address, size_t item_bytes, int num_dimensions,
                                         const ptrdiff_t *shape, const ptrdiff_t *strides, int how) {
    order_host_access_strided(&(Strided){address, item_bytes, num_dimensions, shape, strides}, how);
}
