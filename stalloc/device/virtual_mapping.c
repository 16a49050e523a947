// Virtual memory management of the driver, which torch's expandable segments are made of.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <pthread.h>
#include <stdlib.h>

typedef int Result;
typedef void *Handle;
typedef uintptr_t Address;

// Addresses are reserved like any block but not charged; physical handles are charged to
// their device until they are both released and unmapped, as the driver does it.
typedef struct Physical {
    size_t size_bytes;
    int device, num_mapped;
    bool released;
} Physical;

typedef struct Mapping {
    Address address;
    Physical *physical;
    struct Mapping *next;
} Mapping;

static pthread_mutex_t mapping_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(mapping_lock)
enum { NUM_BUCKETS = 4096 };
static Mapping *mappings[NUM_BUCKETS]; // by slot of the address; under mapping_lock

typedef struct {
    int type, handle_types, location_type, location_id;
} PhysicalProperties; // the head that matters

static void forget_if_unused(Physical *physical) {
    if (!physical->released || physical->num_mapped) return;
    memory_refund(physical->device, physical->size_bytes);
    order_pages_released(physical);
    free(physical);
}

Result cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    *bytes = SLOT_BYTES;
    return SUCCESS;
}
Result cuMemAddressReserve(Address *address, size_t size, size_t alignment, Address wanted, unsigned long long flags) {
    Result result = memory_allocate((void **)address, size, MEMORY_DEVICE, current_device, COUNTED_NOWHERE);
    if (result == SUCCESS) order_addresses_reserved(*address, size);
    return result;
}
Result cuMemAddressFree(Address address, size_t size) {
    order_addresses_freed(address, size);
    return memory_free((void *)address);
}
Result cuMemCreate(Handle *made, size_t size, const PhysicalProperties *properties, unsigned long long flags) {
    int device = properties->location_id;
    if (device < 0 || device >= gpu.num_devices) return INVALID_DEVICE;
    if (size == 0 || size % SLOT_BYTES) return INVALID_VALUE;
    if (order_forbids("cuMemCreate")) return STREAM_CAPTURE_UNSUPPORTED;
    if (!memory_charge(device, size)) return OUT_OF_MEMORY;
    Physical *physical = malloc(sizeof *physical);
    if (!physical) {
        memory_refund(device, size);
        return OUT_OF_MEMORY;
    }
    *physical = (Physical){size, device, 0, false};
    *made = physical;
    order_pages_made(physical, size);
    count(COUNT_MALLOC);
    return SUCCESS;
}
Result cuMemRelease(Handle handle) {
    if (!handle) return INVALID_VALUE;
    if (order_forbids("cuMemRelease")) return STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&mapping_lock);
    ((Physical *)handle)->released = true;
    forget_if_unused(handle);
    pthread_mutex_unlock(&mapping_lock);
    count(COUNT_FREE);
    return SUCCESS;
}
Result cuMemMap(Address address, size_t size, size_t offset, Handle handle, unsigned long long flags) {
    if (order_forbids("cuMemMap")) return STREAM_CAPTURE_UNSUPPORTED;
    Mapping *mapping = malloc(sizeof *mapping);
    if (!mapping || !handle) {
        free(mapping);
        return handle ? OUT_OF_MEMORY : INVALID_VALUE;
    }
    pthread_mutex_lock(&mapping_lock);
    Mapping **bucket = &mappings[address / SLOT_BYTES % NUM_BUCKETS];
    *mapping = (Mapping){address, handle, *bucket};
    *bucket = mapping;
    mapping->physical->num_mapped++;
    pthread_mutex_unlock(&mapping_lock);
    order_mapped(address, size, offset, handle);
    count(COUNT_MAP);
    return SUCCESS;
}
Result cuMemUnmap(Address address, size_t size) {
    if (order_forbids("cuMemUnmap")) return STREAM_CAPTURE_UNSUPPORTED;
    order_unmapped(address, size);
    pthread_mutex_lock(&mapping_lock);
    for (Address slot = address; slot < address + size; slot += SLOT_BYTES) {
        for (Mapping **link = &mappings[slot / SLOT_BYTES % NUM_BUCKETS]; *link;) {
            Mapping *mapping = *link;
            if (mapping->address != slot) {
                link = &mapping->next;
                continue;
            }
            *link = mapping->next;
            mapping->physical->num_mapped--;
            forget_if_unused(mapping->physical);
            free(mapping);
        }
    }
    pthread_mutex_unlock(&mapping_lock);
    memory_drop_pages((void *)address, size);
    count(COUNT_UNMAP);
    return SUCCESS;
}
Result cuMemSetAccess(Address address, size_t size, const void *list, size_t num) { return SUCCESS; }
Result cuMemExportToShareableHandle(void) { return NOT_SUPPORTED; }
Result cuMemImportFromShareableHandle(void) { return NOT_SUPPORTED; }
Result cuMulticastCreate(void) { return NOT_SUPPORTED; }
Result cuMulticastAddDevice(void) { return NOT_SUPPORTED; }
Result cuMulticastBindMem(void) { return NOT_SUPPORTED; }
Result cuMulticastUnbind(void) { return NOT_SUPPORTED; }
