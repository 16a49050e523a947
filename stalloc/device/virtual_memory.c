// Device memory: which addresses belong to which block, and how much each device has used.
//
// One region of address space, reserved once, serves all devices.  It is cut into slots of 2 MiB; a block takes
// whole slots, and `owner_of_slot` names the block of each slot, so the block behind any address is found with one
// look-up, however many are live.  What a device has used is counted in bytes rounded up to 512, not in slots.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static atomic_size_t used_bytes[MAX_DEVICES], peak_bytes[MAX_DEVICES];

size_t memory_used_bytes(int device) { return device >= 0 && device < MAX_DEVICES ? used_bytes[device] : 0; }
size_t memory_free_bytes(int device) {
    int told;
    if (fault_answers(fault_of("memory"), &told)) return (size_t)told << 20; // MiB
    return gpu.total_bytes - memory_used_bytes(device);
}

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

size_t stalloc_virtual_used_bytes(int device) { return memory_used_bytes(device); }
size_t stalloc_virtual_peak_bytes(int device) { return device >= 0 && device < MAX_DEVICES ? peak_bytes[device] : 0; }
void stalloc_virtual_restart_peak(int device) {
    if (device >= 0 && device < MAX_DEVICES) peak_bytes[device] = used_bytes[device];
}

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t scratch_lock = PTHREAD_MUTEX_INITIALIZER; // taken before memory_lock

// A fork waits for the threads that hold them: the child finds the tables whole.
static void before_fork(void) {
    pthread_mutex_lock(&scratch_lock);
    pthread_mutex_lock(&memory_lock);
}
static void after_fork(void) {
    pthread_mutex_unlock(&memory_lock);
    pthread_mutex_unlock(&scratch_lock);
}
__attribute__((constructor)) static void at_fork(void) { pthread_atfork(before_fork, after_fork, after_fork); }

static char *region; // under memory_lock until it is set; constant from then on
static size_t num_region_slots;
static uint32_t *owner_of_slot; // 1 + index into `blocks`, 0 for a free slot; under memory_lock
static Block *blocks;           // under memory_lock
static uint32_t num_blocks, blocks_capacity;
static uint32_t *unused_blocks; // a stack of indices into `blocks`
static uint32_t num_unused;
static size_t next_slot; // where the search for free slots goes on; old addresses come back late

static void *reserve(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

// The addresses that memory of devices and pinned memory have: the first, and the end; both 0 before there are any.
void stalloc_virtual_region(uint64_t out[2]) {
    out[0] = (uint64_t)(uintptr_t)region;
    out[1] = out[0] + num_region_slots * SLOT_BYTES;
}

// As much address space as the system gives: 64 TiB, or less where a limit is set on the process. Expandable segments
// take an eighth more than the memory of the device for each stream, graph and size of blocks, and that may be PLENTY.
static bool reserve_region(void) {
    for (size_t bytes = (size_t)64 << 40; bytes >= (size_t)1 << 30; bytes /= 2) {
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

int memory_allocate(void **address, size_t size_bytes, int kind, int device, int counted) {
    *address = NULL;
    if (size_bytes == 0) return SUCCESS;
    if (size_bytes > (size_t)1 << 46) {
        count(COUNT_OOM);
        return OUT_OF_MEMORY;
    }
    size_t charged = round_up(size_bytes, UNIT_BYTES), wanted = round_up(size_bytes, SLOT_BYTES) / SLOT_BYTES;
    if (counted == COUNTED_BY_DEVICE && !memory_charge(device, charged)) return OUT_OF_MEMORY;
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
    if (!placed && counted == COUNTED_BY_DEVICE) memory_refund(device, charged);
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
    Block freed = *block;
    block->kind = MEMORY_UNREGISTERED;
    unused_blocks[num_unused++] = (uint32_t)(block - blocks);
    pthread_mutex_unlock(&memory_lock);
    order_memory_gone(address, freed.num_slots * SLOT_BYTES);
    size_t charged = round_up(freed.size_bytes, UNIT_BYTES);
    if (freed.counted == COUNTED_BY_DEVICE) memory_refund(freed.device, charged);
    if (freed.counted == COUNTED_BY_POOL) pool_regains(freed.device, charged);
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

bool memory_is_address(const void *address) {
    return region && (const char *)address >= region && (const char *)address < region + num_region_slots * SLOT_BYTES;
}

void *memory_scratch(void) {
    static void *scratch;
    pthread_mutex_lock(&scratch_lock);
    if (!scratch) memory_allocate(&scratch, SLOT_BYTES, MEMORY_DEVICE, 0, COUNTED_NOWHERE);
    pthread_mutex_unlock(&scratch_lock);
    return scratch;
}

// A fresh mapping in place of the old one gives back the page tables too, which MADV_DONTNEED keeps.
void memory_drop_pages(void *address, size_t size_bytes) {
    mmap(address, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
