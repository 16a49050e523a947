// The CUDA driver's functions over the virtual GPU: devices, contexts, plain memory, modules and kernels.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <stdio.h>
#include <string.h>

typedef int Result;
typedef void *Handle;
typedef uintptr_t Address;

Result cuInit(unsigned flags) {
    MAY_FAIL(cuInit);
    devices_initialise();
    return gpu.num_devices ? SUCCESS : NO_DEVICE;
}
Result cuDriverGetVersion(int *version) {
    *version = gpu.cuda_version;
    return SUCCESS;
}
static const struct {
    Result error;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
static int error_row(Result error) {
    for (int i = 0; i < (int)(sizeof errors / sizeof *errors); i++)
        if (errors[i].error == error) return i;
    return -1;
}
Result cuGetErrorString(Result error, const char **text) {
    int row = error_row(error);
    *text = row < 0 ? NULL : errors[row].text;
    return row < 0 ? INVALID_VALUE : SUCCESS;
}
Result cuGetErrorName(Result error, const char **name) {
    int row = error_row(error);
    *name = row < 0 ? NULL : errors[row].name;
    return row < 0 ? INVALID_VALUE : SUCCESS;
}
Result cuDeviceGetCount(int *num) {
    devices_initialise();
    *num = gpu.num_devices;
    return SUCCESS;
}
Result cuDeviceGet(int *device, int ordinal) {
    devices_initialise();
    if (ordinal < 0 || ordinal >= gpu.num_devices) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
Result cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, (size_t)length, "%s", gpu.name);
    return SUCCESS;
}
Result cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = gpu.total_bytes;
    return SUCCESS;
}
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    return device_attribute(value, attribute, device);
}
Result cuDeviceGetUuid(char *uuid, int device) {
    memset(uuid, 0, 16);
    snprintf(uuid, 16, "stalloc-vgpu-%02d", device);
    return SUCCESS;
}
Result cuDeviceGetUuid_v2(char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }

Result cuDeviceCanAccessPeer(int *can, int device, int peer) {
    if (!fault_answers(fault_of("peers"), can)) *can = device != peer;
    return SUCCESS;
}

// A device's primary context is its number plus 0x1000: never null.
static Handle context_of(int device) { return (Handle)(uintptr_t)(0x1000 + device); }

Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = context_made(device);
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(Handle *context, int device) {
    *context = context_of(device);
    return context_make(device);
}
Result cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
Result cuDevicePrimaryCtxRelease(int device) { return cuDevicePrimaryCtxRelease_v2(device); }
Result cuCtxGetCurrent(Handle *context) {
    *context = context_made(current_device) ? context_of(current_device) : NULL;
    return SUCCESS;
}
Result cuCtxSetCurrent(Handle context) {
    uintptr_t device = (uintptr_t)context - 0x1000;
    if (!context) current_device = 0; // where a thread is that has none
    else if (device < (uintptr_t)gpu.num_devices) current_device = (int)device;
    return SUCCESS;
}
// What was current goes below a context that is pushed.
enum { MOST_PUSHED = 32 };
static __thread int below[MOST_PUSHED], num_pushed;
Result cuCtxPushCurrent_v2(Handle context) {
    if (num_pushed == MOST_PUSHED || !context) return INVALID_VALUE;
    below[num_pushed++] = current_device;
    return cuCtxSetCurrent(context);
}
Result cuCtxPopCurrent_v2(Handle *context) {
    if (num_pushed == 0) return 201; // no context is current
    if (context) *context = context_of(current_device);
    current_device = below[--num_pushed];
    return SUCCESS;
}
Result cuCtxGetDevice(int *device) {
    *device = current_device;
    return SUCCESS;
}
Result cuCtxCreate(Handle *context) {
    *context = context_of(current_device);
    return context_make(current_device);
}
Result cuCtxCreate_v2(Handle *context) { return cuCtxCreate(context); }
Result cuCtxDestroy_v2(Handle context) { return SUCCESS; }
Result cuCtxDestroy(Handle context) { return cuCtxDestroy_v2(context); }
Result cuCtxSynchronize(void) {
    MAY_FAIL(cuCtxSynchronize);
    count(COUNT_DEVICE_WAIT);
    if (order_forbids_on_device("cuCtxSynchronize")) return STREAM_CAPTURE_UNSUPPORTED;
    pools_wait();
    order_host_waits_for_device();
    return SUCCESS;
}
Result cuCtxGetLimit(size_t *value, int limit) {
    *value = (size_t)1 << 20;
    return SUCCESS;
}
Result cuCtxSetLimit(int limit, size_t value) { return SUCCESS; }
Result cuStreamGetCtx(Handle stream, Handle *context) { return cuCtxGetCurrent(context); }
Result cuEventRecord(Handle event, Handle stream) {
    MAY_FAIL(cuEventRecord);
    count(COUNT_RECORD);
    return event_record(event, stream);
}
Result cuEventQuery(Handle event) {
    MAY_FAIL(cuEventQuery);
    return order_forbids_on("cuEventQuery", event_capture(event)) ? STREAM_CAPTURE_UNSUPPORTED : event_query(event);
}
Result cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    MAY_FAIL(cuStreamWaitEvent);
    count(COUNT_WAIT);
    if (order_forbids_wait(stream, event_capture(event))) return STREAM_CAPTURE_ISOLATION;
    stream_wait(stream, event);
    return SUCCESS;
}
Result cuStreamIsCapturing(Handle stream, int *status) {
    MAY_FAIL(cuStreamIsCapturing);
    *status = capture_id(stream) != 0;
    return SUCCESS;
}
Result cuThreadExchangeStreamCaptureMode(int *mode) {
    *mode = order_exchange_mode(*mode);
    return SUCCESS;
}
Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    *function = find_function(name);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}

Result cuMemAlloc_v2(Address *address, size_t size) {
    if (order_forbids("cuMemAlloc")) return STREAM_CAPTURE_UNSUPPORTED;
    Result result = memory_allocate((void **)address, size, MEMORY_DEVICE, current_device, COUNTED_BY_DEVICE);
    if (result == SUCCESS) count(COUNT_MALLOC);
    return result;
}
Result cuMemFree_v2(Address address) {
    if (order_forbids_on_device("cuMemFree")) return STREAM_CAPTURE_UNSUPPORTED;
    order_host_waits_for_device();
    Result result = memory_free((void *)address);
    if (result == SUCCESS) count(COUNT_FREE);
    return result;
}
Result cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    if (order_forbids("cuMemHostAlloc")) return STREAM_CAPTURE_UNSUPPORTED;
    return pinned_allocate(address, size);
}
Result cuMemAllocHost_v2(void **address, size_t size) { return cuMemHostAlloc(address, size, 0); }
Result cuMemFreeHost(void *address) { return pinned_free(address); }
Result cuMemHostRegister_v2(void *address, size_t size, unsigned flags) { return pinned_register(address, size); }
Result cuMemHostUnregister(void *address) { return pinned_unregister(address); }
Result cuMemHostGetDevicePointer_v2(Address *device_address, void *address, unsigned flags) {
    *device_address = (Address)address;
    return SUCCESS;
}
Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    MAY_FAIL(cudaMemGetInfo);
    *total_bytes = gpu.total_bytes;
    *free_bytes = memory_free_bytes(current_device);
    return SUCCESS;
}
Result cuMemGetAddressRange_v2(Address *start, size_t *size, Address address) {
    Block block;
    if (!memory_find((void *)address, &block)) return INVALID_VALUE;
    if (start) *start = (Address)memory_start(&block);
    if (size) *size = block.size_bytes;
    return SUCCESS;
}
Result cuMemcpyHtoD_v2(Address to, const void *from, size_t size) {
    MAY_FAIL(cudaMemcpy);
    order_copy(NULL, (void *)to, from, size, true);
    memory_copy((void *)to, from, size);
    return SUCCESS;
}
Result cuMemcpyDtoH_v2(void *to, Address from, size_t size) {
    MAY_FAIL(cudaMemcpy);
    order_copy(NULL, to, (void *)from, size, true);
    memory_copy(to, (void *)from, size);
    return SUCCESS;
}
Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, Handle stream) {
    order_copy(stream, (void *)to, from, size, false);
    memory_copy((void *)to, from, size);
    return SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, Handle stream) {
    order_copy(stream, to, (void *)from, size, false);
    memory_copy(to, (void *)from, size);
    return SUCCESS;
}
Result cuMemsetD8Async(Address address, unsigned char value, size_t num, Handle stream) {
    order_access(stream, (void *)address, num, WRITES);
    memory_set((void *)address, value, num);
    return SUCCESS;
}
Result cuMemsetD8_v2(Address address, unsigned char value, size_t num) {
    return cuMemsetD8Async(address, value, num, NULL);
}
Result cuStreamWriteValue32_v2(Handle stream, Address address, uint32_t value, unsigned flags) {
    order_access(stream, (void *)address, sizeof value, WRITES);
    memory_copy((void *)address, &value, sizeof value);
    return SUCCESS;
}
Result cuStreamWriteValue32(Handle stream, Address address, uint32_t value, unsigned flags) { // PyTorch 2.6 looks for it
    return cuStreamWriteValue32_v2(stream, address, value, flags);
}
Result cuMemsetD32Async(Address address, unsigned value, size_t num, Handle stream) {
    order_access(stream, (void *)address, 4 * num, WRITES);
    if (value == 0) {
        memory_set((void *)address, 0, 4 * num);
    } else if (4 * num <= gpu.copy_limit_bytes) {
        for (size_t i = 0; i < num; i++) ((unsigned *)address)[i] = value;
    }
    return SUCCESS;
}
Result cuPointerGetAttribute(void *value, int attribute, Address address) {
    Block block;
    if (!memory_find((void *)address, &block)) return INVALID_VALUE;
    switch (attribute) {
    case 1: *(Handle *)value = context_of(block.device); break;
    case 2: *(unsigned *)value = block.kind == MEMORY_HOST ? 1 : 2; break;
    case 3: *(Address *)value = address; break;
    case 4: *(Address *)value = address; break;
    case 9: *(int *)value = block.device; break;
    case 12: *(size_t *)value = block.size_bytes; break;
    default: *(unsigned *)value = 0;
    }
    return SUCCESS;
}

Result cuModuleLoad(Handle *module, const char *path) {
    MAY_FAIL(cuModuleLoadData);
    *module = new_handle();
    return SUCCESS;
}
Result cuModuleLoadData(Handle *module, const void *image) {
    MAY_FAIL(cuModuleLoadData);
    *module = new_handle();
    kernels_loaded(*module, image);
    return SUCCESS;
}
Result cuModuleLoadDataEx(Handle *module, const void *image) { return cuModuleLoadData(module, image); }
Result cuModuleUnload(Handle module) { return SUCCESS; }
Result cuModuleGetFunction(Handle *function, Handle module, const char *name) {
    *function = new_handle();
    kernel_found(*function, module, name);
    return SUCCESS;
}
Result cuModuleGetGlobal_v2(Address *address, size_t *size, Handle module, const char *name) {
    if (address) *address = (Address)memory_scratch();
    if (size) *size = SLOT_BYTES;
    return SUCCESS;
}
Result cuModuleGetGlobal(Address *address, size_t *size, Handle module, const char *name) {
    return cuModuleGetGlobal_v2(address, size, module, name);
}
Result cuLibraryLoadData(Handle *library) {
    *library = new_handle();
    return SUCCESS;
}
Result cuLibraryGetKernel(Handle *kernel) {
    *kernel = new_handle();
    return SUCCESS;
}
Result cuLaunchKernel(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void **parameters) {
    MAY_FAIL(cuLaunchKernel);
    count(COUNT_LAUNCH);
    kernel_launched(function, stream, parameters);
    return SUCCESS;
}
Result cuLaunchKernelEx(void) {
    count(COUNT_LAUNCH);
    return SUCCESS;
}
Result cuLaunchCooperativeKernel(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                 unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream,
                                 void **parameters) {
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters);
}
Result cuFuncGetAttribute(int *value, int attribute, Handle function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; // threads in a block, registers
    return SUCCESS;
}
Result cuFuncSetAttribute(void) { return SUCCESS; }
Result cuFuncSetCacheConfig(void) { return SUCCESS; }
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *num) {
    *num = 2;
    return SUCCESS;
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *num) {
    *num = 2;
    return SUCCESS;
}
Result cuOccupancyMaxActiveClusters(int *num) {
    *num = 1;
    return SUCCESS;
}
Result cuOccupancyMaxPotentialBlockSize(int *grid, int *block) {
    *grid = 2 * gpu.num_multiprocessors;
    *block = 512;
    return SUCCESS;
}

static const char nothing[] = "stalloc virtual GPU: a program compiled to nothing";

Result cuLinkCreate_v2(unsigned num, void *options, void *values, Handle *state) {
    *state = new_handle();
    return SUCCESS;
}
Result cuLinkCreate(unsigned num, void *options, void *values, Handle *state) {
    return cuLinkCreate_v2(num, options, values, state);
}
Result cuLinkAddData_v2(void) { return SUCCESS; }
Result cuLinkAddData(void) { return SUCCESS; }
Result cuLinkAddFile_v2(void) { return SUCCESS; }
Result cuLinkAddFile(void) { return SUCCESS; }
Result cuLinkComplete(Handle state, const void **binary, size_t *size) {
    *binary = nothing;
    *size = sizeof nothing;
    return SUCCESS;
}
Result cuLinkDestroy(Handle state) { return SUCCESS; }
