// NCCL over the virtual GPU: communicators know their ranks, and every other rank is taken to hold what this one holds.
//
// Contract: what a collective leaves in a buffer of a program whose ranks are alike is there afterwards: a gathered
// buffer has this rank's piece in each place.  Sums stay this rank's own, and what another rank would send is not there.
// What each communicator was used for is noted, as it decides which buffers NCCL makes for it.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <pthread.h>
#include <stdlib.h>

typedef int Status;
typedef void *Stream;
typedef struct {
    char bytes[128];
} UniqueId;
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, NUM_KINDS };
enum { MAX_NOTED = 1024, MAX_PEERS = 1024 }; // peers beyond these are counted as one
typedef struct {
    int32_t rank, num_ranks, device, group, parent; // indices into `noted`, -1: none
    int32_t reserved;
    uint64_t num_calls[NUM_KINDS], most_bytes[NUM_KINDS]; // of one call
    uint8_t sends_to[MAX_PEERS], receives_from[MAX_PEERS];
} Noted;
typedef struct {
    int rank, num_ranks, device;
    Noted *note; // NULL: there are too many
} Communicator;

static int size_of_split = 1;
static pthread_mutex_t noted_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(noted_lock)
static Noted *noted[MAX_NOTED]; // in the order in which they were made, those that are gone included
static int num_noted, group_of_next = -1;

// Which group of the program the next communicators are of, as its number there.
void stalloc_virtual_group(int group) { group_of_next = group; }

int stalloc_virtual_communicators(const Noted **out, int capacity) {
    pthread_mutex_lock(&noted_lock);
    int num = num_noted;
    for (int i = 0; i < num && i < capacity; i++) out[i] = noted[i];
    pthread_mutex_unlock(&noted_lock);
    return num;
}

static Noted *note(int rank, int num_ranks, int device, const Noted *parent) {
    Noted *made = calloc(1, sizeof *made);
    pthread_mutex_lock(&noted_lock);
    if (made && num_noted < MAX_NOTED) {
        made->rank = rank, made->num_ranks = num_ranks, made->device = device, made->group = group_of_next;
        made->parent = -1;
        for (int i = 0; parent && i < num_noted; i++)
            if (noted[i] == parent) made->parent = i;
        noted[num_noted++] = made;
    } else {
        free(made);
        made = NULL;
    }
    pthread_mutex_unlock(&noted_lock);
    return made;
}

static void note_call(const Communicator *communicator, int kind, size_t size_bytes) {
    Noted *there = communicator->note;
    if (!there) return;
    __atomic_add_fetch(&there->num_calls[kind], 1, __ATOMIC_RELAXED);
    if (size_bytes > there->most_bytes[kind]) there->most_bytes[kind] = size_bytes;
}

static void note_peer(const Communicator *communicator, int peer, bool sends) {
    Noted *there = communicator->note;
    if (!there || peer < 0 || peer == communicator->rank) return; // what a rank sends itself is a copy
    (sends ? there->sends_to : there->receives_from)[peer < MAX_PEERS ? peer : MAX_PEERS - 1] = 1;
}

// How many ranks the next communicator has that is split off: NCCL learns it from the others.
void stalloc_virtual_split_size(int num_ranks) { size_of_split = num_ranks; }

static Status join_within(const Communicator *parent, Communicator **made, int rank, int num_ranks, int device) {
    Communicator *joined = malloc(sizeof *joined);
    if (joined == NULL) return 2; // ncclSystemError
    *joined = (Communicator){rank, num_ranks, device, note(rank, num_ranks, device, parent ? parent->note : NULL)};
    *made = joined;
    return 0;
}

static Status join(Communicator **made, int rank, int num_ranks, int device) {
    return join_within(NULL, made, rank, num_ranks, device);
}

Status ncclCommInitRank(Communicator **made, int num_ranks, UniqueId id, int rank) {
    return join(made, rank, num_ranks, current_device);
}
Status ncclCommInitRankConfig(Communicator **made, int num_ranks, UniqueId id, int rank, void *config) {
    return join(made, rank, num_ranks, current_device);
}
Status ncclCommInitRankScalable(Communicator **made, int num_ranks, int rank, int num_ids, UniqueId *ids,
                                void *config) {
    return join(made, rank, num_ranks, current_device);
}
Status ncclCommInitAll(Communicator **made, int num_devices, const int *devices) {
    for (int i = 0; i < num_devices; i++) {
        Status status = join(&made[i], i, num_devices, devices ? devices[i] : i);
        if (status) return status;
    }
    return 0;
}
Status ncclCommSplit(Communicator *from, int color, int rank, Communicator **made, void *config) {
    if (color >= 0) return join_within(from, made, rank, size_of_split, from->device);
    *made = NULL; // it is in none of the parts
    return 0;
}
Status ncclCommShrink(Communicator *from, int *excluded, int num_excluded, Communicator **made, void *config,
                      int flags) {
    int rank = from->rank;
    for (int i = 0; i < num_excluded; i++) rank -= excluded[i] < from->rank;
    return join_within(from, made, rank, from->num_ranks - num_excluded, from->device);
}
Status ncclCommDestroy(Communicator *communicator) {
    free(communicator);
    return 0;
}
Status ncclCommAbort(Communicator *communicator) { return ncclCommDestroy(communicator); }

Status ncclCommCount(const Communicator *communicator, int *num_ranks) {
    *num_ranks = communicator->num_ranks;
    return 0;
}
Status ncclCommUserRank(const Communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}
Status ncclCommCuDevice(const Communicator *communicator, int *device) {
    *device = communicator->device;
    return 0;
}
Status ncclCommGetAsyncError(Communicator *communicator, Status *status) {
    *status = 0;
    return 0;
}
Status ncclGetVersion(int *version) {
    *version = 22809;
    return 0;
}

// Of ncclDataType_t: 8-bit integers, 32, 64, half, single, double, bfloat16 and the 8-bit floats.
static size_t size_of(int type) {
    static const unsigned char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return (size_t)type < sizeof sizes ? sizes[type] : 1;
}

static void keep(void *to, const void *from, size_t size_bytes) {
    if (to && from && to != from && size_bytes) memory_copy(to, from, size_bytes);
}

// What a collective reads and writes, on its stream.
static void use(Stream stream, const void *from, size_t from_bytes, void *to, size_t to_bytes) {
    if (from) order_access(stream, from, from_bytes, READS);
    if (to) order_access(stream, to, to_bytes, WRITES);
}

// What a rank sends of so much, `rounds` times around a ring of all ranks.
static void send(Stream stream, const Communicator *communicator, size_t size_bytes, int rounds) {
    size_t num = (size_t)communicator->num_ranks;
    if (num > 1) order_timed_collective(stream, (size_t)rounds * size_bytes / num * (num - 1));
}

static void keep_in_each(char *to, const char *from, size_t size_bytes, int num_ranks) {
    for (int i = 0; i < num_ranks; i++) keep(to + i * size_bytes, from, size_bytes);
}

Status ncclAllReduce(const void *from, void *to, size_t num, int type, int operation, Communicator *communicator,
                     Stream stream) {
    note_call(communicator, ALL_REDUCE, num * size_of(type));
    use(stream, from, num * size_of(type), to, num * size_of(type));
    send(stream, communicator, num * size_of(type), 2);
    keep(to, from, num * size_of(type));
    return 0;
}
Status ncclReduce(const void *from, void *to, size_t num, int type, int operation, int root,
                  Communicator *communicator, Stream stream) {
    note_call(communicator, REDUCE, num * size_of(type));
    use(stream, from, num * size_of(type), communicator->rank == root ? to : NULL, num * size_of(type));
    send(stream, communicator, num * size_of(type), 1);
    if (communicator->rank == root) keep(to, from, num * size_of(type));
    return 0;
}
Status ncclBroadcast(const void *from, void *to, size_t num, int type, int root, Communicator *communicator,
                     Stream stream) {
    note_call(communicator, BROADCAST, num * size_of(type));
    use(stream, communicator->rank == root ? from : NULL, num * size_of(type), to, num * size_of(type));
    send(stream, communicator, num * size_of(type), 1);
    if (communicator->rank == root) keep(to, from, num * size_of(type));
    return 0;
}
Status ncclAllGather(const char *from, char *to, size_t num, int type, Communicator *communicator, Stream stream) {
    note_call(communicator, ALL_GATHER, num * size_of(type) * (size_t)communicator->num_ranks);
    use(stream, from, num * size_of(type), to, num * size_of(type) * (size_t)communicator->num_ranks);
    send(stream, communicator, num * size_of(type) * (size_t)communicator->num_ranks, 1);
    keep_in_each(to, from, num * size_of(type), communicator->num_ranks);
    return 0;
}
Status ncclReduceScatter(const char *from, char *to, size_t num, int type, int operation, Communicator *communicator,
                         Stream stream) {
    note_call(communicator, REDUCE_SCATTER, num * size_of(type) * (size_t)communicator->num_ranks);
    size_t size_bytes = num * size_of(type);
    use(stream, from, size_bytes * (size_t)communicator->num_ranks, to, size_bytes);
    send(stream, communicator, size_bytes * (size_t)communicator->num_ranks, 1);
    keep(to, from + communicator->rank * size_bytes, size_bytes);
    return 0;
}
Status ncclAlltoAll(const char *from, char *to, size_t num, int type, Communicator *communicator, Stream stream) {
    for (int peer = 0; peer < communicator->num_ranks; peer++) {
        note_peer(communicator, peer, true);
        note_peer(communicator, peer, false);
    }
    size_t whole_bytes = num * size_of(type) * (size_t)communicator->num_ranks;
    use(stream, from, whole_bytes, to, whole_bytes);
    send(stream, communicator, whole_bytes, 1);
    keep(to, from, whole_bytes);
    return 0;
}
Status ncclSend(const void *from, size_t num, int type, int peer, Communicator *communicator, Stream stream) {
    note_peer(communicator, peer, true);
    use(stream, from, num * size_of(type), NULL, 0);
    return 0;
}
Status ncclRecv(void *to, size_t num, int type, int peer, Communicator *communicator, Stream stream) {
    note_peer(communicator, peer, false);
    use(stream, NULL, 0, to, num * size_of(type));
    return 0;
}
