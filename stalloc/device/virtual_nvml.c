// NVIDIA's management library over the virtual GPU, as far as programs ask it while they run: torch does so when
// memory is exhausted, monitors do for memory in use.  A real one would describe GPUs that the program does not use.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <stdio.h>

typedef int Result;
typedef void *Handle;
enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3 };

static Handle handle_of(int device) { return (Handle)(uintptr_t)(0x2000 + device); }
static int device_of(Handle handle) { return (int)((uintptr_t)handle - 0x2000); }

Result nvmlInit_v2(void) { return SUCCESS; }
Result nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
Result nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(Result error) {
    return error == SUCCESS ? "Success" : "Not Supported (by the virtual GPU)";
}
Result nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = gpu.cuda_version;
    return SUCCESS;
}
Result nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "virtual");
    return SUCCESS;
}
Result nvmlDeviceGetCount_v2(unsigned *num) {
    *num = (unsigned)gpu.num_machine_devices;
    return SUCCESS;
}
Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *device) {
    if ((int)index >= gpu.num_machine_devices) return NVML_INVALID_ARGUMENT;
    *device = handle_of((int)index);
    return SUCCESS;
}
Result nvmlDeviceGetHandleByPciBusId_v2(const char *text, Handle *device) {
    unsigned domain = 0, bus = 0;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 1 || (int)bus > gpu.num_machine_devices)
        return NVML_INVALID_ARGUMENT;
    *device = handle_of((int)bus - 1);
    return SUCCESS;
}
Result nvmlDeviceGetHandleByUUID(const char *uuid, Handle *device) {
    *device = handle_of(0);
    return SUCCESS;
}
Result nvmlDeviceGetName(Handle device, char *name, unsigned length) {
    snprintf(name, length, "%s", gpu.name);
    return SUCCESS;
}
Result nvmlDeviceGetUUID(Handle device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-stalloc-virtual-%02d", device_of(device));
    return SUCCESS;
}

typedef struct {
    unsigned long long total_bytes, free_bytes, used_bytes;
} Memory;

Result nvmlDeviceGetMemoryInfo(Handle device, Memory *memory) {
    memory->total_bytes = gpu.total_bytes;
    memory->used_bytes = memory_used_bytes(device_of_number(device_of(device)));
    memory->free_bytes = memory->total_bytes - memory->used_bytes;
    return SUCCESS;
}
Result nvmlDeviceGetComputeRunningProcesses(Handle device, unsigned *num, void *list) {
    *num = 0;
    return SUCCESS;
}
Result nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *num, void *list) {
    return nvmlDeviceGetComputeRunningProcesses(device, num, list);
}
Result nvmlDeviceGetP2PStatus(Handle a, Handle b, int which, int *status) {
    *status = 0;
    return SUCCESS;
}
Result nvmlDeviceGetGpuFabricInfoV(Handle device, void *info) { return NVML_NOT_SUPPORTED; }
Result nvmlDeviceGetNvLinkRemoteDeviceType(Handle device, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
Result nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle device, unsigned link, void *info) { return NVML_NOT_SUPPORTED; }
