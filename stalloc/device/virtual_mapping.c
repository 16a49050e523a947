// Virtual memory management of the driver, which torch's expandable segments are made of.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef int Result;
typedef void *Handle;
typedef uintptr_t Address;

// Addresses are reserved like any block but not charged; physical handles are charged to
// their device until they are both released and unmapped, as the driver does it.
typedef struct Physical {
    size_t size_bytes;
    int device, num_mapped, num_handles, handle_types;
} Physical;

typedef struct Mapping {
    Address address;
    Physical *physical;
    uint64_t users; // a bit for each device that may use it
    struct Mapping *next;
} Mapping;

static pthread_mutex_t mapping_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(mapping_lock)
enum { NUM_BUCKETS = 4096 };
static Mapping *mappings[NUM_BUCKETS]; // by slot of the address; under mapping_lock

typedef struct {
    int type, handle_types, location_type, location_id;
    void *win32;
    unsigned char compression, direct_access;
} PhysicalProperties; // the head that matters

static void forget_if_unused(Physical *physical) {
    if (physical->num_handles || physical->num_mapped) return;
    memory_refund(physical->device, physical->size_bytes);
    order_pages_released(physical);
    free(physical);
}

Result cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    *bytes = SLOT_BYTES;
    return SUCCESS;
}
Result cuMemAddressReserve(Address *address, size_t size, size_t alignment, Address wanted, unsigned long long flags) {
    MAY_FAIL(cuMemAddressReserve);
    if (size > (size_t)1 << 30) MAY_FAIL(range);
    Result result = memory_allocate((void **)address, size, MEMORY_DEVICE, current_device, COUNTED_NOWHERE);
    if (result == SUCCESS) order_addresses_reserved(*address, size);
    return result;
}
Result cuMemAddressFree(Address address, size_t size) {
    MAY_FAIL(cuMemAddressFree);
    order_addresses_freed(address, size);
    return memory_free((void *)address);
}
Result cuMemCreate(Handle *made, size_t size, const PhysicalProperties *properties, unsigned long long flags) {
    int device = properties->location_id;
    if (device < 0 || device >= gpu.num_devices) return INVALID_DEVICE;
    if (size == 0 || size % SLOT_BYTES) return INVALID_VALUE;
    MAY_FAIL(cuMemCreate);
    if (properties->direct_access) MAY_FAIL(rdma);
    if (properties->handle_types) MAY_FAIL(export);
    if (order_forbids("cuMemCreate")) return STREAM_CAPTURE_UNSUPPORTED;
    if (!memory_charge(device, size)) return OUT_OF_MEMORY;
    Physical *physical = malloc(sizeof *physical);
    if (!physical) {
        memory_refund(device, size);
        return OUT_OF_MEMORY;
    }
    *physical = (Physical){size, device, 0, 1, properties->handle_types};
    *made = physical;
    order_pages_made(physical, size);
    count(COUNT_MALLOC);
    count(COUNT_CREATE);
    return SUCCESS;
}
Result cuMemRelease(Handle handle) {
    MAY_FAIL(cuMemRelease);
    if (!handle) return INVALID_VALUE;
    if (order_forbids("cuMemRelease")) return STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&mapping_lock);
    ((Physical *)handle)->num_handles--;
    forget_if_unused(handle);
    pthread_mutex_unlock(&mapping_lock);
    count(COUNT_FREE);
    count(COUNT_RELEASE);
    return SUCCESS;
}
Result cuMemMap(Address address, size_t size, size_t offset, Handle handle, unsigned long long flags) {
    MAY_FAIL(cuMemMap);
    if (order_forbids("cuMemMap")) return STREAM_CAPTURE_UNSUPPORTED;
    Mapping *mapping = malloc(sizeof *mapping);
    if (!mapping || !handle) {
        free(mapping);
        return handle ? OUT_OF_MEMORY : INVALID_VALUE;
    }
    pthread_mutex_lock(&mapping_lock);
    Mapping **bucket = &mappings[address / SLOT_BYTES % NUM_BUCKETS];
    *mapping = (Mapping){address, handle, 0, *bucket};
    *bucket = mapping;
    mapping->physical->num_mapped++;
    pthread_mutex_unlock(&mapping_lock);
    order_mapped(address, size, offset, handle);
    count(COUNT_MAP);
    return SUCCESS;
}
Result cuMemUnmap(Address address, size_t size) {
    MAY_FAIL(cuMemUnmap);
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
static Mapping *mapping_at(Address address) { // under mapping_lock
    Mapping *mapping = mappings[address / SLOT_BYTES % NUM_BUCKETS];
    while (mapping && mapping->address != address) mapping = mapping->next;
    return mapping;
}

typedef struct {
    int location_type, location_id, flags;
} Access;

Result cuMemSetAccess(Address address, size_t size, const Access *list, size_t num) {
    MAY_FAIL(cuMemSetAccess);
    count(COUNT_ACCESS);
    uint64_t users = 0;
    for (size_t i = 0; i < num; i++) users |= list[i].flags ? 1ULL << list[i].location_id : 0;
    Result result = SUCCESS;
    pthread_mutex_lock(&mapping_lock);
    for (Address slot = address; slot < address + size && result == SUCCESS; slot += SLOT_BYTES) {
        Mapping *mapping = mapping_at(slot);
        int own = mapping ? mapping->physical->device : -1;
        for (size_t i = 0; i < num && slot == address; i++) {
            int peer = list[i].location_id;
            if (peer != own && result == SUCCESS) result = fault_of_number("peer", device_on_machine(peer));
        }
        if (mapping && result == SUCCESS) mapping->users |= users;
    }
    pthread_mutex_unlock(&mapping_lock);
    if (result == SUCCESS) order_opened(address, size, users != 0);
    return result;
}
typedef struct {
    int type, id;
} Location;
Result cuMemGetAccess(unsigned long long *flags, const Location *location, Address address) {
    pthread_mutex_lock(&mapping_lock);
    Mapping *mapping = mapping_at(address / SLOT_BYTES * SLOT_BYTES);
    bool is_mapped = mapping != NULL;
    *flags = is_mapped && mapping->users >> location->id & 1 ? 3 : 0;
    pthread_mutex_unlock(&mapping_lock);
    return is_mapped ? SUCCESS : INVALID_VALUE;
}
Result cuMemRetainAllocationHandle(Handle *handle, const void *address) {
    pthread_mutex_lock(&mapping_lock);
    Mapping *mapping = mapping_at((Address)address / SLOT_BYTES * SLOT_BYTES);
    *handle = mapping ? mapping->physical : NULL;
    if (mapping) mapping->physical->num_handles++;
    pthread_mutex_unlock(&mapping_lock);
    return *handle ? SUCCESS : INVALID_VALUE;
}
enum { FILE_DESCRIPTOR = 1 };
Result cuMemExportToShareableHandle(void *handle, Handle physical, int type, unsigned long long flags) {
    if (type != FILE_DESCRIPTOR) return NOT_SUPPORTED;
    if (!(((Physical *)physical)->handle_types & FILE_DESCRIPTOR)) return INVALID_VALUE;
    *(int *)handle = memfd_create("stalloc-virtual-memory", MFD_CLOEXEC); // names the memory, and holds none of it
    return *(int *)handle < 0 ? 304 : SUCCESS;
}
Result cuMemImportFromShareableHandle(void) { return NOT_SUPPORTED; }
Result cuMulticastCreate(void) { return NOT_SUPPORTED; }
Result cuMulticastAddDevice(void) { return NOT_SUPPORTED; }
Result cuMulticastBindMem(void) { return NOT_SUPPORTED; }
Result cuMulticastUnbind(void) { return NOT_SUPPORTED; }
