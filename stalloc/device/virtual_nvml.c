// NVIDIA's management library over the virtual GPU, as far as programs ask it while they run: torch does so when
// memory is exhausted, monitors do for memory in use, inference engines before they touch a GPU for its name, its
// compute capability and its memory.  A real one would describe GPUs that the program does not use.  What is not known
// of a GPU that is not there (temperature, power, clocks, what it is connected to) is not supported, and nothing else.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <stdio.h>

typedef int Result;
typedef void *Handle;
enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3 };

#define UUID "GPU-stalloc-virtual-"

static Handle handle_of(int device) { return (Handle)(uintptr_t)(0x2000 + device); }
static int device_of(Handle handle) { return (int)((uintptr_t)handle - 0x2000); }

Result nvmlInit(void) { return SUCCESS; } // torch.cuda.device_count() asks so, and must: the runtime poisons forks
Result nvmlInit_v2(void) { return SUCCESS; }
Result nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
Result nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(Result error) {
    if (error == NVML_INVALID_ARGUMENT) return "Invalid Argument";
    return error == SUCCESS ? "Success" : "Not Supported (by the virtual GPU)";
}
Result nvmlSystemGetNVMLVersion(char *text, unsigned length) {
    snprintf(text, length, "virtual");
    return SUCCESS;
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
Result nvmlDeviceGetCount(unsigned *num) { return nvmlDeviceGetCount_v2(num); }
Result nvmlDeviceGetHandleByIndex(unsigned index, Handle *device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
Result nvmlDeviceGetHandleByPciBusId_v2(const char *text, Handle *device) {
    unsigned domain = 0, bus = 0;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 1 || (int)bus > gpu.num_machine_devices)
        return NVML_INVALID_ARGUMENT;
    *device = handle_of((int)bus - 1);
    return SUCCESS;
}
Result nvmlDeviceGetHandleByUUID(const char *uuid, Handle *device) {
    int number = -1;
    if (sscanf(uuid, UUID "%d", &number) != 1 || number < 0 || number >= gpu.num_machine_devices)
        return NVML_INVALID_ARGUMENT;
    *device = handle_of(number);
    return SUCCESS;
}
Result nvmlDeviceGetIndex(Handle device, unsigned *index) {
    *index = (unsigned)device_of(device);
    return SUCCESS;
}
Result nvmlDeviceGetMinorNumber(Handle device, unsigned *number) { return nvmlDeviceGetIndex(device, number); }
Result nvmlDeviceGetName(Handle device, char *name, unsigned length) {
    snprintf(name, length, "%s", gpu.name);
    return SUCCESS;
}
Result nvmlDeviceGetUUID(Handle device, char *uuid, unsigned length) {
    snprintf(uuid, length, UUID "%02d", device_of(device));
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

typedef struct {
    unsigned version;
    unsigned long long total_bytes, reserved_bytes, free_bytes, used_bytes;
} MemoryWithReserved;

Result nvmlDeviceGetMemoryInfo_v2(Handle device, MemoryWithReserved *memory) {
    Memory all;
    nvmlDeviceGetMemoryInfo(device, &all);
    memory->total_bytes = all.total_bytes, memory->free_bytes = all.free_bytes, memory->used_bytes = all.used_bytes;
    memory->reserved_bytes = 0;
    return SUCCESS;
}
Result nvmlDeviceGetCudaComputeCapability(Handle device, int *major, int *minor) {
    *major = gpu.major, *minor = gpu.minor;
    return SUCCESS;
}
Result nvmlDeviceGetArchitecture(Handle device, unsigned *architecture) { // NVML_DEVICE_ARCH_*, Volta and later
    enum { VOLTA = 5, TURING, AMPERE, ADA, HOPPER, BLACKWELL };
    *architecture = gpu.major >= 10                      ? BLACKWELL
                    : gpu.major == 9                     ? HOPPER
                    : gpu.major == 8 && gpu.minor == 9   ? ADA
                    : gpu.major == 8                     ? AMPERE
                    : gpu.major == 7 && gpu.minor == 5   ? TURING
                                                         : VOLTA;
    return SUCCESS;
}
Result nvmlDeviceGetPersistenceMode(Handle device, int *mode) {
    *mode = 1;
    return SUCCESS;
}
Result nvmlDeviceGetComputeMode(Handle device, int *mode) { // any number of processes
    *mode = 0;
    return SUCCESS;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char text[32];
} Place;

Result nvmlDeviceGetPciInfo_v3(Handle device, Place *place) {
    *place = (Place){.bus = (unsigned)device_of(device) + 1};
    snprintf(place->legacy, sizeof place->legacy, "0000:%02X:00.0", place->bus & 0xff);
    snprintf(place->text, sizeof place->text, "00000000:%02X:00.0", place->bus & 0xff);
    return SUCCESS;
}
Result nvmlDeviceGetMigMode(Handle device, unsigned *now, unsigned *next) { return NVML_NOT_SUPPORTED; }
Result nvmlDeviceGetNumaNodeId(Handle device, unsigned *node) { return NVML_NOT_SUPPORTED; }
Result nvmlDeviceGetCpuAffinity(Handle device, unsigned num, unsigned long *set) { return NVML_NOT_SUPPORTED; }
Result nvmlDeviceGetUtilizationRates(Handle device, void *rates) { return NVML_NOT_SUPPORTED; }
Result nvmlDeviceGetTemperature(Handle device, int which, unsigned *degrees) { return NVML_NOT_SUPPORTED; }
Result nvmlDeviceGetPowerUsage(Handle device, unsigned *milliwatts) { return NVML_NOT_SUPPORTED; }
Result nvmlDeviceGetClockInfo(Handle device, int which, unsigned *mhz) { return NVML_NOT_SUPPORTED; }
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
