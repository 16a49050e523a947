// Which binary of a kernel the device would run: the libraries say at start which architectures they were built for.
//
// Contract: `kernel_architecture` answers as cudaFuncGetAttributes does: of the binaries that a library registered, the
// largest architecture of the device's own generation that is not above the device's (a GPU 8.9 runs binaries for 8.6),
// else the largest that it can compile from PTX.  Where a library has neither, a real GPU refuses the kernel; here the
// smallest architecture that the library has is answered, so that the program's memory can be found all the same.
// CUB asks, and chooses its sizes and its kernels by the answer.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { WRAPPER_MAGIC = 0x466243b1, CONTAINER_MAGIC = (int)0xba55ed50, KIND_PTX = 1, KIND_BINARY = 2 };

typedef struct { // what nvcc leaves in the section .nvFatBinSegment
    int magic, version;
    const char *container;
    void *more;
} Wrapper;
typedef struct { // the head of a container; entries follow, each with a head of its own
    int magic;
    uint16_t version, head_bytes;
    uint64_t entries_bytes;
} ContainerHead;
typedef struct {
    uint16_t kind, version;
    uint32_t head_bytes;
    uint64_t content_bytes;
    uint32_t compressed_bytes, options;
    uint16_t minor, major; // of the PTX language
    uint32_t architecture; // 86 for 8.6
} EntryHead;
typedef struct {
    const Wrapper *wrapper;
    int architecture; // 0 until it was asked for
} Binary;
typedef struct {
    const void *function; // the address on the host by which programs name the kernel
    Binary *binary;
} Kernel;

static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(kernels_lock)
static Kernel *kernels; // a hash table, at most half full; under kernels_lock
static size_t num_kernels, kernels_capacity;

static Kernel *kernel_slot(Kernel *table, size_t capacity, const void *function) {
    size_t i = ((uintptr_t)function >> 4) * 0x9e3779b97f4a7c15u % capacity;
    while (table[i].function && table[i].function != function) i = (i + 1) % capacity;
    return &table[i];
}

static void remember_kernel(const void *function, Binary *binary) {
    pthread_mutex_lock(&kernels_lock);
    if (2 * num_kernels >= kernels_capacity) {
        size_t capacity = kernels_capacity ? 2 * kernels_capacity : 1 << 15;
        Kernel *larger = calloc(capacity, sizeof *larger);
        for (size_t i = 0; larger && i < kernels_capacity; i++)
            if (kernels[i].function) *kernel_slot(larger, capacity, kernels[i].function) = kernels[i];
        if (larger) {
            free(kernels);
            kernels = larger;
            kernels_capacity = capacity;
        }
    }
    if (2 * num_kernels < kernels_capacity) { // without memory for it, the device's own architecture is the answer
        Kernel *slot = kernel_slot(kernels, kernels_capacity, function);
        num_kernels += !slot->function;
        *slot = (Kernel){function, binary};
    }
    pthread_mutex_unlock(&kernels_lock);
}

void **__cudaRegisterFatBinary(void *wrapper) {
    Binary *binary = calloc(1, sizeof *binary);
    if (binary) binary->wrapper = wrapper;
    return (void **)binary;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {} // kernels may still be asked about
void __cudaRegisterFunction(void **handle, const void *function, char *name, const char *device_name, int thread_limit,
                            void *thread, void *block, void *block_size, void *grid_size, int *warp_size) {
    if (handle) remember_kernel(function, (Binary *)handle);
}
void __cudaRegisterVar(void) {}
void __cudaRegisterManagedVar(void) {}
char __cudaInitModule(void **handle) { return 1; }

static int device_architecture(void) { return 10 * gpu.major + gpu.minor; }

static int chosen_architecture(const Wrapper *wrapper) {
    if (!wrapper || wrapper->magic != WRAPPER_MAGIC) return device_architecture();
    ContainerHead head;
    memcpy(&head, wrapper->container, sizeof head);
    if (head.magic != CONTAINER_MAGIC) return device_architecture();
    const char *at = wrapper->container + head.head_bytes, *end = at + head.entries_bytes;
    int device = device_architecture(), binary = 0, ptx = 0, smallest = 0;
    while (at + sizeof(EntryHead) <= end) {
        EntryHead entry;
        memcpy(&entry, at, sizeof entry);
        int architecture = (int)entry.architecture;
        if (entry.kind == KIND_BINARY && architecture / 10 == gpu.major && architecture <= device &&
            architecture > binary)
            binary = architecture;
        if (entry.kind == KIND_PTX && architecture <= device && architecture > ptx) ptx = architecture;
        if (!smallest || architecture < smallest) smallest = architecture;
        at += entry.head_bytes + entry.content_bytes;
    }
    return binary ? binary : ptx ? ptx : smallest ? smallest : device;
}

int kernel_architecture(const void *function) {
    pthread_mutex_lock(&kernels_lock);
    const Kernel *kernel = kernels ? kernel_slot(kernels, kernels_capacity, function) : NULL;
    Binary *binary = kernel && kernel->function ? kernel->binary : NULL;
    if (binary && !binary->architecture) binary->architecture = chosen_architecture(binary->wrapper);
    int architecture = binary ? binary->architecture : device_architecture();
    pthread_mutex_unlock(&kernels_lock);
    return architecture;
}
