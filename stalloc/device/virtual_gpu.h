// What the parts of the virtual GPU share: devices, memory and streams live in virtual_gpu.c; the other files
// only dress them in NVIDIA's names.  Nothing here comes from, or needs, the CUDA headers: the few constants and
// structures that cross the interface are declared by hand, with the numbers that CUDA 12 and 13 document.
// Parameters that a function takes only to match its caller are left unused: compile with -Wno-unused-parameter.
#ifndef STALLOC_VIRTUAL_GPU_H
#define STALLOC_VIRTUAL_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_DEVICES 64
#define PAGE_BYTES ((size_t)4096)
#define SLOT_BYTES ((size_t)2 << 20) // every block starts at a multiple of this
#define UNIT_BYTES ((size_t)512)     // accounts count multiples of this

// cudaError_t and CUresult share these numbers.
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    HOST_ALREADY_REGISTERED = 712,
    HOST_NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_ISOLATION = 905,
};

// Whose account a block is on.
enum { COUNTED_NOWHERE, COUNTED_BY_DEVICE, COUNTED_BY_POOL };

// cudaMemoryType; kind 0 marks an unused record.
enum { MEMORY_UNREGISTERED = 0, MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_MANAGED = 3 };

typedef struct {
    size_t first_slot, num_slots;
    size_t size_bytes; // what the caller asked for
    int device;
    int kind;    // MEMORY_*
    int counted; // COUNTED_*
} Block;

typedef struct {
    char name[256];
    size_t total_bytes;
    int major, minor;
    int num_multiprocessors;
    int num_devices;         // that the process sees
    int num_machine_devices;
    int cuda_version;        // 1000 * major + 10 * minor, of driver, runtime and compiler
    size_t context_bytes;    // that each context takes as it is made
    size_t copy_limit_bytes; // larger writes to device memory are skipped, so its pages stay untouched
} Configuration;

extern Configuration gpu;
extern __thread int current_device;

enum {
    COUNT_MALLOC,
    COUNT_FREE,
    COUNT_LAUNCH,
    COUNT_COPY,
    COUNT_COPY_SKIPPED,
    COUNT_MEMSET,
    COUNT_OOM,
    COUNT_RECORD, // events recorded through the driver's interface
    COUNT_WAIT,   // waits of a stream for an event, through the same
    COUNT_MAP,    // calls that map memory at an address
    COUNT_UNMAP,
    COUNT_CREATE,  // pages made and given back
    COUNT_RELEASE,
    COUNT_ACCESS,      // calls that let devices use what is mapped
    COUNT_DEVICE_WAIT, // waits of the host for all that a device was given
    COUNT_SHARED_HANDLE, // memory that other processes are to map, which they cannot
    NUM_COUNTS
};
void count(int which);
int failed(int error); // keeps it for cudaGetLastError and returns it

// A fork waits for the threads that hold a lock, so that the child finds what it guards whole and the lock free.
// For locks under which no other is taken; include <pthread.h>.
#define FREE_AT_FORK(lock)                                                                \
    static void lock##_before_fork(void) { pthread_mutex_lock(&lock); }                   \
    static void lock##_after_fork(void) { pthread_mutex_unlock(&lock); }                  \
    __attribute__((constructor)) static void lock##_at_fork(void) {                       \
        pthread_atfork(lock##_before_fork, lock##_after_fork, lock##_after_fork);         \
    }

static inline size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Devices and primary contexts.
void devices_configured(void);
void devices_initialise(void);     // as cuInit does
int device_on_machine(int device); // its number there, -1: the process has no such device
int device_of_number(int number);  // the inverse
bool context_made(int device);
int context_make(int device); // SUCCESS, or what the driver says of a device that is busy or broken

// What a call is to fail with now; SUCCESS unless that was asked for.
int fault_of(const char *name);
int fault_of_number(const char *what, int number); // of "device", "peer" or "attribute"
enum { ANSWER_NONE = 1 << 21 };
bool fault_answers(int answer, int *value); // whether a fault is an answer other than the true one
int context_lost(void); // the status of an error that a process does not recover from; SUCCESS: there was none
static inline int status_of_call(const char *name) {
    int status = context_lost();
    return status != SUCCESS ? status : fault_of(name);
}
#define MAY_FAIL(call)                              \
    do {                                            \
        int its_fault = status_of_call(#call);      \
        if (its_fault != SUCCESS) return its_fault; \
    } while (0)
// The same at the head of a function of the runtime, and for one that needs the current device, hence its context.
#define RUNTIME_MAY_FAIL(call)                              \
    do {                                                    \
        int its_fault = status_of_call(#call);              \
        if (its_fault != SUCCESS) return failed(its_fault); \
    } while (0)
#define NEEDS_CONTEXT()                               \
    do {                                              \
        int status = context_make(current_device);    \
        if (status != SUCCESS) return failed(status); \
    } while (0)

// Memory.  All of these are thread safe; they return one of the error numbers above.
int memory_allocate(void **address, size_t size_bytes, int kind, int device, int counted);
int memory_free(void *address);
bool memory_find(const void *address, Block *found); // the block that holds `address`
bool memory_is_address(const void *address);         // whether it can be memory of a device, or was
void *memory_start(const Block *block);
size_t memory_used_bytes(int device);
size_t memory_free_bytes(int device); // as the driver tells it
bool memory_charge(int device, size_t size_bytes); // false when the device has too little left
void memory_refund(int device, size_t size_bytes);
void memory_drop_pages(void *address, size_t size_bytes);
void memory_copy(void *to, const void *from, size_t size_bytes);
void memory_copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height);
void memory_set(void *address, int byte, size_t size_bytes);
void *memory_scratch(void); // 2 MiB of device memory outside all accounts, for device-side variables

// Host memory that is pinned: the driver's own, or the program's and registered.
int pinned_allocate(void **address, size_t size_bytes);
int pinned_free(void *address);
int pinned_register(void *address, size_t size_bytes);
int pinned_unregister(void *address);
bool pinned_is_registered(const void *address);

// Stream-ordered pools.
void pool_regains(int device, size_t size_bytes); // a block of the device's pool is freed
void pools_wait(void);                            // the program has waited for the device

// Handles and time.
void *new_handle(void);
void *event_create(void);
void event_destroy(void *event);
int event_record(void *event, void *stream);
int event_query(void *event); // NOT_READY only where work is late
uint64_t event_capture(void *event); // that it was recorded in, 0: in none
void host_waits_for_event(void *event);
int event_elapsed_ms(float *ms, void *start, void *end);
void work_takes(int64_t ms); // as events time it; nothing waits for it
void stream_wait(void *stream, void *event);
int capture_begin(void *stream);
int capture_end(void *stream);
uint64_t capture_id(void *stream); // 0: not capturing

// The function of that name in this library, or with the suffix _v2 or _v3; NULL if there is none.
void *find_function(const char *name);

// The architecture (86 for 8.6) of the binary that the device runs for a kernel, named by its address on the host.
int kernel_architecture(const void *function);

int device_attribute(int *value, int attribute, int device);
int attribute_of(int attribute, int device); // 0 for a device that is not there

#endif
