// The CUDA runtime's functions for memory, copies and arrays (textures).
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <stdlib.h>
#include <string.h>

typedef int Error;
typedef void *Handle; // streams, events, graphs, pools, kernels, arrays
typedef struct {
    size_t width, height, depth;
} Extent;
typedef struct {
    void *pointer;
    size_t pitch, width, height;
} PitchedPointer;
typedef struct {
    size_t x, y, z;
} Position;
typedef struct {
    int x, y, z, w, kind;
} ChannelFormat;

Error cudaMalloc(void **address, size_t size) {
    NEEDS_CONTEXT();
    RUNTIME_MAY_FAIL(cudaMalloc);
    if (order_forbids("cudaMalloc")) return failed(STREAM_CAPTURE_UNSUPPORTED);
    Error error = memory_allocate(address, size, MEMORY_DEVICE, current_device, COUNTED_BY_DEVICE);
    if (error == SUCCESS) count(COUNT_MALLOC);
    return failed(error);
}
Error cudaFree(void *address) {
    NEEDS_CONTEXT();
    if (address && order_forbids_on_device("cudaFree")) return failed(STREAM_CAPTURE_UNSUPPORTED);
    if (address) order_host_waits_for_device();
    Error error = memory_free(address);
    if (error == SUCCESS && address) count(COUNT_FREE);
    return failed(error);
}
Error cudaMallocManaged(void **address, size_t size, unsigned flags) {
    NEEDS_CONTEXT();
    return failed(memory_allocate(address, size, MEMORY_MANAGED, current_device, COUNTED_NOWHERE));
}
Error cudaMallocPitch(void **address, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) & ~(size_t)511;
    return cudaMalloc(address, *pitch * height);
}
Error cudaHostAlloc(void **address, size_t size, unsigned flags) {
    NEEDS_CONTEXT();
    RUNTIME_MAY_FAIL(cudaHostAlloc);
    if (order_forbids("cudaHostAlloc")) return failed(STREAM_CAPTURE_UNSUPPORTED);
    return failed(pinned_allocate(address, size));
}
Error cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }
Error cudaFreeHost(void *address) { return failed(pinned_free(address)); }
Error cudaHostGetDevicePointer(void **device_address, void *address, unsigned flags) {
    *device_address = address;
    return SUCCESS;
}
Error cudaHostRegister(void *address, size_t size, unsigned flags) {
    NEEDS_CONTEXT();
    return failed(pinned_register(address, size));
}
Error cudaHostUnregister(void *address) { return failed(pinned_unregister(address)); }
Error cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    NEEDS_CONTEXT();
    RUNTIME_MAY_FAIL(cudaMemGetInfo);
    *total_bytes = gpu.total_bytes;
    *free_bytes = memory_free_bytes(current_device);
    return SUCCESS;
}

typedef struct {
    int type, device;
    void *device_address, *host_address;
} PointerAttributes; // common head of 12 and 13

Error cudaPointerGetAttributes(PointerAttributes *attributes, const void *address) {
    NEEDS_CONTEXT();
    Block block;
    if (!memory_find(address, &block)) {
        bool registered = pinned_is_registered(address);
        void *there = registered ? (void *)address : NULL;
        *attributes = (PointerAttributes){registered ? MEMORY_HOST : MEMORY_UNREGISTERED, 0, there, there};
    } else {
        bool on_host = block.kind != MEMORY_DEVICE;
        *attributes = (PointerAttributes){block.kind, block.device, (void *)address, on_host ? (void *)address : NULL};
    }
    return SUCCESS;
}

Error cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    NEEDS_CONTEXT();
    RUNTIME_MAY_FAIL(cudaMemcpy);
    if (order_forbids("cudaMemcpy")) return failed(STREAM_CAPTURE_UNSUPPORTED);
    order_copy(NULL, to, from, size, kind != 3); // a copy on the device is not waited for
    memory_copy(to, from, size);
    return SUCCESS;
}
Error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Handle stream) {
    RUNTIME_MAY_FAIL(cudaMemcpyAsync);
    order_copy(stream, to, from, size, false);
    memory_copy(to, from, size);
    return SUCCESS;
}
Error cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t size) {
    return cudaMemcpy(to, from, size, 4);
}
Error cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, Handle stream) {
    return cudaMemcpyAsync(to, from, size, 4, stream);
}
Error cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                   int kind) {
    if (order_forbids("cudaMemcpy2D")) return failed(STREAM_CAPTURE_UNSUPPORTED);
    order_copy_rows(NULL, to, to_pitch, from, from_pitch, width, height, kind != 3);
    memory_copy_rows(to, to_pitch, from, from_pitch, width, height);
    return SUCCESS;
}
Error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                        int kind, Handle stream) {
    order_copy_rows(stream, to, to_pitch, from, from_pitch, width, height, false);
    memory_copy_rows(to, to_pitch, from, from_pitch, width, height);
    return SUCCESS;
}
Error cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) { return SUCCESS; }
Error cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t size, size_t offset, int kind,
                              Handle stream) {
    return cudaMemcpyToSymbol(symbol, from, size, offset, kind);
}
Error cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, int kind) {
    memset(to, 0, size);
    return SUCCESS;
}
Error cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = memory_scratch();
    return SUCCESS;
}
Error cudaGetSymbolSize(size_t *size, const void *symbol) {
    *size = SLOT_BYTES;
    return SUCCESS;
}
Error cudaMemsetAsync(void *address, int byte, size_t size, Handle stream) {
    NEEDS_CONTEXT();
    order_access(stream, address, size, WRITES);
    memory_set(address, byte, size);
    return SUCCESS;
}
Error cudaMemset(void *address, int byte, size_t size) { return cudaMemsetAsync(address, byte, size, NULL); }
Error cudaMemset2DAsync(void *address, size_t pitch, int byte, size_t width, size_t height, Handle stream) {
    for (size_t row = 0; row < height; row++) cudaMemsetAsync((char *)address + row * pitch, byte, width, stream);
    return SUCCESS;
}
Error cudaMemset2D(void *address, size_t pitch, int byte, size_t width, size_t height) {
    return cudaMemset2DAsync(address, pitch, byte, width, height, NULL);
}

// Arrays (textures) are linear memory with a note of their shape; only copies and frees look at them.
typedef struct {
    void *data;
    size_t row_bytes, height, depth;
} Array;

Error cudaMalloc3DArray(Handle *made, const ChannelFormat *format, Extent extent, unsigned flags) {
    size_t texel = (size_t)(format->x + format->y + format->z + format->w) / 8;
    Array *array = calloc(1, sizeof *array);
    *made = array;
    if (!array) return failed(OUT_OF_MEMORY);
    *array = (Array){NULL, texel * extent.width, extent.height ? extent.height : 1, extent.depth ? extent.depth : 1};
    Error error = cudaMalloc(&array->data, array->row_bytes * array->height * array->depth);
    if (error != SUCCESS) {
        free(array);
        *made = NULL;
    }
    return error;
}
Error cudaMallocArray(Handle *made, const ChannelFormat *format, size_t width, size_t height, unsigned flags) {
    return cudaMalloc3DArray(made, format, (Extent){width, height, 0}, flags);
}
Error cudaFreeArray(Handle handle) {
    Array *array = handle;
    Error error = array ? cudaFree(array->data) : SUCCESS;
    free(array);
    return error;
}
Error cudaMemcpy2DToArray(Handle to, size_t x, size_t y, const void *from, size_t pitch, size_t width, size_t height,
                          int kind) {
    Array *array = to;
    return cudaMemcpy2D((char *)array->data + y * array->row_bytes + x, array->row_bytes, from, pitch, width, height,
                        kind);
}
Error cudaMemcpy2DToArrayAsync(Handle to, size_t x, size_t y, const void *from, size_t pitch, size_t width,
                               size_t height, int kind, Handle stream) {
    return cudaMemcpy2DToArray(to, x, y, from, pitch, width, height, kind);
}
Error cudaMemcpy2DFromArray(void *to, size_t pitch, Handle from, size_t x, size_t y, size_t width, size_t height,
                            int kind) {
    Array *array = from;
    return cudaMemcpy2D(to, pitch, (char *)array->data + y * array->row_bytes + x, array->row_bytes, width, height,
                        kind);
}
Error cudaMemcpy2DFromArrayAsync(void *to, size_t pitch, Handle from, size_t x, size_t y, size_t width, size_t height,
                                 int kind, Handle stream) {
    return cudaMemcpy2DFromArray(to, pitch, from, x, y, width, height, kind);
}

typedef struct {
    Array *from_array;
    Position from_position;
    PitchedPointer from;
    Array *to_array;
    Position to_position;
    PitchedPointer to;
    Extent extent;
    int kind;
} Copy3D;

Error cudaMemcpy3D(const Copy3D *c) {
    for (size_t z = 0; z < c->extent.depth; z++) {
        size_t from_pitch = c->from_array ? c->from_array->row_bytes : c->from.pitch;
        size_t to_pitch = c->to_array ? c->to_array->row_bytes : c->to.pitch;
        size_t from_rows = c->from_array ? c->from_array->height : c->from.height;
        size_t to_rows = c->to_array ? c->to_array->height : c->to.height;
        const char *from = c->from_array ? c->from_array->data : c->from.pointer;
        char *to = c->to_array ? c->to_array->data : c->to.pointer;
        size_t width = c->extent.width; // bytes, or texels where an array takes part: never more than a row holds
        if (c->to_array || c->from_array) width = c->to_array ? to_pitch : from_pitch;
        if (from_pitch && width > from_pitch) width = from_pitch;
        memory_copy_rows(to + z * to_rows * to_pitch, to_pitch, from + z * from_rows * from_pitch, from_pitch, width,
                         c->extent.height);
    }
    return SUCCESS;
}
Error cudaMemcpy3DAsync(const Copy3D *c, Handle stream) { return cudaMemcpy3D(c); }
Error cudaCreateTextureObject(unsigned long long *made, const void *resource, const void *texture, const void *view) {
    *made = (unsigned long long)(uintptr_t)new_handle();
    return SUCCESS;
}
Error cudaCreateSurfaceObject(unsigned long long *made, const void *resource) {
    return cudaCreateTextureObject(made, resource, NULL, NULL);
}
Error cudaDestroyTextureObject(unsigned long long object) { return SUCCESS; }
Error cudaDestroySurfaceObject(unsigned long long object) { return SUCCESS; }
Error cudaMemAdvise(void) { return SUCCESS; }
Error cudaMemPrefetchAsync(void) { return SUCCESS; }
