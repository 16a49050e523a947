// Which of the machine's devices a process sees, and the primary contexts that it has made on them.
//
// Contract: CUDA_VISIBLE_DEVICES is read once, when the process first asks for devices, as the driver does it. A context
// is made where the runtime makes it (cudaSetDevice since CUDA 12, else the first call that needs the device) and where
// the driver is told to retain it; it stays until the process ends.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(context_lock)
static atomic_int is_initialised;
static atomic_ullong contexts;            // a bit for each device that has one, by its number in this process
static int number_on_machine[MAX_DEVICES]; // of each device of this process

// What CUDA_VISIBLE_DEVICES leaves; -1 if it names a device that this machine lacks, which hides none: a program that is
// tried here may be meant for a larger one.
static int read_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) return -1;
    int num = 0;
    for (const char *at = text; *at && num < MAX_DEVICES;) {
        char *end;
        long number = strtol(at, &end, 10);
        if (end == at) return -1; // a name or an identity
        if (number < 0) break;    // the driver takes none from here on
        if (number >= gpu.num_machine_devices) return -1;
        number_on_machine[num++] = (int)number;
        at = *end == ',' ? end + 1 : end;
        if (at == end && *at) return -1;
    }
    return num;
}

void devices_configured(void) {
    atomic_store(&is_initialised, 0);
    atomic_store(&contexts, 0);
}

void devices_initialise(void) {
    if (atomic_load(&is_initialised)) return;
    pthread_mutex_lock(&context_lock);
    if (!is_initialised) {
        for (int i = 0; i < MAX_DEVICES; i++) number_on_machine[i] = i;
        int num_visible = read_visible();
        if (num_visible < 0)
            for (int i = 0; i < MAX_DEVICES; i++) number_on_machine[i] = i;
        gpu.num_devices = num_visible < 0 ? gpu.num_machine_devices : num_visible;
        atomic_store(&is_initialised, 1);
    }
    pthread_mutex_unlock(&context_lock);
}

int device_on_machine(int device) {
    return device >= 0 && device < gpu.num_devices ? number_on_machine[device] : -1;
}

int device_of_number(int number) {
    for (int device = 0; device < gpu.num_devices; device++)
        if (device_on_machine(device) == number) return device;
    return -1;
}

bool context_made(int device) {
    return device >= 0 && device < gpu.num_devices && (atomic_load(&contexts) >> device & 1);
}

int context_make(int device) {
    if (context_made(device)) return context_lost();
    devices_initialise();
    if (gpu.num_devices == 0) return NO_DEVICE;
    if (device < 0 || device >= gpu.num_devices) return INVALID_DEVICE;
    int status = fault_of_number("device", device_on_machine(device));
    if (status != SUCCESS) return status;
    bool is_new = !(atomic_fetch_or(&contexts, 1ULL << device) >> device & 1);
    return is_new && gpu.context_bytes && !memory_charge(device, gpu.context_bytes) ? OUT_OF_MEMORY : SUCCESS;
}

int stalloc_virtual_is_initialised(void) { return atomic_load(&is_initialised); }

// The devices with a primary context of this process, a bit for each, by their numbers on the machine.
uint64_t stalloc_virtual_contexts(void) {
    uint64_t found = 0;
    for (int device = 0; device < gpu.num_devices; device++)
        if (context_made(device)) found |= 1ULL << device_on_machine(device);
    return found;
}
