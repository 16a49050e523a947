// Statuses that the driver gives on demand, as tests of what real machines do ask for them: see driver_faults.py.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

// What can be told to fail: functions, and by their number on the machine devices (whose context is refused) and peers
// (whose access is). `rdma` and `export` are requests for memory with these properties.
static const char *const names[] = {
    "cuInit",      "cuMemAddressReserve", "cuMemCreate", "cuMemMap",         "cuMemSetAccess",        "cuMemUnmap",
    "cuMemRelease", "cudaMalloc",         "cudaHostAlloc", "cudaMemGetInfo", "cudaDeviceSynchronize", "cudaLaunchKernel",
    "rdma",        "export",
};
enum { NUM_NAMES = sizeof names / sizeof *names, MAX_FAULTS = 32, HANG = 1 << 20 };

static struct {
    char name[32];
    int status;
    uint64_t first, last; // calls that fail, counted from 1
    atomic_ullong num_calls;
} faults[MAX_FAULTS];
static int num_faults;

static bool may_fail(const char *name) {
    int number;
    if (sscanf(name, "device%d", &number) == 1 || sscanf(name, "peer%d", &number) == 1)
        return number >= 0 && number < MAX_DEVICES;
    for (int i = 0; i < NUM_NAMES; i++)
        if (strcmp(names[i], name) == 0) return true;
    return false;
}

void stalloc_virtual_forget_faults(void) { num_faults = 0; }

// INVALID_VALUE for a name that cannot fail, OUT_OF_MEMORY for too many.
int stalloc_virtual_add_fault(const char *name, int status, uint64_t first, uint64_t last) {
    if (!may_fail(name)) return INVALID_VALUE;
    if (num_faults == MAX_FAULTS) return OUT_OF_MEMORY;
    snprintf(faults[num_faults].name, sizeof faults->name, "%s", name);
    faults[num_faults].status = status;
    faults[num_faults].first = first;
    faults[num_faults].last = last;
    atomic_store(&faults[num_faults++].num_calls, 0);
    return SUCCESS;
}

int fault_of(const char *name) {
    int status = SUCCESS;
    for (int i = 0; i < num_faults; i++) {
        if (strcmp(faults[i].name, name) != 0) continue;
        uint64_t call = atomic_fetch_add(&faults[i].num_calls, 1) + 1;
        if (call >= faults[i].first && call <= faults[i].last && status == SUCCESS) status = faults[i].status;
    }
    while (status == HANG) pause();
    return status;
}
