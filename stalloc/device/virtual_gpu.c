// The virtual GPU: devices, memory and streams that exist only as bookkeeping.
//
// Contract: device memory is host address space that nobody touches unless data is copied into it, so a device of
// 141 GiB costs a few kilobytes.  Kernels do nothing.  Addresses are real: reading or writing them is safe, and
// bytes that were never copied read as zero.  An allocation that exceeds what the device has left fails as on a GPU.
//
// One region of address space, reserved once, serves all devices.  It is cut into slots of 2 MiB; a block takes
// whole slots, and `owner_of_slot` names the block of each slot, so the block behind any address is found with one
// look-up, however many are live.  What a device has used is counted in bytes rounded up to 512, not in slots.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0
#endif

Configuration gpu = {
    .name = "Virtual GPU", .total_bytes = (size_t)80 << 30, .major = 9, .minor = 0,
    .num_multiprocessors = 132, .num_devices = 1, .cuda_version = 13000, .copy_limit_bytes = (size_t)1 << 20,
};
__thread int current_device;

static atomic_size_t used_bytes[MAX_DEVICES], peak_bytes[MAX_DEVICES];
static atomic_ullong counts[NUM_COUNTS];

void count(int which) { atomic_fetch_add_explicit(&counts[which], 1, memory_order_relaxed); }

// --- called by Python

int stalloc_virtual_configure(const char *name, size_t total_bytes, int major, int minor, int num_multiprocessors,
                              int num_devices, int cuda_version, size_t copy_limit_bytes) {
    if (num_devices < 1 || num_devices > MAX_DEVICES || total_bytes == 0) return INVALID_VALUE;
    snprintf(gpu.name, sizeof gpu.name, "%s", name);
    gpu.total_bytes = total_bytes;
    gpu.major = major;
    gpu.minor = minor;
    gpu.num_multiprocessors = num_multiprocessors;
    gpu.num_devices = num_devices;
    gpu.cuda_version = cuda_version;
    gpu.copy_limit_bytes = copy_limit_bytes;
    return SUCCESS;
}

void stalloc_virtual_statistics(uint64_t out[NUM_COUNTS]) {
    for (int i = 0; i < NUM_COUNTS; i++) out[i] = counts[i];
}

size_t stalloc_virtual_used_bytes(int device) { return memory_used_bytes(device); }
size_t stalloc_virtual_peak_bytes(int device) { return device >= 0 && device < MAX_DEVICES ? peak_bytes[device] : 0; }
void stalloc_virtual_set_copy_limit(size_t bytes) { gpu.copy_limit_bytes = bytes; }

// --- accounts

size_t memory_used_bytes(int device) { return device >= 0 && device < MAX_DEVICES ? used_bytes[device] : 0; }

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

bool memory_charge(int device, size_t size_bytes) {
    size_t now = atomic_fetch_add(&used_bytes[device], size_bytes) + size_bytes;
    if (now > gpu.total_bytes || now < size_bytes) {
        atomic_fetch_sub(&used_bytes[device], size_bytes);
        count(COUNT_OOM);
        return false;
    }
    size_t peak = peak_bytes[device];
    while (now > peak && !atomic_compare_exchange_weak(&peak_bytes[device], &peak, now)) {}
    return true;
}

void memory_refund(int device, size_t size_bytes) { atomic_fetch_sub(&used_bytes[device], size_bytes); }

// --- blocks

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static char *region;             // under memory_lock until it is set; constant from then on
static size_t num_region_slots;
static uint32_t *owner_of_slot;  // 1 + index into `blocks`, 0 for a free slot; under memory_lock
static Block *blocks;            // under memory_lock
static uint32_t num_blocks, blocks_capacity;
static uint32_t *unused_blocks;  // a stack of indices into `blocks`
static uint32_t num_unused;
static size_t next_slot;         // where the search for free slots goes on; old addresses come back late

static void *reserve(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

// As much address space as the system gives: 16 TiB, or less where a limit is set on the process.
static bool reserve_region(void) {
    for (size_t bytes = (size_t)16 << 40; bytes >= (size_t)1 << 30; bytes /= 2) {
        char *start = reserve(bytes + SLOT_BYTES);
        if (!start) continue;
        num_region_slots = bytes / SLOT_BYTES;
        owner_of_slot = reserve(num_region_slots * sizeof *owner_of_slot);
        if (!owner_of_slot) {
            munmap(start, bytes + SLOT_BYTES);
            continue;
        }
        madvise(start, bytes + SLOT_BYTES, MADV_DONTDUMP);
        region = (char *)round_up((size_t)start, SLOT_BYTES);
        return true;
    }
    return false;
}

// The first of `wanted` free slots in a row within [from, to), or `to`.
static size_t free_run(size_t from, size_t to, size_t wanted) {
    for (size_t slot = from; slot + wanted <= to;) {
        size_t length = 0;
        while (length < wanted && !owner_of_slot[slot + length]) length++;
        if (length == wanted) return slot;
        const Block *in_the_way = &blocks[owner_of_slot[slot + length] - 1];
        slot = in_the_way->first_slot + in_the_way->num_slots;
    }
    return to;
}

static uint32_t take_record(void) {
    if (num_unused) return unused_blocks[--num_unused];
    if (num_blocks == blocks_capacity) {
        uint32_t capacity = blocks_capacity ? 2 * blocks_capacity : 1024;
        Block *more = realloc(blocks, capacity * sizeof *blocks);
        if (more) blocks = more;
        uint32_t *unused = realloc(unused_blocks, capacity * sizeof *unused_blocks);
        if (unused) unused_blocks = unused;
        if (!more || !unused) return UINT32_MAX;
        blocks_capacity = capacity;
    }
    return num_blocks++;
}

int memory_allocate(void **address, size_t size_bytes, int kind, int device, bool counted) {
    *address = NULL;
    if (size_bytes == 0) return SUCCESS;
    if (size_bytes > (size_t)1 << 46) {
        count(COUNT_OOM);
        return OUT_OF_MEMORY;
    }
    size_t charged = round_up(size_bytes, 512), wanted = round_up(size_bytes, SLOT_BYTES) / SLOT_BYTES;
    if (counted && !memory_charge(device, charged)) return OUT_OF_MEMORY;
    pthread_mutex_lock(&memory_lock);
    bool placed = false;
    if (region || reserve_region()) {
        size_t slot = free_run(next_slot, num_region_slots, wanted);
        if (slot == num_region_slots) slot = free_run(0, num_region_slots, wanted);
        uint32_t index = slot == num_region_slots ? UINT32_MAX : take_record();
        if (index != UINT32_MAX) {
            blocks[index] = (Block){slot, wanted, size_bytes, device, kind, counted};
            for (size_t i = 0; i < wanted; i++) owner_of_slot[slot + i] = index + 1;
            next_slot = slot + wanted;
            *address = region + slot * SLOT_BYTES;
            placed = true;
        }
    }
    pthread_mutex_unlock(&memory_lock);
    if (!placed && counted) memory_refund(device, charged);
    return placed ? SUCCESS : OUT_OF_MEMORY;
}

// The record of the block that holds `address`; NULL if none does.  Needs memory_lock.
static Block *block_at(const void *address) {
    size_t offset = (size_t)((const char *)address - region);
    if (!region || (const char *)address < region || offset >= num_region_slots * SLOT_BYTES) return NULL;
    uint32_t owner = owner_of_slot[offset / SLOT_BYTES];
    if (!owner) return NULL;
    Block *block = &blocks[owner - 1];
    return offset - block->first_slot * SLOT_BYTES < block->size_bytes ? block : NULL;
}

int memory_free(void *address) {
    if (!address) return SUCCESS;
    pthread_mutex_lock(&memory_lock);
    Block *block = block_at(address);
    if (!block || region + block->first_slot * SLOT_BYTES != address) {
        pthread_mutex_unlock(&memory_lock);
        return INVALID_VALUE;
    }
    memory_drop_pages(address, block->num_slots * SLOT_BYTES);
    memset(&owner_of_slot[block->first_slot], 0, block->num_slots * sizeof *owner_of_slot);
    if (block->counted) memory_refund(block->device, round_up(block->size_bytes, 512));
    block->kind = MEMORY_UNREGISTERED;
    unused_blocks[num_unused++] = (uint32_t)(block - blocks);
    pthread_mutex_unlock(&memory_lock);
    return SUCCESS;
}

void *memory_start(const Block *block) { return region + block->first_slot * SLOT_BYTES; }

bool memory_find(const void *address, Block *found) {
    pthread_mutex_lock(&memory_lock);
    Block *block = block_at(address);
    if (block) *found = *block;
    pthread_mutex_unlock(&memory_lock);
    return block != NULL;
}

void *memory_scratch(void) {
    static void *scratch;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!scratch) memory_allocate(&scratch, SLOT_BYTES, MEMORY_DEVICE, 0, false);
    pthread_mutex_unlock(&lock);
    return scratch;
}

// --- data

// A fresh mapping in place of the old one gives back the page tables too, which MADV_DONTNEED keeps.
void memory_drop_pages(void *address, size_t size_bytes) {
    mmap(address, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static bool is_device_memory(const void *address) {
    Block block;
    return memory_find(address, &block) && block.kind == MEMORY_DEVICE;
}

// Kernels write nothing, so device memory that a program reuses for a kernel's result still holds what was copied
// there before: a count or a loss read from it would be garbage.  A read therefore returns data only if exactly that
// piece was the last copy to that address, and zeros otherwise.  (With no copy limit, device memory is plain memory.)
enum { NUM_REMEMBERED = 1 << 14 };
static struct { uintptr_t address; size_t size_bytes; } copied[NUM_REMEMBERED]; // by address; under copied_lock
static pthread_mutex_t copied_lock = PTHREAD_MUTEX_INITIALIZER;

static size_t copied_index(const void *address) { return ((uintptr_t)address >> 2) * 2654435761u % NUM_REMEMBERED; }

static void remember_copy(const void *to, size_t size_bytes) { // size 0: what is there is no copy any more
    size_t i = copied_index(to);
    pthread_mutex_lock(&copied_lock);
    if (size_bytes || copied[i].address == (uintptr_t)to) {
        copied[i].address = (uintptr_t)to;
        copied[i].size_bytes = size_bytes;
    }
    pthread_mutex_unlock(&copied_lock);
}

static bool was_copied(const void *from, size_t size_bytes) {
    size_t i = copied_index(from);
    pthread_mutex_lock(&copied_lock);
    bool same = copied[i].address == (uintptr_t)from && copied[i].size_bytes == size_bytes;
    pthread_mutex_unlock(&copied_lock);
    return same;
}

static bool keeps_everything(void) { return gpu.copy_limit_bytes == SIZE_MAX; }

void memory_copy(void *to, const void *from, size_t size_bytes) {
    count(COUNT_COPY);
    if (keeps_everything()) {
        memmove(to, from, size_bytes);
        return;
    }
    bool readable = !is_device_memory(from) || was_copied(from, size_bytes);
    if (!is_device_memory(to)) {
        if (readable) memmove(to, from, size_bytes);
        else memset(to, 0, size_bytes);
    } else if (readable && size_bytes <= gpu.copy_limit_bytes) {
        memmove(to, from, size_bytes);
        remember_copy(to, size_bytes);
    } else {
        remember_copy(to, 0);
        count(COUNT_COPY_SKIPPED);
    }
}

void memory_copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height) {
    if (width == to_pitch && width == from_pitch) {
        memory_copy(to, from, width * height);
        return;
    }
    count(COUNT_COPY);
    bool to_device = !keeps_everything() && is_device_memory(to), zero = !keeps_everything() && is_device_memory(from);
    if (to_device && (zero || width * height > gpu.copy_limit_bytes)) {
        count(COUNT_COPY_SKIPPED);
        return;
    }
    for (size_t row = 0; row < height; row++) {
        char *target = (char *)to + row * to_pitch;
        if (zero) memset(target, 0, width);
        else memmove(target, (const char *)from + row * from_pitch, width);
    }
}

void memory_set(void *address, int byte, size_t size_bytes) {
    count(COUNT_MEMSET);
    bool written = size_bytes <= gpu.copy_limit_bytes;
    if (!keeps_everything()) remember_copy(address, written ? size_bytes : 0);
    if (written) {
        memset(address, byte, size_bytes);
    } else if (byte == 0) { // whole pages are dropped instead of written: they read as zero again
        char *start = address, *end = start + size_bytes;
        char *first = (char *)round_up((size_t)start, PAGE_BYTES), *last = (char *)((size_t)end & ~(PAGE_BYTES - 1));
        memset(start, 0, (size_t)(first - start));
        madvise(first, (size_t)(last - first), MADV_DONTNEED);
        memset(last, 0, (size_t)(end - last));
    } else {
        count(COUNT_COPY_SKIPPED);
    }
}

// --- handles, events, streams

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

int event_record(void *handle, void *stream) {
    if (!handle) return INVALID_HANDLE;
    Event *event = handle;
    event->recorded_ms = now_ms();
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
static struct { void *stream; uint64_t capture; } capturing[MAX_CAPTURING]; // under stream_lock
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

// --- names

void *find_function(const char *name) {
    Dl_info self;
    if (!dladdr((void *)&find_function, &self)) return NULL;
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!library) return NULL;
    static const char *const suffixes[] = {"", "_v2", "_v3"};
    void *found = NULL;
    for (int i = 0; i < 3 && !found; i++) {
        char full[256];
        snprintf(full, sizeof full, "%s%s", name, suffixes[i]);
        found = dlsym(library, full);
    }
    dlclose(library);
    return found;
}

// Attributes by their documented numbers (cudaDeviceAttr and CUdevice_attribute agree).
int device_attribute(int *value, int attribute, int device) {
    if (device < 0 || device >= gpu.num_devices) return INVALID_DEVICE;
    int capability = 10 * gpu.major + gpu.minor;
    bool small_core = capability == 75 || capability == 86 || capability == 89 || capability == 120;
    int shared_optin = capability >= 120 ? 101376 : capability >= 90 ? 232448 : capability == 86 || capability == 89 ? 101376
                       : capability >= 80 ? 166912 : capability == 75 ? 65536 : 98304;
    switch (attribute) {
    case 1: *value = 1024; break;               // threads in a block
    case 2: case 3: *value = 1024; break;       // block x, y
    case 4: *value = 64; break;                 // block z
    case 5: *value = 2147483647; break;         // grid x
    case 6: case 7: *value = 65535; break;      // grid y, z
    case 8: *value = 49152; break;              // shared memory of a block
    case 9: *value = 65536; break;              // constant memory
    case 10: *value = 32; break;                // warp
    case 11: *value = 2147483647; break;        // pitch
    case 12: case 82: *value = 65536; break;    // registers of a block, of a multiprocessor
    case 13: *value = 1980000; break;           // clock, kHz
    case 14: *value = 512; break;               // texture alignment
    case 15: *value = 1; break;                 // overlap
    case 16: *value = gpu.num_multiprocessors; break;
    case 19: *value = 1; break;                 // can map host memory
    case 31: *value = 1; break;                 // concurrent kernels
    case 33: *value = 1 + device; break;        // PCI bus
    case 36: *value = 2619000; break;           // memory clock, kHz
    case 37: *value = 5120; break;              // memory bus, bits
    case 38: *value = 50 << 20; break;          // L2 cache
    case 39: *value = capability == 75 ? 1024 : small_core ? 1536 : 2048; break; // threads of a multiprocessor
    case 40: *value = 3; break;                 // copy engines
    case 41: *value = 1; break;                 // unified addressing
    case 75: *value = gpu.major; break;
    case 76: *value = gpu.minor; break;
    case 78: case 79: case 80: *value = 1; break; // stream priorities, caches
    case 81: *value = shared_optin + 1024; break; // shared memory of a multiprocessor
    case 83: *value = 1; break;                 // managed memory
    case 89: case 90: *value = 1; break;        // concurrent managed access, compute preemption
    case 95: *value = 1; break;                 // cooperative launch
    case 97: *value = shared_optin; break;
    case 99: *value = 1; break;                 // host registration
    case 102: *value = 1; break;                // virtual memory management
    case 106: *value = small_core ? 16 : 32; break; // blocks of a multiprocessor
    case 111: *value = 1024; break;             // reserved shared memory of a block
    case 115: *value = 1; break;                // memory pools
    case 120: *value = capability >= 90; break; // clusters
    default: *value = 0;
    }
    return SUCCESS;
}

// --- libraries that contain the CUDA runtime instead of linking to it (CuPy's wheels)

// Make each function at base + offsets[i] jump to targets[i].  The code must not be running yet.
int stalloc_virtual_redirect(char *base, size_t num, const uint64_t *offsets, void *const *targets) {
#if defined(__x86_64__)
    enum { JUMP_BYTES = 12 }; // movabs rax, target; jmp rax
#elif defined(__aarch64__)
    enum { JUMP_BYTES = 16 }; // ldr x16, .+8; br x16; target
#else
    enum { JUMP_BYTES = 0 };
#endif
    if (num == 0) return SUCCESS;
    if (JUMP_BYTES == 0) return NOT_SUPPORTED;
    uint64_t low = UINT64_MAX, high = 0;
    for (size_t i = 0; i < num; i++) {
        if (offsets[i] < low) low = offsets[i];
        if (offsets[i] + JUMP_BYTES > high) high = offsets[i] + JUMP_BYTES;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *start = (char *)((size_t)(base + low) & ~(page - 1)), *end = (char *)round_up((size_t)(base + high), page);
    if (mprotect(start, (size_t)(end - start), PROT_READ | PROT_WRITE)) return NOT_SUPPORTED;
    for (size_t i = 0; i < num; i++) {
        unsigned char *at = (unsigned char *)base + offsets[i];
#if defined(__x86_64__)
        memcpy(at, "\x48\xb8", 2);
        memcpy(at + 2, &targets[i], 8);
        memcpy(at + 10, "\xff\xe0", 2);
#elif defined(__aarch64__)
        const uint32_t jump[2] = {0x58000050, 0xd61f0200};
        memcpy(at, jump, 8);
        memcpy(at + 8, &targets[i], 8);
#endif
    }
    __builtin___clear_cache(start, end);
    return mprotect(start, (size_t)(end - start), PROT_READ | PROT_EXEC) ? NOT_SUPPORTED : SUCCESS;
}
