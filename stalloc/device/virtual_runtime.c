// The CUDA runtime's functions over the virtual GPU: as many as PyTorch and CuPy call.
//
// Contract, also of virtual_runtime_*.c: each function fills what its caller reads, reports errors the way the runtime
// does (the code is returned and kept for cudaGetLastError), and has the argument list of CUDA 13; functions of CUDA 12
// that differ carry the suffix under which CUDA 12 exports them.  Functions that are missing are filled in by stubs at
// build time.  Here: errors, devices, and what is not possible between processes.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <stdio.h>
#include <string.h>

typedef int Error;
typedef void *Handle; // streams, events, graphs, pools, kernels, arrays

static __thread Error last_error;

Error failed(Error error) {
    if (error != SUCCESS && error != NOT_READY) last_error = error;
    return error;
}

Error cudaGetLastError(void) {
    Error error = context_lost() ? context_lost() : last_error;
    last_error = SUCCESS;
    return error;
}
Error cudaPeekAtLastError(void) { return context_lost() ? context_lost() : last_error; }

static const struct {
    Error error;
    const char *name, *text;
} error_texts[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported (by the virtual GPU)"},
    {STREAM_CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {STREAM_CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {STREAM_CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
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

// cudaDeviceProp of CUDA 13, by offset: 1008 bytes, of which a caller reads these.
static void put_int(char *at, size_t offset, int value) { memcpy(at + offset, &value, sizeof value); }
static void put_size(char *at, size_t offset, size_t value) { memcpy(at + offset, &value, sizeof value); }

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
    put_int(p, start, 1);              // concurrent kernels
    put_int(p, start + 8, 1 + device); // PCI bus
    put_int(p, start + 24, 3);         // copy engines
    put_int(p, start + 28, 1);         // unified addressing
}

Error cudaGetDeviceProperties(void *properties, int device) {
    devices_initialise();
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
    put_size(p, 696, (size_t)attribute_of(111, device));
    put_int(p, 720, 1); // memory pools
    put_int(p, 748, attribute_of(120, device));
    return SUCCESS;
}

// cudaDeviceProp of CUDA 12: 1032 bytes; the clock, overlap, timeout, mode and bandwidth fields are still there.
Error cudaGetDeviceProperties_v2(void *properties, int device) {
    devices_initialise();
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
    put_size(p, 720, (size_t)attribute_of(111, device));
    return SUCCESS;
}

Error cudaDeviceGetAttribute(int *value, int attribute, int device) {
    devices_initialise();
    return failed(device_attribute(value, attribute, device));
}
Error cudaGetDeviceCount(int *num) {
    RUNTIME_MAY_FAIL(cudaGetDeviceCount);
    devices_initialise();
    *num = gpu.num_devices;
    return failed(*num ? SUCCESS : NO_DEVICE);
}
Error cudaGetDevice(int *device) {
    *device = current_device;
    return SUCCESS;
}
Error cudaSetDevice(int device) {
    devices_initialise();
    if (device < 0 || device >= gpu.num_devices) return failed(INVALID_DEVICE);
    if (gpu.cuda_version >= 12000) {
        Error error = context_make(device);
        if (error != SUCCESS) return failed(error);
    }
    current_device = device;
    return SUCCESS;
}
Error cudaDeviceSynchronize(void) {
    NEEDS_CONTEXT();
    RUNTIME_MAY_FAIL(cudaDeviceSynchronize);
    count(COUNT_DEVICE_WAIT);
    if (order_forbids_on_device("cudaDeviceSynchronize")) return failed(STREAM_CAPTURE_UNSUPPORTED);
    pools_wait();
    order_host_waits_for_device();
    return SUCCESS;
}
Error cudaDeviceReset(void) { return SUCCESS; }
Error cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    if (!fault_answers(fault_of("peers"), can)) *can = device != peer;
    return SUCCESS;
}
Error cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return SUCCESS; }
Error cudaDeviceDisablePeerAccess(int peer) { return SUCCESS; }
Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}
Error cudaDeviceGetLimit(size_t *value, int limit) {
    *value = limit == 0 ? 1024 : (size_t)8 << 20;
    return SUCCESS;
}
Error cudaDeviceSetLimit(int limit, size_t value) { return SUCCESS; }
Error cudaDeviceGetPCIBusId(char *text, int length, int device) {
    if (device < 0 || device >= gpu.num_devices) return failed(INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02x:00.0", 1 + device);
    return SUCCESS;
}
Error cudaDeviceGetByPCIBusId(int *device, const char *text) {
    unsigned domain = 0, bus = 0;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 1 || (int)bus > gpu.num_devices)
        return failed(INVALID_DEVICE);
    *device = (int)bus - 1;
    return SUCCESS;
}
Error cudaDriverGetVersion(int *version) {
    *version = gpu.cuda_version;
    return SUCCESS;
}
Error cudaRuntimeGetVersion(int *version) {
    *version = gpu.cuda_version;
    return SUCCESS;
}
Error cudaProfilerStart(void) { return SUCCESS; }
Error cudaProfilerStop(void) { return SUCCESS; }

Error cudaIpcGetMemHandle(void *handle, void *address) {
    count(COUNT_SHARED_HANDLE);
    return failed(NOT_SUPPORTED);
}
Error cudaIpcOpenMemHandle(void **address) {
    *address = NULL;
    return failed(NOT_SUPPORTED);
}
Error cudaIpcCloseMemHandle(void *address) { return SUCCESS; }
Error cudaIpcGetEventHandle(void *handle, Handle event) { return failed(NOT_SUPPORTED); }
Error cudaIpcOpenEventHandle(Handle *event) {
    *event = NULL;
    return failed(NOT_SUPPORTED);
}

static Error succeed(void) { return SUCCESS; }

Error cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                       int *status) {
    *function = find_function(name);
    if (!*function) *function = (void *)&succeed;
    if (status) *status = 0;
    return SUCCESS;
}
Error cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
