// Host memory that the program pins: allocated through the driver (cudaHostAlloc), or its own and registered.
//
// Contract: what is counted is what was asked of the driver, to the byte.  PyTorch's allocator asks for more than its
// caller did; `asked_of_torch` has the caller's size while that allocator is at work, so that the difference is known.
// Pages behind pinned memory are the process's own: nobody touches them before the program does.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct {
    void *words[4]; // of a c10::DataPtr: data, context, its deleter, the device
} DataPtr;
typedef DataPtr (*Allocate)(void *allocator, size_t size_bytes);
typedef void (*Observer)(int event, void *address, size_t size_bytes, size_t asked_bytes);
typedef struct {
    uintptr_t address;
    size_t size_bytes;
} Registered;

enum { PINNED, UNPINNED, REGISTERED, UNREGISTERED };

static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(pinned_lock)
static struct {
    size_t pinned, pinned_peak, registered, registered_peak;
} totals;                      // bytes; under pinned_lock
static Registered *registered; // under pinned_lock
static size_t num_registered, registered_capacity;
static Observer observer;
static __thread size_t asked_of_torch;

void stalloc_virtual_pinned(uint64_t out[4]) {
    pthread_mutex_lock(&pinned_lock);
    out[0] = totals.pinned, out[1] = totals.pinned_peak, out[2] = totals.registered, out[3] = totals.registered_peak;
    pthread_mutex_unlock(&pinned_lock);
}

void stalloc_virtual_observe_pinned(Observer wanted) { observer = wanted; }

static void tell(int event, void *address, size_t size_bytes, size_t asked_bytes) {
    Observer told = observer;
    if (told) told(event, address, size_bytes, asked_bytes);
}

static void add(size_t *now, size_t *peak, size_t size_bytes) {
    *now += size_bytes;
    if (*now > *peak) *peak = *now;
}

int pinned_allocate(void **address, size_t size_bytes) {
    size_t asked_bytes = asked_of_torch ? asked_of_torch : size_bytes;
    asked_of_torch = 0; // one call of the driver for one of the allocator's
    int error = memory_allocate(address, size_bytes, MEMORY_HOST, current_device, COUNTED_NOWHERE);
    if (error != SUCCESS || !*address) return error;
    pthread_mutex_lock(&pinned_lock);
    add(&totals.pinned, &totals.pinned_peak, size_bytes);
    pthread_mutex_unlock(&pinned_lock);
    tell(PINNED, *address, size_bytes, asked_bytes);
    return SUCCESS;
}

int pinned_free(void *address) {
    Block block;
    bool is_pinned = address && memory_find(address, &block) && block.kind == MEMORY_HOST;
    int error = memory_free(address);
    if (error != SUCCESS || !is_pinned) return error;
    pthread_mutex_lock(&pinned_lock);
    totals.pinned -= block.size_bytes;
    pthread_mutex_unlock(&pinned_lock);
    tell(UNPINNED, address, block.size_bytes, 0);
    return SUCCESS;
}

// The index of the range that holds the address, or num_registered.  Needs pinned_lock.
static size_t range_of(const void *address) {
    for (size_t i = 0; i < num_registered; i++)
        if ((uintptr_t)address - registered[i].address < registered[i].size_bytes) return i;
    return num_registered;
}

bool pinned_is_registered(const void *address) {
    pthread_mutex_lock(&pinned_lock);
    bool found = range_of(address) < num_registered;
    pthread_mutex_unlock(&pinned_lock);
    return found;
}

int pinned_register(void *address, size_t size_bytes) {
    if (!address || !size_bytes) return INVALID_VALUE;
    size_t asked_bytes = asked_of_torch ? asked_of_torch : size_bytes;
    asked_of_torch = 0;
    pthread_mutex_lock(&pinned_lock);
    int error = range_of(address) < num_registered ? HOST_ALREADY_REGISTERED : SUCCESS;
    if (error == SUCCESS && num_registered == registered_capacity) {
        size_t capacity = registered_capacity ? 2 * registered_capacity : 64;
        Registered *more = realloc(registered, capacity * sizeof *registered);
        if (more) registered = more, registered_capacity = capacity;
        else error = OUT_OF_MEMORY;
    }
    if (error == SUCCESS) {
        registered[num_registered++] = (Registered){(uintptr_t)address, size_bytes};
        add(&totals.registered, &totals.registered_peak, size_bytes);
    }
    pthread_mutex_unlock(&pinned_lock);
    if (error == SUCCESS) tell(REGISTERED, address, size_bytes, asked_bytes);
    return error;
}

int pinned_unregister(void *address) {
    pthread_mutex_lock(&pinned_lock);
    size_t i = range_of(address), size_bytes = 0;
    bool found = i < num_registered && registered[i].address == (uintptr_t)address;
    if (found) {
        size_bytes = registered[i].size_bytes;
        registered[i] = registered[--num_registered];
        totals.registered -= size_bytes;
    }
    pthread_mutex_unlock(&pinned_lock);
    if (!found) return HOST_NOT_REGISTERED;
    tell(UNREGISTERED, address, size_bytes, 0);
    return SUCCESS;
}

// PyTorch's allocator of pinned memory is a C++ object, whose second virtual function after the two destructors is
// `DataPtr allocate(size_t)`, as in all releases.  The object gets a copy of its table with ours in that place; a
// DataPtr has a destructor, so the ABI returns it in memory, as it does a C structure of its size.
enum { ALLOCATE = 2, NUM_BEFORE = 2, NUM_FUNCTIONS = 24 };
static Allocate allocate_of_torch;
static void *table[NUM_BEFORE + NUM_FUNCTIONS];

static DataPtr allocate_and_note(void *allocator, size_t size_bytes) {
    asked_of_torch = size_bytes;
    DataPtr made = allocate_of_torch(allocator, size_bytes);
    asked_of_torch = 0; // a cached block asks the driver for none
    return made;
}

void stalloc_virtual_follow_host_allocator(void *allocator) {
    void **own = *(void ***)allocator;
    if (allocate_of_torch) return;
    for (int i = 0; i < NUM_BEFORE + NUM_FUNCTIONS; i++) table[i] = own[i - NUM_BEFORE];
    allocate_of_torch = (Allocate)own[ALLOCATE];
    table[NUM_BEFORE + ALLOCATE] = (void *)allocate_and_note;
    *(void ***)allocator = &table[NUM_BEFORE];
}
