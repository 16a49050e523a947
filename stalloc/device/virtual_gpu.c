// The virtual GPU: devices that exist only as bookkeeping.
//
// Contract: device memory is host address space that nobody touches unless data is copied into it, so a device of
// 141 GiB costs a few kilobytes.  Kernels do nothing.  Addresses are real: reading or writing them is safe, and
// bytes that were never copied read as zero.  An allocation that exceeds what the device has left fails as on a GPU.
//
// Here are the configuration, the counts, the devices' attributes and the look-up of functions by name; memory, data
// and streams have files of their own, and the other files dress all of it in NVIDIA's names.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>

Configuration gpu = {
    .name = "Virtual GPU",
    .total_bytes = (size_t)80 << 30,
    .major = 9,
    .minor = 0,
    .num_multiprocessors = 132,
    .num_devices = 1,
    .num_machine_devices = 1,
    .cuda_version = 13000,
    .copy_limit_bytes = (size_t)1 << 20,
};
__thread int current_device;

static atomic_ullong counts[NUM_COUNTS];

void count(int which) { atomic_fetch_add_explicit(&counts[which], 1, memory_order_relaxed); }

int stalloc_virtual_configure(const char *name, size_t total_bytes, int major, int minor, int num_multiprocessors,
                              int num_devices, int cuda_version, size_t copy_limit_bytes) {
    if (num_devices < 1 || num_devices > MAX_DEVICES || total_bytes == 0) return INVALID_VALUE;
    snprintf(gpu.name, sizeof gpu.name, "%s", name);
    gpu.total_bytes = total_bytes;
    gpu.major = major;
    gpu.minor = minor;
    gpu.num_multiprocessors = num_multiprocessors;
    gpu.num_devices = gpu.num_machine_devices = num_devices;
    devices_configured();
    gpu.cuda_version = cuda_version;
    gpu.copy_limit_bytes = copy_limit_bytes;
    return SUCCESS;
}

void stalloc_virtual_statistics(uint64_t out[NUM_COUNTS]) {
    for (int i = 0; i < NUM_COUNTS; i++) out[i] = counts[i];
}

void stalloc_virtual_set_context(size_t bytes) { gpu.context_bytes = bytes; }

void stalloc_virtual_set_copy_limit(size_t bytes) { gpu.copy_limit_bytes = bytes; }

void *find_function(const char *name) {
    Dl_info self;
    if (!dladdr((void *)&find_function, &self)) return NULL;
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!library) return NULL;
    static const char *const suffixes[] = {"", "_v2", "_v3"};
    void *found = NULL;
    for (int i = 0; i < 3 && !found; i++) {
        char full[256];
        snprintf(full, sizeof full, "%s%s", name, suffixes[i]);
        found = dlsym(library, full);
    }
    dlclose(library);
    return found;
}

// Attributes by their documented numbers (cudaDeviceAttr and CUdevice_attribute agree).  What depends on the architecture
// is as in the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
int device_attribute(int *value, int attribute, int device) {
    if (device < 0 || device >= gpu.num_devices) return INVALID_DEVICE;
    if (fault_answers(fault_of_number("attribute", attribute), value)) return SUCCESS;
    int capability = 10 * gpu.major + gpu.minor;
    bool small_core = capability == 75 || capability == 86 || capability == 89 || capability == 120;
    int shared_optin = capability >= 120                      ? 101376
                       : capability >= 90                     ? 232448
                       : capability == 86 || capability == 89 ? 101376
                       : capability >= 80                     ? 166912
                       : capability == 75                     ? 65536
                                                              : 98304;
    int reserved_shared = capability >= 80 ? 1024 : 0;
    int num_blocks = capability == 89 || capability == 120 ? 24 : small_core ? 16 : 32;
    switch (attribute) {
    case 1: *value = 1024; break; // threads in a block
    case 2:
    case 3: *value = 1024; break;       // block x, y
    case 4: *value = 64; break;         // block z
    case 5: *value = 2147483647; break; // grid x
    case 6:
    case 7: *value = 65535; break;       // grid y, z
    case 8: *value = 49152; break;       // shared memory of a block
    case 9: *value = 65536; break;       // constant memory
    case 10: *value = 32; break;         // warp
    case 11: *value = 2147483647; break; // pitch
    case 12:
    case 82: *value = 65536; break;   // registers of a block, of a multiprocessor
    case 13: *value = 1980000; break; // clock, kHz
    case 14: *value = 512; break;     // texture alignment
    case 15: *value = 1; break;       // overlap
    case 16: *value = gpu.num_multiprocessors; break;
    case 19: *value = 1; break;                                                  // can map host memory
    case 31: *value = 1; break;                                                  // concurrent kernels
    case 33: *value = 1 + device; break;                                         // PCI bus
    case 36: *value = 2619000; break;                                            // memory clock, kHz
    case 37: *value = 5120; break;                                               // memory bus, bits
    case 38: *value = 50 << 20; break;                                           // L2 cache
    case 39: *value = capability == 75 ? 1024 : small_core ? 1536 : 2048; break; // threads of a multiprocessor
    case 40: *value = 3; break;                                                  // copy engines
    case 41: *value = 1; break;                                                  // unified addressing
    case 75: *value = gpu.major; break;
    case 76: *value = gpu.minor; break;
    case 78:
    case 79:
    case 80: *value = 1; break;                   // stream priorities, caches
    case 81: *value = shared_optin + reserved_shared; break; // shared memory of a multiprocessor
    case 83: *value = 1; break;                   // managed memory
    case 89:
    case 90: *value = 1; break; // concurrent managed access, compute preemption
    case 95: *value = 1; break; // cooperative launch
    case 97: *value = shared_optin; break;
    case 99: *value = 1; break;                     // host registration
    case 102:
    case 103:
    case 110: *value = 1; break;                    // virtual memory management, exported as file descriptors, with RDMA
    case 106: *value = num_blocks; break; // blocks of a multiprocessor
    case 111: *value = reserved_shared; break;      // reserved shared memory of a block
    case 115: *value = 1; break;                    // memory pools
    case 120: *value = capability >= 90; break;     // clusters
    default: *value = 0;
    }
    return SUCCESS;
}

int attribute_of(int attribute, int device) {
    int value = 0;
    device_attribute(&value, attribute, device);
    return value;
}
