// Data on the virtual GPU: copies are made up to a limit, and what kernels would have computed reads as zero.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

static bool is_device_memory(const void *address) {
    Block block;
    return memory_find(address, &block) && block.kind == MEMORY_DEVICE;
}

// Kernels write nothing, so device memory that a program reuses for a kernel's result still holds what was copied
// there before: a count or a loss read from it would be garbage.  A read therefore returns data only if exactly that
// piece was the last copy to that address, and zeros otherwise.  (With no copy limit, device memory is plain memory.)
enum { NUM_REMEMBERED = 1 << 14 };
static struct {
    uintptr_t address;
    size_t size_bytes;
} copied[NUM_REMEMBERED]; // by address; under copied_lock
static pthread_mutex_t copied_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(copied_lock)

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

// Whether that piece of device memory is what was last copied there; then it is written to `out`.
int stalloc_virtual_copied(const void *from, size_t size_bytes, void *out) {
    if (!was_copied(from, size_bytes)) return 0;
    memmove(out, from, size_bytes);
    return 1;
}

// A count that the libraries are about to read from the device, where kernels would have put it; -1 for none.
static __thread int64_t expected = -1;
static __thread bool has_checked;
void stalloc_virtual_expect(int64_t number) {
    expected = number;
    has_checked = false;
}

static bool answer_expected(void *to, size_t size_bytes) {
    if (expected < 0) return false;
    if (size_bytes == 1) { // the library checks its arguments: they are in order, and then nothing is wrong with them
        memset(to, !has_checked, 1);
        has_checked = true;
        return true;
    }
    if (size_bytes != 4 && size_bytes != 8) return false;
    memcpy(to, &expected, size_bytes); // the low half of a number is its first on the machines that CUDA supports
    return true;
}

static bool keeps_everything(void) { return gpu.copy_limit_bytes == SIZE_MAX; }

/* Zeros; whole pages are dropped instead of written: they read as zero again. */
static void zero_pages(char *start, size_t size_bytes) {
    char *end = start + size_bytes;
    char *first = (char *)round_up((size_t)start, PAGE_BYTES), *last = (char *)((size_t)end & ~(PAGE_BYTES - 1));
    if (first >= last) {
        memset(start, 0, size_bytes);
        return;
    }
    memset(start, 0, (size_t)(first - start));
    madvise(first, (size_t)(last - first), MADV_DONTNEED);
    memset(last, 0, (size_t)(end - last));
}

static bool is_pinned(const void *address) {
    Block block;
    return memory_find(address, &block) && block.kind == MEMORY_HOST;
}

void memory_copy(void *to, const void *from, size_t size_bytes) {
    count(COUNT_COPY);
    if (keeps_everything()) {
        memmove(to, from, size_bytes);
        return;
    }
    bool readable = !is_device_memory(from) || was_copied(from, size_bytes);
    if (!is_device_memory(to)) {
        if (is_device_memory(from) && answer_expected(to, size_bytes)) return; // whatever was there before
        if (readable) memmove(to, from, size_bytes);
        else if (is_pinned(to)) zero_pages(to, size_bytes); // pages that hold nothing stay untouched
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
        if (zero && is_pinned(target)) zero_pages(target, width);
        else if (zero) memset(target, 0, width);
        else memmove(target, (const char *)from + row * from_pitch, width);
    }
}

void memory_set(void *address, int byte, size_t size_bytes) {
    count(COUNT_MEMSET);
    bool written = size_bytes <= gpu.copy_limit_bytes;
    if (!keeps_everything()) remember_copy(address, written ? size_bytes : 0);
    if (written) {
        memset(address, byte, size_bytes);
    } else if (byte == 0) {
        zero_pages(address, size_bytes);
    } else {
        count(COUNT_COPY_SKIPPED);
    }
}
