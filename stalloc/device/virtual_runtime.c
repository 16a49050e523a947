// The CUDA runtime's functions over the virtual GPU: as many as PyTorch and CuPy call.
//
// Contract: each function fills what its caller reads, reports errors the way the runtime does (the code is returned
// and kept for cudaGetLastError), and has the argument list of CUDA 13; functions of CUDA 12 that differ carry the
// suffix under which CUDA 12 exports them.  Functions that are missing here are filled in by stubs at build time.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Error;
typedef void *Handle; // streams, events, graphs, pools, kernels, arrays
typedef struct { unsigned x, y, z; } Dim3;
typedef struct { size_t width, height, depth; } Extent;
typedef struct { void *pointer; size_t pitch, width, height; } PitchedPointer;
typedef struct { size_t x, y, z; } Position;
typedef struct { int x, y, z, w, kind; } ChannelFormat;
typedef struct { int type, id; } Location;

static __thread Error last_error;

static Error failed(Error error) {
    if (error != SUCCESS && error != NOT_READY) last_error = error;
    return error;
}

// --- errors

Error cudaGetLastError(void) {
    Error error = last_error;
    last_error = SUCCESS;
    return error;
}
Error cudaPeekAtLastError(void) { return last_error; }

static const struct { Error error; const char *name, *text; } error_texts[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported (by the virtual GPU)"},
};
enum { NUM_ERROR_TEXTS = sizeof error_texts / sizeof *error_texts };

const char *cudaGetErrorName(Error error) {
    for (int i = 0; i < NUM_ERROR_TEXTS; i++)
        if (error_texts[i].error == error) return error_texts[i].name;
    return "cudaErrorUnknown";
}
const char *cudaGetErrorString(Error error) {
    for (int i = 0; i < NUM_ERROR_TEXTS; i++)
        if (error_texts[i].error == error) return error_texts[i].text;
    return "unknown error";
}
// Where a runtime function that is not here ends when it is called by a library that links the runtime statically.
Error stalloc_virtual_not_supported(void) { return failed(NOT_SUPPORTED); }

// --- devices

// cudaDeviceProp of CUDA 13, by offset: 1008 bytes, of which a caller reads these.
static void put_int(char *at, size_t offset, int value) { memcpy(at + offset, &value, sizeof value); }
static void put_size(char *at, size_t offset, size_t value) { memcpy(at + offset, &value, sizeof value); }
static int attribute_of(int attribute, int device) {
    int value = 0;
    device_attribute(&value, attribute, device);
    return value;
}

static void identify(char *p, int device) { // name, uuid: the same offsets in CUDA 12 and 13
    snprintf(p, 256, "%s", gpu.name);
    snprintf(p + 256, 16, "stalloc-vgpu-%02d", device);
    put_size(p, 288, gpu.total_bytes);
    put_size(p, 296, (size_t)attribute_of(8, device));
    put_int(p, 304, attribute_of(12, device));
    put_int(p, 308, 32);
    put_size(p, 312, 2147483647);
    put_int(p, 320, 1024);
    for (int i = 0; i < 3; i++) put_int(p, 324 + 4 * (size_t)i, attribute_of(2 + i, device));
    for (int i = 0; i < 3; i++) put_int(p, 336 + 4 * (size_t)i, attribute_of(5 + i, device));
}

// The tail of the structure, from concurrentKernels on, has one order in both versions but starts elsewhere.
static void describe(char *p, size_t start, int device) {
    put_int(p, start, 1);                          // concurrent kernels
    put_int(p, start + 8, 1 + device);             // PCI bus
    put_int(p, start + 24, 3);                     // copy engines
    put_int(p, start + 28, 1);                     // unified addressing
}

Error cudaGetDeviceProperties(void *properties, int device) {
    if (device < 0 || device >= gpu.num_devices) return failed(INVALID_DEVICE);
    char *p = memset(properties, 0, 1008);
    identify(p, device);
    put_size(p, 352, 65536); // constant memory
    put_int(p, 360, gpu.major);
    put_int(p, 364, gpu.minor);
    put_size(p, 368, 512); // texture alignment
    put_size(p, 376, 32);
    put_int(p, 384, gpu.num_multiprocessors);
    put_int(p, 392, 1); // can map host memory
    describe(p, 560, device);
    put_int(p, 592, attribute_of(37, device));
    put_int(p, 596, attribute_of(38, device));
    put_int(p, 604, attribute_of(39, device));
    for (size_t offset = 608; offset <= 616; offset += 4) put_int(p, offset, 1); // priorities, caches
    put_size(p, 624, (size_t)attribute_of(81, device));
    put_int(p, 632, attribute_of(82, device));
    put_int(p, 636, 1); // managed memory
    put_int(p, 656, 1); // concurrent managed access
    put_int(p, 668, 1); // cooperative launch
    put_size(p, 672, (size_t)attribute_of(97, device));
    put_int(p, 688, attribute_of(106, device));
    put_size(p, 696, 1024);
    put_int(p, 720, 1); // memory pools
    put_int(p, 748, attribute_of(120, device));
    return SUCCESS;
}

// cudaDeviceProp of CUDA 12: 1032 bytes; the clock, overlap, timeout, mode and bandwidth fields are still there.
Error cudaGetDeviceProperties_v2(void *properties, int device) {
    if (device < 0 || device >= gpu.num_devices) return failed(INVALID_DEVICE);
    char *p = memset(properties, 0, 1032);
    identify(p, device);
    put_int(p, 348, attribute_of(13, device));
    put_size(p, 352, 65536);
    put_int(p, 360, gpu.major);
    put_int(p, 364, gpu.minor);
    put_size(p, 368, 512);
    put_size(p, 376, 32);
    put_int(p, 384, 1); // overlap
    put_int(p, 388, gpu.num_multiprocessors);
    put_int(p, 400, 1); // can map host memory
    describe(p, 576, device);
    put_int(p, 608, attribute_of(36, device));
    put_int(p, 612, attribute_of(37, device));
    put_int(p, 616, attribute_of(38, device));
    put_int(p, 624, attribute_of(39, device));
    for (size_t offset = 628; offset <= 636; offset += 4) put_int(p, offset, 1);
    put_size(p, 640, (size_t)attribute_of(81, device));
    put_int(p, 648, attribute_of(82, device));
    put_int(p, 652, 1);
    put_int(p, 676, 1);
    put_int(p, 688, 1);
    put_size(p, 696, (size_t)attribute_of(97, device));
    put_int(p, 712, attribute_of(106, device));
    put_size(p, 720, 1024);
    return SUCCESS;
}

Error cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return failed(device_attribute(value, attribute, device));
}
Error cudaGetDeviceCount(int *num) { *num = gpu.num_devices; return SUCCESS; }
Error cudaGetDevice(int *device) { *device = current_device; return SUCCESS; }
Error cudaSetDevice(int device) {
    if (device < 0 || device >= gpu.num_devices) return failed(INVALID_DEVICE);
    current_device = device;
    return SUCCESS;
}
Error cudaDeviceSynchronize(void) { return SUCCESS; }
Error cudaDeviceReset(void) { return SUCCESS; }
Error cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return SUCCESS; }
Error cudaDeviceEnablePeerAccess(int peer, unsigned flags) { (void)peer; (void)flags; return SUCCESS; }
Error cudaDeviceDisablePeerAccess(int peer) { (void)peer; return SUCCESS; }
Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
Error cudaDeviceGetLimit(size_t *value, int limit) { *value = limit == 0 ? 1024 : (size_t)8 << 20; return SUCCESS; }
Error cudaDeviceSetLimit(int limit, size_t value) { (void)limit; (void)value; return SUCCESS; }
Error cudaDeviceGetPCIBusId(char *text, int length, int device) {
    if (device < 0 || device >= gpu.num_devices) return failed(INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02x:00.0", 1 + device);
    return SUCCESS;
}
Error cudaDeviceGetByPCIBusId(int *device, const char *text) {
    unsigned domain = 0, bus = 0;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 1 || (int)bus > gpu.num_devices) return failed(INVALID_DEVICE);
    *device = (int)bus - 1;
    return SUCCESS;
}
Error cudaDriverGetVersion(int *version) { *version = gpu.cuda_version; return SUCCESS; }
Error cudaRuntimeGetVersion(int *version) { *version = gpu.cuda_version; return SUCCESS; }
Error cudaProfilerStart(void) { return SUCCESS; }
Error cudaProfilerStop(void) { return SUCCESS; }

// --- memory

Error cudaMalloc(void **address, size_t size) {
    Error error = memory_allocate(address, size, MEMORY_DEVICE, current_device, true);
    if (error == SUCCESS) count(COUNT_MALLOC);
    return failed(error);
}
Error cudaFree(void *address) {
    Error error = memory_free(address);
    if (error == SUCCESS && address) count(COUNT_FREE);
    return failed(error);
}
Error cudaMallocManaged(void **address, size_t size, unsigned flags) {
    (void)flags;
    return failed(memory_allocate(address, size, MEMORY_MANAGED, current_device, false));
}
Error cudaMallocPitch(void **address, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) & ~(size_t)511;
    return cudaMalloc(address, *pitch * height);
}
Error cudaHostAlloc(void **address, size_t size, unsigned flags) {
    (void)flags;
    return failed(memory_allocate(address, size, MEMORY_HOST, current_device, false));
}
Error cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }
Error cudaFreeHost(void *address) { return failed(memory_free(address)); }
Error cudaHostGetDevicePointer(void **device_address, void *address, unsigned flags) {
    (void)flags;
    *device_address = address;
    return SUCCESS;
}
Error cudaHostRegister(void *address, size_t size, unsigned flags) { (void)address; (void)size; (void)flags; return SUCCESS; }
Error cudaHostUnregister(void *address) { (void)address; return SUCCESS; }
Error cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = gpu.total_bytes;
    *free_bytes = gpu.total_bytes - memory_used_bytes(current_device);
    return SUCCESS;
}

typedef struct { int type, device; void *device_address, *host_address; } PointerAttributes; // common head of 12 and 13

Error cudaPointerGetAttributes(PointerAttributes *attributes, const void *address) {
    Block block;
    if (!memory_find(address, &block)) {
        *attributes = (PointerAttributes){MEMORY_UNREGISTERED, 0, NULL, NULL};
    } else {
        bool on_host = block.kind != MEMORY_DEVICE;
        *attributes = (PointerAttributes){block.kind, block.device, (void *)address, on_host ? (void *)address : NULL};
    }
    return SUCCESS;
}

// --- copies

Error cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    (void)kind;
    memory_copy(to, from, size);
    return SUCCESS;
}
Error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Handle stream) {
    (void)stream;
    return cudaMemcpy(to, from, size, kind);
}
Error cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t size) {
    (void)to_device; (void)from_device;
    return cudaMemcpy(to, from, size, 4);
}
Error cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, Handle stream) {
    (void)stream;
    return cudaMemcpyPeer(to, to_device, from, from_device, size);
}
Error cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind) {
    (void)kind;
    memory_copy_rows(to, to_pitch, from, from_pitch, width, height);
    return SUCCESS;
}
Error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                        int kind, Handle stream) {
    (void)stream;
    return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}
Error cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) {
    (void)symbol; (void)from; (void)size; (void)offset; (void)kind; // only kernels could see it
    return SUCCESS;
}
Error cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t size, size_t offset, int kind, Handle stream) {
    (void)stream;
    return cudaMemcpyToSymbol(symbol, from, size, offset, kind);
}
Error cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, int kind) {
    (void)symbol; (void)offset; (void)kind;
    memset(to, 0, size);
    return SUCCESS;
}
Error cudaGetSymbolAddress(void **address, const void *symbol) {
    (void)symbol;
    *address = memory_scratch();
    return SUCCESS;
}
Error cudaGetSymbolSize(size_t *size, const void *symbol) { (void)symbol; *size = SLOT_BYTES; return SUCCESS; }
Error cudaMemset(void *address, int byte, size_t size) {
    memory_set(address, byte, size);
    return SUCCESS;
}
Error cudaMemsetAsync(void *address, int byte, size_t size, Handle stream) {
    (void)stream;
    return cudaMemset(address, byte, size);
}
Error cudaMemset2D(void *address, size_t pitch, int byte, size_t width, size_t height) {
    for (size_t row = 0; row < height; row++) memory_set((char *)address + row * pitch, byte, width);
    return SUCCESS;
}
Error cudaMemset2DAsync(void *address, size_t pitch, int byte, size_t width, size_t height, Handle stream) {
    (void)stream;
    return cudaMemset2D(address, pitch, byte, width, height);
}

// Arrays (textures) are linear memory with a note of their shape; only copies and frees look at them.
typedef struct { void *data; size_t row_bytes, height, depth; } Array;

Error cudaMalloc3DArray(Handle *made, const ChannelFormat *format, Extent extent, unsigned flags) {
    (void)flags;
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
Error cudaMemcpy2DToArray(Handle to, size_t x, size_t y, const void *from, size_t pitch, size_t width, size_t height, int kind) {
    Array *array = to;
    return cudaMemcpy2D((char *)array->data + y * array->row_bytes + x, array->row_bytes, from, pitch, width, height, kind);
}
Error cudaMemcpy2DToArrayAsync(Handle to, size_t x, size_t y, const void *from, size_t pitch, size_t width, size_t height,
                               int kind, Handle stream) {
    (void)stream;
    return cudaMemcpy2DToArray(to, x, y, from, pitch, width, height, kind);
}
Error cudaMemcpy2DFromArray(void *to, size_t pitch, Handle from, size_t x, size_t y, size_t width, size_t height, int kind) {
    Array *array = from;
    return cudaMemcpy2D(to, pitch, (char *)array->data + y * array->row_bytes + x, array->row_bytes, width, height, kind);
}
Error cudaMemcpy2DFromArrayAsync(void *to, size_t pitch, Handle from, size_t x, size_t y, size_t width, size_t height,
                                 int kind, Handle stream) {
    (void)stream;
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
Error cudaMemcpy3DAsync(const Copy3D *c, Handle stream) { (void)stream; return cudaMemcpy3D(c); }
Error cudaCreateTextureObject(unsigned long long *made, const void *resource, const void *texture, const void *view) {
    (void)resource; (void)texture; (void)view;
    *made = (unsigned long long)(uintptr_t)new_handle();
    return SUCCESS;
}
Error cudaCreateSurfaceObject(unsigned long long *made, const void *resource) {
    return cudaCreateTextureObject(made, resource, NULL, NULL);
}
Error cudaDestroyTextureObject(unsigned long long object) { (void)object; return SUCCESS; }
Error cudaDestroySurfaceObject(unsigned long long object) { (void)object; return SUCCESS; }
Error cudaMemAdvise(void) { return SUCCESS; }
Error cudaMemPrefetchAsync(void) { return SUCCESS; }

// --- stream-ordered pools: one account a device; nothing is cached, so reserved equals used

static atomic_size_t pool_used[MAX_DEVICES], pool_high[MAX_DEVICES];
static atomic_size_t pool_threshold[MAX_DEVICES];

static int device_of_pool(Handle pool) {
    uintptr_t index = (uintptr_t)pool - 1;
    return index < MAX_DEVICES ? (int)index : current_device;
}

Error cudaMallocAsync(void **address, size_t size, Handle stream) {
    (void)stream;
    Error error = cudaMalloc(address, size);
    if (error == SUCCESS) {
        size_t now = atomic_fetch_add(&pool_used[current_device], size) + size, high = pool_high[current_device];
        while (now > high && !atomic_compare_exchange_weak(&pool_high[current_device], &high, now)) {}
    }
    return error;
}
Error cudaMallocFromPoolAsync(void **address, size_t size, Handle pool, Handle stream) {
    (void)pool;
    return cudaMallocAsync(address, size, stream);
}
Error cudaFreeAsync(void *address, Handle stream) {
    (void)stream;
    Block block;
    if (address && memory_find(address, &block)) atomic_fetch_sub(&pool_used[block.device], block.size_bytes);
    return cudaFree(address);
}
Error cudaDeviceGetDefaultMemPool(Handle *pool, int device) {
    if (device < 0 || device >= gpu.num_devices) return failed(INVALID_DEVICE);
    *pool = (Handle)(uintptr_t)(1 + device);
    return SUCCESS;
}
Error cudaDeviceGetMemPool(Handle *pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
Error cudaDeviceSetMemPool(int device, Handle pool) { (void)device; (void)pool; return SUCCESS; }
Error cudaMemPoolCreate(Handle *pool, const void *properties) { (void)properties; *pool = new_handle(); return SUCCESS; }
Error cudaMemPoolDestroy(Handle pool) { (void)pool; return SUCCESS; }
Error cudaMemPoolTrimTo(Handle pool, size_t keep) { (void)pool; (void)keep; return SUCCESS; }
Error cudaMemPoolSetAccess(Handle pool, const void *list, size_t num) { (void)pool; (void)list; (void)num; return SUCCESS; }
Error cudaMemPoolGetAttribute(Handle pool, int attribute, void *value) {
    int device = device_of_pool(pool);
    switch (attribute) {
    case 1: case 2: case 3: *(int *)value = 1; break; // reuse policies
    case 4: *(uint64_t *)value = pool_threshold[device]; break;
    case 5: case 7: *(uint64_t *)value = pool_used[device]; break;
    case 6: case 8: *(uint64_t *)value = pool_high[device]; break;
    default: return failed(INVALID_VALUE);
    }
    return SUCCESS;
}
Error cudaMemPoolSetAttribute(Handle pool, int attribute, const void *value) {
    int device = device_of_pool(pool);
    if (attribute == 4) pool_threshold[device] = *(const uint64_t *)value;
    if (attribute == 6 || attribute == 8) pool_high[device] = pool_used[device];
    return SUCCESS;
}

// --- streams and events: everything has happened by the time it is asked for

Error cudaStreamCreate(Handle *stream) { *stream = new_handle(); return SUCCESS; }
Error cudaStreamCreateWithFlags(Handle *stream, unsigned flags) { (void)flags; return cudaStreamCreate(stream); }
Error cudaStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) {
    (void)flags; (void)priority;
    return cudaStreamCreate(stream);
}
Error cudaStreamDestroy(Handle stream) { (void)stream; return SUCCESS; }
Error cudaStreamSynchronize(Handle stream) { (void)stream; return SUCCESS; }
Error cudaStreamQuery(Handle stream) { (void)stream; return SUCCESS; }
Error cudaStreamGetPriority(Handle stream, int *priority) { (void)stream; *priority = 0; return SUCCESS; }
Error cudaStreamGetFlags(Handle stream, unsigned *flags) { (void)stream; *flags = 0; return SUCCESS; }
Error cudaStreamGetId(Handle stream, unsigned long long *id) { *id = (unsigned long long)(uintptr_t)stream; return SUCCESS; }
Error cudaStreamGetDevice(Handle stream, int *device) { (void)stream; *device = current_device; return SUCCESS; }
Error cudaStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    (void)flags;
    stream_wait(stream, event);
    return SUCCESS;
}
Error cudaStreamAddCallback(Handle stream, void (*callback)(Handle, Error, void *), void *data, unsigned flags) {
    (void)flags;
    callback(stream, SUCCESS, data);
    return SUCCESS;
}
Error cudaLaunchHostFunc(Handle stream, void (*function)(void *), void *data) {
    (void)stream;
    function(data);
    return SUCCESS;
}
Error cudaEventCreate(Handle *event) { *event = event_create(); return failed(*event ? SUCCESS : OUT_OF_MEMORY); }
Error cudaEventCreateWithFlags(Handle *event, unsigned flags) { (void)flags; return cudaEventCreate(event); }
Error cudaEventDestroy(Handle event) { event_destroy(event); return SUCCESS; }
Error cudaEventRecord(Handle event, Handle stream) { return failed(event_record(event, stream)); }
Error cudaEventRecordWithFlags(Handle event, Handle stream, unsigned flags) { (void)flags; return cudaEventRecord(event, stream); }
Error cudaEventQuery(Handle event) { (void)event; return SUCCESS; }
Error cudaEventSynchronize(Handle event) { (void)event; return SUCCESS; }
Error cudaEventElapsedTime(float *ms, Handle start, Handle end) { return failed(event_elapsed_ms(ms, start, end)); }
Error cudaEventElapsedTime_v2(float *ms, Handle start, Handle end) { return cudaEventElapsedTime(ms, start, end); }

// --- capture and graphs: what a capture allocates is real, what it launches is nothing

Error cudaStreamBeginCapture(Handle stream, int mode) { (void)mode; return failed(capture_begin(stream)); }
Error cudaStreamEndCapture(Handle stream, Handle *graph) {
    *graph = new_handle();
    return failed(capture_end(stream));
}
Error cudaStreamIsCapturing(Handle stream, int *status) { *status = capture_id(stream) != 0; return SUCCESS; }
Error cudaStreamGetCaptureInfo(Handle stream, int *status, unsigned long long *id, Handle *graph, const void **dependencies,
                               const void **edges, size_t *num_dependencies) {
    uint64_t capture = capture_id(stream);
    *status = capture != 0;
    if (id) *id = capture;
    if (graph) *graph = (Handle)(uintptr_t)capture;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (num_dependencies) *num_dependencies = 0;
    return SUCCESS;
}
Error cudaStreamGetCaptureInfo_v3(Handle stream, int *status, unsigned long long *id, Handle *graph,
                                  const void **dependencies, const void **edges, size_t *num_dependencies) {
    return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, edges, num_dependencies);
}
Error cudaStreamGetCaptureInfo_v2(Handle stream, int *status, unsigned long long *id, Handle *graph,
                                  const void **dependencies, size_t *num_dependencies) {
    return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, NULL, num_dependencies);
}
Error cudaThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return SUCCESS; }
Error cudaGraphCreate(Handle *graph, unsigned flags) { (void)flags; *graph = new_handle(); return SUCCESS; }
Error cudaGraphInstantiate(Handle *executable, Handle graph, unsigned long long flags) {
    (void)graph; (void)flags;
    *executable = new_handle();
    return SUCCESS;
}
Error cudaGraphInstantiateWithFlags(Handle *executable, Handle graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}
Error cudaGraphLaunch(Handle executable, Handle stream) { (void)executable; (void)stream; count(COUNT_LAUNCH); return SUCCESS; }
Error cudaGraphUpload(Handle executable, Handle stream) { (void)executable; (void)stream; return SUCCESS; }
Error cudaGraphDestroy(Handle graph) { (void)graph; return SUCCESS; }
Error cudaGraphExecDestroy(Handle executable) { (void)executable; return SUCCESS; }
Error cudaGraphDebugDotPrint(Handle graph, const char *path, unsigned flags) { (void)graph; (void)path; (void)flags; return SUCCESS; }
Error cudaGraphGetNodes(Handle graph, Handle *nodes, size_t *num) {
    (void)graph;
    if (nodes && *num) nodes[0] = NULL;
    *num = 1; // not empty: torch warns about an empty graph
    return SUCCESS;
}
Error cudaGraphNodeGetDependencies(Handle node, Handle *dependencies, void *edges, size_t *num) {
    (void)node; (void)dependencies; (void)edges;
    *num = 0;
    return SUCCESS;
}

// --- kernels

static __thread struct { Dim3 grid, block; size_t shared_bytes; Handle stream; } call_configuration;

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared_bytes, Handle stream) {
    call_configuration.grid = grid;
    call_configuration.block = block;
    call_configuration.shared_bytes = shared_bytes;
    call_configuration.stream = stream;
    return 0;
}
Error __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared_bytes, Handle *stream) {
    *grid = call_configuration.grid;
    *block = call_configuration.block;
    *shared_bytes = call_configuration.shared_bytes;
    *stream = call_configuration.stream;
    return SUCCESS;
}
void **__cudaRegisterFatBinary(void *binary) { (void)binary; static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
void __cudaRegisterManagedVar(void) {}
char __cudaInitModule(void **handle) { (void)handle; return 1; }
Error __cudaGetKernel(Handle *kernel, const void *function) { *kernel = (Handle)function; return SUCCESS; }
Error cudaGetKernel(Handle *kernel, const void *function) { return __cudaGetKernel(kernel, function); }
Error cudaGetFuncBySymbol(Handle *made, const void *function) { return __cudaGetKernel(made, function); }
Error __cudaLaunchKernel(void) { count(COUNT_LAUNCH); return SUCCESS; }
Error cudaLaunchKernel(void) { count(COUNT_LAUNCH); return SUCCESS; }
Error cudaLaunchKernelExC(void) { count(COUNT_LAUNCH); return SUCCESS; }
Error cudaLaunchCooperativeKernel(void) { count(COUNT_LAUNCH); return SUCCESS; }
Error cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function; (void)attribute; (void)value;
    return SUCCESS;
}
Error cudaFuncSetCacheConfig(const void *function, int configuration) { (void)function; (void)configuration; return SUCCESS; }

typedef struct {
    size_t shared_bytes, constant_bytes, local_bytes;
    int max_threads, num_registers, ptx_version, binary_version, cache_mode, max_dynamic_shared_bytes, carveout;
    int cluster_must_be_set, cluster_width, cluster_height, cluster_depth, cluster_policy, non_portable_cluster;
} FunctionAttributes;

Error cudaFuncGetAttributes(FunctionAttributes *attributes, const void *function) {
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->max_threads = 1024;
    attributes->num_registers = 32;
    attributes->ptx_version = attributes->binary_version = 10 * gpu.major + gpu.minor;
    attributes->max_dynamic_shared_bytes = attribute_of(97, current_device);
    return SUCCESS;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *num, const void *function, int block, size_t shared_bytes,
                                                             unsigned flags) {
    (void)function; (void)block; (void)shared_bytes; (void)flags;
    *num = 2;
    return SUCCESS;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *num, const void *function, int block, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num, function, block, shared_bytes, 0);
}
Error cudaOccupancyMaxActiveClusters(int *num, const void *function, const void *launch) {
    (void)function; (void)launch;
    *num = 1;
    return SUCCESS;
}
Error cudaOccupancyMaxPotentialClusterSize(int *size, const void *function, const void *launch) {
    return cudaOccupancyMaxActiveClusters(size, function, launch);
}
Error cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *function, int num_blocks, int block) {
    (void)function; (void)num_blocks; (void)block;
    *bytes = 49152;
    return SUCCESS;
}

// --- not between processes

Error cudaIpcGetMemHandle(void *handle, void *address) { (void)handle; (void)address; return failed(NOT_SUPPORTED); }
Error cudaIpcOpenMemHandle(void **address) { *address = NULL; return failed(NOT_SUPPORTED); }
Error cudaIpcCloseMemHandle(void *address) { (void)address; return SUCCESS; }
Error cudaIpcGetEventHandle(void *handle, Handle event) { (void)handle; (void)event; return failed(NOT_SUPPORTED); }
Error cudaIpcOpenEventHandle(Handle *event) { *event = NULL; return failed(NOT_SUPPORTED); }

// --- the driver, asked for by name

static Error succeed(void) { return SUCCESS; }

Error cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
    (void)version; (void)flags;
    *function = find_function(name);
    if (!*function) *function = (void *)&succeed;
    if (status) *status = 0;
    return SUCCESS;
}
Error cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
