// Stream-ordered pools (cudaMallocAsync): one for each device.
//
// A pool holds a multiple of 32 MiB, as CuPy's authors saw on GPUs (cupy/cuda/memory.pyx, MemoryAsyncPool), or pages of
// 2 MiB where the device has no whole step left. It grows when a request needs it to. What is freed stays with it until
// the program waits for the device, and then goes back down to the threshold, or until the program trims the pool. The
// driver is closed, so all else favours the pool: a request fits wherever as many bytes are free, as if nothing lay
// between them.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <pthread.h>

typedef int Error;
typedef void *Handle; // streams, pools

#define STEP_BYTES ((size_t)32 << 20)

typedef struct {
    size_t used, used_high;
    size_t reserved, reserved_high;
    size_t threshold;
} Pool;

static Pool pools[MAX_DEVICES]; // under pool_lock
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(pool_lock)

static int device_of_pool(Handle pool) {
    uintptr_t index = (uintptr_t)pool - 1;
    return index < MAX_DEVICES ? (int)index : current_device;
}

static size_t higher(size_t one, size_t other) { return one > other ? one : other; }

// Make room for so many bytes more; false if the device has too little left.
static bool grow(int device, size_t size_bytes) {
    Pool *pool = &pools[device];
    size_t needed = pool->used + size_bytes;
    if (needed > pool->reserved) {
        size_t left = gpu.total_bytes - memory_used_bytes(device), wanted = round_up(needed, STEP_BYTES);
        if (wanted - pool->reserved > left) wanted = round_up(needed, SLOT_BYTES);
        if (!memory_charge(device, wanted - pool->reserved)) return false;
        pool->reserved = wanted;
        pool->reserved_high = higher(pool->reserved_high, wanted);
    }
    pool->used = needed;
    pool->used_high = higher(pool->used_high, needed);
    return true;
}

static void shrink(int device, size_t keep_bytes) {
    Pool *pool = &pools[device];
    if (keep_bytes >= pool->reserved) return;
    size_t wanted = round_up(higher(pool->used, keep_bytes), STEP_BYTES);
    if (wanted >= pool->reserved) return;
    memory_refund(device, pool->reserved - wanted);
    pool->reserved = wanted;
}

void pool_regains(int device, size_t size_bytes) {
    pthread_mutex_lock(&pool_lock);
    pools[device].used -= size_bytes;
    pthread_mutex_unlock(&pool_lock);
}

void pools_wait(void) {
    pthread_mutex_lock(&pool_lock);
    for (int device = 0; device < gpu.num_devices; device++) shrink(device, pools[device].threshold);
    pthread_mutex_unlock(&pool_lock);
}

Error cudaMallocAsync(void **address, size_t size, Handle stream) {
    NEEDS_CONTEXT();
    int device = current_device;
    pthread_mutex_lock(&pool_lock);
    bool has_room = grow(device, round_up(size, UNIT_BYTES));
    pthread_mutex_unlock(&pool_lock);
    if (!has_room) return failed(OUT_OF_MEMORY);
    Error error = memory_allocate(address, size, MEMORY_DEVICE, device, COUNTED_BY_POOL);
    if (error == SUCCESS) count(COUNT_MALLOC);
    else pool_regains(device, round_up(size, UNIT_BYTES));
    return failed(error);
}
Error cudaMallocFromPoolAsync(void **address, size_t size, Handle pool, Handle stream) {
    return cudaMallocAsync(address, size, stream);
}
Error cudaFreeAsync(void *address, Handle stream) {
    order_freed_on(stream, address);
    Error error = memory_free(address);
    if (error == SUCCESS && address) count(COUNT_FREE);
    return failed(error);
}
Error cudaDeviceGetDefaultMemPool(Handle *pool, int device) {
    if (device < 0 || device >= gpu.num_devices) return failed(INVALID_DEVICE);
    *pool = (Handle)(uintptr_t)(1 + device);
    return SUCCESS;
}
Error cudaDeviceGetMemPool(Handle *pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
Error cudaDeviceSetMemPool(int device, Handle pool) { return SUCCESS; }
Error cudaMemPoolCreate(Handle *pool, const void *properties) {
    *pool = new_handle();
    return SUCCESS;
}
Error cudaMemPoolDestroy(Handle pool) { return SUCCESS; }
Error cudaMemPoolTrimTo(Handle pool, size_t keep) {
    pthread_mutex_lock(&pool_lock);
    shrink(device_of_pool(pool), keep);
    pthread_mutex_unlock(&pool_lock);
    return SUCCESS;
}
Error cudaMemPoolSetAccess(Handle pool, const void *list, size_t num) { return SUCCESS; }
Error cudaMemPoolGetAttribute(Handle handle, int attribute, void *value) {
    pthread_mutex_lock(&pool_lock);
    Pool pool = pools[device_of_pool(handle)];
    pthread_mutex_unlock(&pool_lock);
    switch (attribute) {
    case 1:
    case 2:
    case 3: *(int *)value = 1; break; // reuse policies
    case 4: *(uint64_t *)value = pool.threshold; break;
    case 5: *(uint64_t *)value = pool.reserved; break;
    case 6: *(uint64_t *)value = pool.reserved_high; break;
    case 7: *(uint64_t *)value = pool.used; break;
    case 8: *(uint64_t *)value = pool.used_high; break;
    default: return failed(INVALID_VALUE);
    }
    return SUCCESS;
}
Error cudaMemPoolSetAttribute(Handle handle, int attribute, const void *value) {
    pthread_mutex_lock(&pool_lock);
    Pool *pool = &pools[device_of_pool(handle)];
    if (attribute == 4) pool->threshold = *(const uint64_t *)value;
    if (attribute == 6) pool->reserved_high = pool->reserved;
    if (attribute == 8) pool->used_high = pool->used;
    pthread_mutex_unlock(&pool_lock);
    return SUCCESS;
}
