// Statuses that the driver gives on demand, as tests of what real machines do ask for them: see virtual.py.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// What can be told to fail: functions, and by their number on the machine devices (whose context is refused) and peers
// (whose access is). `rdma` and `export` are requests for memory with these properties, `range` those for addresses of
// more than 1 GiB; `peers` is whether devices reach each other, `memory` what is free, `attribute` and a number one of a
// device: these are answered with what is given as the status.
static const char *const names[] = {
    "cuInit", "cuCtxSynchronize", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemMap", "cuMemSetAccess",
    "cuMemUnmap", "cuMemRelease", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent", "cuStreamIsCapturing",
    "cuModuleLoadData", "cuLaunchKernel", "cudaGetDeviceCount", "cudaMalloc", "cudaHostAlloc", "cudaMemGetInfo",
    "cudaMemcpy", "cudaMemcpyAsync", "cudaDeviceSynchronize", "cudaStreamCreate", "cudaStreamSynchronize",
    "cudaEventCreate", "cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize", "cudaLaunchKernel", "rdma", "export",
    "range", "peers", "memory",
};
static const char *const numbered[] = {"device", "peer", "attribute"};
enum { NUM_NAMES = sizeof names / sizeof *names, NUM_NUMBERED = sizeof numbered / sizeof *numbered };
enum { MAX_FAULTS = 32, HANG = 1 << 20 };

static struct {
    char name[32];
    int status;
    uint64_t first, last; // calls that fail, counted from 1
    atomic_ullong num_calls;
} faults[MAX_FAULTS];
static int num_faults;
static atomic_int lost; // the status by which the context was lost: every later call that uses it says the same

int context_lost(void) { return atomic_load(&lost); }

static bool ends_context(int status) { return status == 214 || (status >= 700 && status < 720 && status != 709); }

static bool may_fail(const char *name) {
    for (int i = 0; i < NUM_NUMBERED; i++) {
        size_t length = strlen(numbered[i]);
        if (strncmp(name, numbered[i], length) == 0 && name[length] >= '0' && name[length] <= '9')
            return strcmp(numbered[i], "attribute") == 0 || atoi(name + length) < MAX_DEVICES;
    }
    for (int i = 0; i < NUM_NAMES; i++)
        if (strcmp(names[i], name) == 0) return true;
    return false;
}

void stalloc_virtual_forget_faults(void) {
    num_faults = 0;
    atomic_store(&lost, SUCCESS);
}

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
    if (ends_context(status)) atomic_store(&lost, status);
    return status;
}

int fault_of_number(const char *what, int number) {
    char name[32];
    if (!num_faults) return SUCCESS;
    snprintf(name, sizeof name, "%s%d", what, number);
    return fault_of(name);
}

bool fault_answers(int answer, int *value) {
    if (answer == SUCCESS) return false;
    *value = answer == ANSWER_NONE ? 0 : answer;
    return true;
}
