// Accesses of memory on the virtual GPU: who used each piece of a page last, and whether the next user comes after that.
//
// Memory is known by physical page, since addresses change theirs.  A page has pieces, ascending and apart, each with
// its last write and the reads since then that no later read comes after.  An access that is not ordered after the last
// write, or a write that is not ordered after each of the reads, is found, once for each access.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_READS = 4 };    // of several streams at a time; more push out the first
enum { MOST_RUNS = 64 };   // of items side by side in one array; of more, so many are looked at, evenly spread

typedef struct {
    uint32_t tick; // of its row; 0: there was none
    uint32_t place, number;
    int row;
} Epoch;
typedef struct {
    uint32_t start, end; // bytes of the page
    uint32_t given;      // the number of the access at which an allocator gave it to the program last
    int num_reads;
    Epoch write, reads[MOST_READS];
} Piece;
typedef struct {
    Piece *pieces;
    int num, capacity;
} Page;

// Pages by address: two levels of tables over the 47 bits that a program can have, one entry for each slot.
enum { LEVEL_BITS = 13 };
static Page **slots[1 << LEVEL_BITS]; // under order_lock, as all below
static Page reserved;                 // stands for addresses that were reserved and have no page

// Pages by the driver's handle of the memory that they are.
typedef struct Memory {
    void *handle;
    struct Memory *next;
    size_t num_pages;
    Page pages[];
} Memory;
enum { NUM_BUCKETS = 4096 };
static Memory *memories[NUM_BUCKETS];
static uint32_t num_accesses;

static Page **slot_of(uintptr_t address, bool make) {
    size_t slot = address / SLOT_BYTES, table = slot >> LEVEL_BITS;
    if (table >= 1 << LEVEL_BITS) return NULL;
    if (!slots[table] && make) slots[table] = calloc((size_t)1 << LEVEL_BITS, sizeof(Page *));
    return slots[table] ? &slots[table][slot & ((1 << LEVEL_BITS) - 1)] : NULL;
}

static Memory *memory_of(void *handle) {
    Memory *memory = memories[(uintptr_t)handle / 16 % NUM_BUCKETS];
    while (memory && memory->handle != handle) memory = memory->next;
    return memory;
}

static Page *page_of(uintptr_t address) {
    Page **slot = slot_of(address, true);
    if (!slot || *slot == &reserved) return NULL;
    if (!*slot) *slot = calloc(1, sizeof(Page)); // memory that is its own page
    return *slot;
}

static void insert(Page *page, int at, Piece piece) {
    if (page->num == page->capacity) {
        page->capacity = page->capacity ? 2 * page->capacity : 2;
        page->pieces = realloc(page->pieces, (size_t)page->capacity * sizeof *page->pieces);
        if (!page->pieces) abort();
    }
    memmove(&page->pieces[at + 1], &page->pieces[at], (size_t)(page->num - at) * sizeof *page->pieces);
    page->pieces[at] = piece;
    page->num++;
}

static void take_out(Page *page, int at, int num) {
    memmove(&page->pieces[at], &page->pieces[at + num], (size_t)(page->num - at - num) * sizeof *page->pieces);
    page->num -= num;
}

static int first_ending_after(const Page *page, uint32_t byte) {
    int low = 0, high = page->num;
    while (low < high) {
        int middle = (low + high) / 2;
        if (page->pieces[middle].end > byte) high = middle;
        else low = middle + 1;
    }
    return low;
}

static void split(Page *page, int at, uint32_t byte) {
    Piece right = page->pieces[at];
    right.start = page->pieces[at].end = byte;
    insert(page, at + 1, right);
}

// Let pieces cover [start, end) exactly; the index of the first, and how many.
static int cover(Page *page, uint32_t start, uint32_t end, int *num) {
    int first = first_ending_after(page, start), i = first;
    if (i < page->num && page->pieces[i].start < start) {
        split(page, i, start);
        first = ++i;
    }
    for (uint32_t at = start; at < end; i++) {
        uint32_t next = i < page->num ? page->pieces[i].start : end;
        if (next > at) insert(page, i, (Piece){.start = at, .end = next < end ? next : end});
        else if (page->pieces[i].end > end) split(page, i, end);
        at = page->pieces[i].end;
    }
    *num = i - first;
    return first;
}

static bool are_alike(const Piece *one, const Piece *other) {
    return one->end == other->start && one->given == other->given && one->num_reads == other->num_reads &&
           !memcmp(&one->write, &other->write, sizeof one->write) &&
           !memcmp(one->reads, other->reads, (size_t)one->num_reads * sizeof *one->reads);
}

// An access, and what was found about it: of what it does not come after, the last, which orders what was before that.
typedef struct {
    const Clock *clock; // what comes before it
    Epoch epoch;
    int how;
    uint32_t captured; // of a graph: the number of the last access before its capture ended, 0 for other accesses
    uint32_t found;    // the number of what it does not come after
    Finding *finding;
} Access;

static bool comes_after(const Access *access, const Epoch *before) {
    return access->clock->ticks[before->row] >= before->tick;
}

static void compare(Access *access, const Piece *piece, const Epoch *before, bool wrote) {
    if (!before->tick || before->number <= access->found || comes_after(access, before)) return;
    access->found = before->number;
    Finding *finding = access->finding;
    bool is_host = access->clock == &host_clock;
    finding->kind = is_host ? FOUND_HOST : before->number < piece->given ? FOUND_HANDED_ON : FOUND_RACE;
    finding->writes = access->how & WRITES;
    finding->other_writes = wrote;
    finding->has_waited = !is_host && order_has_waited(access->epoch.row, before->row);
    finding->other_place = before->place;
    finding->other_stream = order_handle(before->row);
    finding->other_device = order_device(before->row);
}

static void read_piece(Access *access, Piece *piece) {
    int kept = 0;
    for (int i = 0; i < piece->num_reads; i++)
        if (!comes_after(access, &piece->reads[i])) piece->reads[kept++] = piece->reads[i];
    if (kept == MOST_READS) memmove(piece->reads, piece->reads + 1, --kept * sizeof *piece->reads);
    piece->reads[kept++] = access->epoch;
    piece->num_reads = kept;
}

static void access_page(Access *access, Page *page, uint32_t start, uint32_t end) {
    int num, first = cover(page, start, end, &num);
    uint32_t given = 0;
    for (int i = first; i < first + num; i++) {
        Piece *piece = &page->pieces[i];
        if (access->how & IS_NEW) piece->given = access->epoch.number;
        if (access->how == IS_NEW) continue;
        if (access->captured && piece->given > access->captured) access->finding->kind = FOUND_GRAPH_MEMORY;
        compare(access, piece, &piece->write, true);
        for (int k = 0; k < piece->num_reads && access->how & WRITES; k++)
            compare(access, piece, &piece->reads[k], false);
        if (piece->given > given) given = piece->given;
        if (!(access->how & WRITES) && access->epoch.tick) read_piece(access, piece);
    }
    if (access->how & WRITES && access->epoch.tick) { // all of it has the same history from here on
        take_out(page, first + 1, num - 1);
        page->pieces[first] = (Piece){.start = start, .end = end, .given = given, .write = access->epoch};
    }
    for (int i = first + (access->how & WRITES ? 1 : num); i >= first; i--)
        if (i > 0 && i < page->num && are_alike(&page->pieces[i - 1], &page->pieces[i])) {
            page->pieces[i - 1].end = page->pieces[i].end;
            take_out(page, i, 1);
        }
}

static void access_range(Access *access, uintptr_t address, size_t size_bytes) {
    uintptr_t end = address + size_bytes;
    for (uintptr_t at = address; at < end;) {
        uintptr_t slot = at / SLOT_BYTES * SLOT_BYTES, stop = end < slot + SLOT_BYTES ? end : slot + SLOT_BYTES;
        Page *page = page_of(at);
        if (page) access_page(access, page, (uint32_t)(at - slot), (uint32_t)(stop - slot));
        else if (!access->finding->kind && access->how != IS_NEW) access->finding->kind = FOUND_NO_PAGE;
        at = stop;
    }
}

static bool is_known(const void *address, Finding *finding) {
    Block block;
    if (memory_find(address, &block)) return true;
    if (memory_is_address(address)) finding->kind = FOUND_FREED;
    return false; // memory of the host that a GPU reads through a buffer of the driver's
}

// Items side by side in memory, and how the runs of them lie: the dimensions that are left, outermost first.
typedef struct {
    uintptr_t address;
    size_t run_bytes;
    int num;
    ptrdiff_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} Runs;

static Runs runs_of(const Strided *array) {
    Runs runs = {(uintptr_t)array->address, array->item_bytes, 0, {0}, {0}};
    for (int i = 0; i < array->num_dimensions && runs.num < MOST_DIMENSIONS; i++) {
        if (array->shape[i] == 0) return (Runs){0};
        if (array->shape[i] == 1 || array->strides[i] == 0) continue;
        int at = runs.num++;
        for (; at > 0 && runs.strides[at - 1] < array->strides[i]; at--) {
            runs.shape[at] = runs.shape[at - 1];
            runs.strides[at] = runs.strides[at - 1];
        }
        runs.shape[at] = array->shape[i];
        runs.strides[at] = array->strides[i];
    }
    while (runs.num && runs.strides[runs.num - 1] > 0 && (size_t)runs.strides[runs.num - 1] <= runs.run_bytes) {
        runs.num--;
        runs.run_bytes += (size_t)((runs.shape[runs.num] - 1) * runs.strides[runs.num]);
    }
    return runs;
}

static size_t num_runs(const Runs *runs) {
    size_t num = runs->run_bytes ? 1 : 0;
    for (int i = 0; i < runs->num; i++) num *= (size_t)runs->shape[i];
    return num;
}

// Where the k-th of those runs begins that are looked at.
static uintptr_t run_at(const Runs *runs, size_t k) {
    size_t num = num_runs(runs), index = num <= MOST_RUNS ? k : k * (num - 1) / (MOST_RUNS - 1);
    uintptr_t address = runs->address;
    for (int i = runs->num - 1; i >= 0; i--) {
        address += (uintptr_t)((ptrdiff_t)(index % (size_t)runs->shape[i]) * runs->strides[i]);
        index /= (size_t)runs->shape[i];
    }
    return address;
}

static void access_on(void *stream, Finding *finding, const Runs *runs, int how, uint32_t captured) {
    if (order_is_destroyed(stream)) finding->kind = FOUND_DESTROYED;
    pthread_mutex_lock(&order_lock);
    int row = order_row(stream);
    Epoch epoch = {0, finding->place, ++num_accesses, row};
    if (how != IS_NEW) epoch.tick = order_advance(row);
    Access access = {order_clock(row), epoch, how, captured, 0, finding};
    finding->device = order_device(row);
    size_t num = finding->kind == FOUND_FREED ? 0 : num_runs(runs);
    for (size_t k = 0; k < num && k < MOST_RUNS; k++) access_range(&access, run_at(runs, k), runs->run_bytes);
    pthread_mutex_unlock(&order_lock);
    if (finding->kind) order_found(finding);
}

static void capture_access(uint64_t capture, const Runs *runs, int how) {
    for (size_t k = 0; k < num_runs(runs) && k < MOST_RUNS; k++)
        order_captured_access(capture, run_at(runs, k), runs->run_bytes, how);
}

// An operation that is given nothing of the device writes to what it has asked an allocator for, such as a batch that is
// copied there.
static __thread bool makes_all_it_writes;
void stalloc_virtual_order_makes_all_it_writes(int makes) { makes_all_it_writes = makes; }

// What a thread borrows of the memory of graphs is given to nobody else, and theirs again before they are launched.
static __thread bool borrows;
void stalloc_virtual_order_borrows(int does) { borrows = does; }

void order_access_strided(void *stream, const Strided *array, int how) {
    if (order_level < ORDER_STRICT || (borrows && how == IS_NEW)) return;
    if (makes_all_it_writes && how & WRITES) how |= IS_NEW;
    if (borrows) how &= ~IS_NEW;
    Runs runs = runs_of(array);
    Finding finding = {.address = runs.address, .size_bytes = runs.run_bytes, .stream = stream};
    finding.size_bytes *= num_runs(&runs);
    if (!runs.run_bytes || (!is_known((void *)runs.address, &finding) && !finding.kind)) return;
    uint64_t capture = capture_id(stream);
    finding.place = how == IS_NEW ? 0 : order_place();
    if (capture && !finding.kind) capture_access(capture, &runs, how);
    else access_on(stream, &finding, &runs, how, 0);
}

void order_access(void *stream, const void *address, size_t size_bytes, int how) {
    order_access_strided(stream, &(Strided){address, size_bytes, 0, NULL, NULL}, how);
}

uint32_t order_num_accesses(void) { return num_accesses; }

void order_replayed_access(void *stream, uintptr_t address, size_t size_bytes, int how, uint32_t captured) {
    Finding finding = {.place = order_place(), .address = address, .size_bytes = size_bytes, .stream = stream};
    Runs runs = {.address = address, .run_bytes = size_bytes};
    if (is_known((void *)address, &finding) || finding.kind) access_on(stream, &finding, &runs, how, captured);
}

// What the host does comes before all that it gives to streams later, so it need not be kept.
void order_host_access(const void *address, size_t size_bytes, int how) {
    Block block;
    if (order_level < ORDER_STRICT || !size_bytes || !memory_find(address, &block)) return;
    Finding finding = {.address = (uintptr_t)address, .size_bytes = size_bytes};
    pthread_mutex_lock(&order_lock);
    Access access = {&host_clock, {0}, how, 0, 0, &finding};
    access_range(&access, (uintptr_t)address, size_bytes);
    pthread_mutex_unlock(&order_lock);
    if (finding.kind) order_found(&finding);
}

// A copy by the driver: with host memory that is not pinned on one side it is over when the call returns.
static bool ends_with_call(const void *to, const void *from) {
    Block one, other;
    bool to_pageable = !memory_find(to, &one), from_pageable = !memory_find(from, &other);
    return to_pageable && !from_pageable;
}

void order_copy_rows(void *stream, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                     size_t height, bool host_waits) {
    if (order_level == ORDER_AT_ONCE) return;
    ptrdiff_t rows = (ptrdiff_t)height, from_stride = (ptrdiff_t)from_pitch, to_stride = (ptrdiff_t)to_pitch;
    order_access_strided(stream, &(Strided){from, width, 1, &rows, &from_stride}, READS);
    order_access_strided(stream, &(Strided){to, width, 1, &rows, &to_stride}, WRITES);
    order_timed_copy(stream, to, from, width * height);
    if (!capture_id(stream) && (host_waits || ends_with_call(to, from))) order_host_waits_for_stream(stream);
}

void order_copy(void *stream, void *to, const void *from, size_t size_bytes, bool host_waits) {
    order_copy_rows(stream, to, size_bytes, from, size_bytes, size_bytes, 1, host_waits);
}

static void forget(Page *page) {
    free(page->pieces);
    *page = (Page){0};
}

void order_memory_gone(const void *address, size_t size_bytes) {
    if (order_level < ORDER_STRICT) return;
    pthread_mutex_lock(&order_lock);
    for (uintptr_t at = (uintptr_t)address; at < (uintptr_t)address + size_bytes; at += SLOT_BYTES) {
        Page **slot = slot_of(at, false);
        if (slot && *slot && *slot != &reserved) {
            forget(*slot);
            free(*slot);
        }
        if (slot) *slot = NULL;
    }
    pthread_mutex_unlock(&order_lock);
}

// A free in the order of a stream: whoever uses the memory next comes after it.
void order_freed_on(void *stream, const void *address) {
    Block block;
    if (order_level < ORDER_STRICT || !memory_find(address, &block)) return;
    order_access(stream, memory_start(&block), block.size_bytes, WRITES);
}

void order_addresses_reserved(uintptr_t address, size_t size_bytes) {
    if (order_level < ORDER_STRICT) return;
    pthread_mutex_lock(&order_lock);
    for (uintptr_t at = address; at < address + size_bytes; at += SLOT_BYTES) {
        Page **slot = slot_of(at, true);
        if (slot) *slot = &reserved;
    }
    pthread_mutex_unlock(&order_lock);
}

void order_addresses_freed(uintptr_t address, size_t size_bytes) {
    if (order_level < ORDER_STRICT) return;
    Finding finding = {.address = address, .size_bytes = size_bytes};
    pthread_mutex_lock(&order_lock);
    for (uintptr_t at = address; at < address + size_bytes; at += SLOT_BYTES) {
        Page **slot = slot_of(at, false);
        if (!slot) continue;
        if (*slot != &reserved) finding.kind = FOUND_STILL_MAPPED;
        *slot = NULL;
    }
    pthread_mutex_unlock(&order_lock);
    order_set_call(&finding, "cuMemAddressFree");
    if (finding.kind) order_found(&finding);
}

void order_pages_made(void *handle, size_t size_bytes) {
    if (order_level < ORDER_STRICT) return;
    Memory *memory = calloc(1, sizeof *memory + size_bytes / SLOT_BYTES * sizeof *memory->pages);
    if (!memory) abort();
    pthread_mutex_lock(&order_lock);
    Memory **bucket = &memories[(uintptr_t)handle / 16 % NUM_BUCKETS];
    memory->handle = handle;
    memory->num_pages = size_bytes / SLOT_BYTES;
    memory->next = *bucket;
    *bucket = memory;
    pthread_mutex_unlock(&order_lock);
}

// Whether work that the host has not waited for may use a page; then the finding says which.
static bool is_in_use(const Page *page, Finding *finding) {
    for (int i = 0; i < page->num; i++) {
        const Piece *piece = &page->pieces[i];
        for (int k = -1; k < piece->num_reads; k++) {
            const Epoch *epoch = k < 0 ? &piece->write : &piece->reads[k];
            if (!epoch->tick || epoch->tick <= host_clock.ticks[epoch->row]) continue;
            finding->kind = FOUND_IN_USE;
            finding->other_writes = k < 0;
            finding->other_place = epoch->place;
            finding->other_stream = order_handle(epoch->row);
            finding->other_device = order_device(epoch->row);
            return true;
        }
    }
    return false;
}

void order_pages_released(void *handle) {
    if (order_level < ORDER_STRICT) return;
    Finding finding = {0};
    order_set_call(&finding, "cuMemRelease");
    pthread_mutex_lock(&order_lock);
    Memory **link = &memories[(uintptr_t)handle / 16 % NUM_BUCKETS];
    while (*link && (*link)->handle != handle) link = &(*link)->next;
    Memory *memory = *link;
    if (memory) {
        *link = memory->next;
        for (size_t i = 0; i < memory->num_pages; i++) {
            if (!finding.kind) is_in_use(&memory->pages[i], &finding);
            forget(&memory->pages[i]);
        }
        finding.size_bytes = memory->num_pages * SLOT_BYTES;
        free(memory);
    }
    pthread_mutex_unlock(&order_lock);
    if (finding.kind) order_found(&finding);
}

void order_mapped(uintptr_t address, size_t size_bytes, size_t offset, void *handle) {
    if (order_level < ORDER_STRICT) return;
    Finding finding = {.address = address, .size_bytes = size_bytes};
    order_set_call(&finding, "cuMemMap");
    pthread_mutex_lock(&order_lock);
    Memory *memory = memory_of(handle);
    for (size_t i = 0; memory && i < size_bytes / SLOT_BYTES; i++) {
        Page **slot = slot_of(address + i * SLOT_BYTES, true);
        if (!slot) continue;
        if (*slot != &reserved) finding.kind = *slot ? FOUND_MAPPED_OVER : FOUND_NOT_RESERVED;
        if (offset / SLOT_BYTES + i < memory->num_pages) *slot = &memory->pages[offset / SLOT_BYTES + i];
    }
    pthread_mutex_unlock(&order_lock);
    if (finding.kind) order_found(&finding);
}

void order_unmapped(uintptr_t address, size_t size_bytes) {
    if (order_level < ORDER_STRICT) return;
    Finding finding = {.address = address, .size_bytes = size_bytes};
    order_set_call(&finding, "cuMemUnmap");
    pthread_mutex_lock(&order_lock);
    for (uintptr_t at = address; at < address + size_bytes; at += SLOT_BYTES) {
        Page **slot = slot_of(at, false);
        if (!slot || !*slot || *slot == &reserved) {
            finding.kind = FOUND_NOT_MAPPED;
            continue;
        }
        if (!finding.kind) is_in_use(*slot, &finding);
        *slot = &reserved;
    }
    pthread_mutex_unlock(&order_lock);
    if (finding.kind) order_found(&finding);
}
