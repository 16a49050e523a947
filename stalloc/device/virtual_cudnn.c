// cuDNN over the virtual GPU: as much of its graph interface as PyTorch uses for convolutions and attention, and what its
// classic functions hand back.  Nothing is computed.
//
// Contract: every graph of operations has two engines, each with one plan: one whose workspace virtual_workspaces.c
// knows, and one that needs none, to which PyTorch turns if there is no memory for the first's.  A descriptor keeps by
// value what is set in it (callers destroy the parts of a graph before the graph), and what is asked of it without having
// been set has no elements.
#define _GNU_SOURCE
#include "virtual_convolution.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef int Status;
typedef void *Handle;

// cudnnBackendAttributeName_t, by its documented numbers
enum {
    CONVOLUTION_DILATIONS = 102,
    CONVOLUTION_STRIDES = 103,
    CONVOLUTION_PADDINGS = 105,
    HEURISTIC_GRAPH = 201,
    HEURISTIC_RESULTS = 202,
    CONFIGURATION_ENGINE = 300,
    CONFIGURATION_WORKSPACE_BYTES = 303,
    CONFIGURATION_SHARED_BYTES = 304,
    PLAN_CONFIGURATION = 401,
    PLAN_WORKSPACE_BYTES = 402,
    FORWARD_CONVOLUTION = 702, // the convolution, its filter, its input, its output
    BACKWARD_DATA_CONVOLUTION = 708,
    BACKWARD_FILTER_CONVOLUTION = 714,
    GRAPH_OPERATIONS = 801,
    GRAPH_NUM_ENGINES = 802,
    TENSOR_TYPE = 901,
    TENSOR_SIZES = 902,
    TENSOR_STRIDES = 903,
    ENGINE_GRAPH = 1300,
    ENGINE_INDEX = 1301,
};
enum { SPARE_MS = 1000 };
typedef struct {
    int kind;
    Tensor tensor;
    Convolution convolution; // of an operation, and of the graph, engine, configuration and plan that it is in
    bool is_spare;           // of an engine, configuration and plan: the one that needs no workspace
} Descriptor;

static int cudnn_version = 91300;
void stalloc_virtual_set_cudnn_version(int version) { cudnn_version = version; }
size_t cudnnGetVersion(void) { return (size_t)cudnn_version; }
size_t cudnnGetCudartVersion(void) { return (size_t)gpu.cuda_version; }
Status cudnnGetProperty(int which, int *value) {
    int major = cudnn_version / (cudnn_version < 10000 ? 1000 : 10000);
    *value = which == 0 ? major : which == 1 ? cudnn_version / 100 % (major < 9 ? 10 : 100) : cudnn_version % 100;
    return 0;
}
const char *cudnnGetErrorString(Status status) {
    return status == 0 ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_NOT_SUPPORTED";
}
static __thread Handle stream_in_use;
Status cudnnCreate(Handle *handle) {
    *handle = new_handle();
    return 0;
}
Status cudnnSetStream(Handle handle, Handle stream) {
    stream_in_use = stream;
    return 0;
}
Status cudnnGetStream(Handle handle, Handle *stream) {
    *stream = stream_in_use;
    return 0;
}

Status cudnnBackendCreateDescriptor(int kind, Descriptor **made) {
    *made = calloc(1, sizeof **made);
    if (!*made) return 1002; // an allocation failed
    (*made)->kind = kind;
    (*made)->convolution.direction = NO_CONVOLUTION;
    return 0;
}
Status cudnnBackendDestroyDescriptor(Descriptor *descriptor) {
    free(descriptor);
    return 0;
}
Status cudnnBackendInitialize(Descriptor *descriptor) { return 0; }
Status cudnnBackendFinalize(Descriptor *descriptor) { return 0; }
Status cudnnBackendExecute(Handle handle, Descriptor *plan, Descriptor *data) {
    count(COUNT_LAUNCH);
    if (plan->is_spare) work_takes(SPARE_MS); // trials of both (cudnn.benchmark) prefer the first
    return 0;
}

static void copy_sizes(int64_t *to, const int64_t *from, int64_t num) {
    for (int64_t i = 0; i < num && i < MAX_RANK; i++) to[i] = from[i];
}

static void set_tensor_of(Convolution *convolution, int direction, int part, const Descriptor *from) {
    convolution->direction = direction;
    if (part == 0) {
        memcpy(convolution->strides, from->convolution.strides, sizeof convolution->strides);
        memcpy(convolution->dilations, from->convolution.dilations, sizeof convolution->dilations);
        memcpy(convolution->paddings, from->convolution.paddings, sizeof convolution->paddings);
    } else {
        *(part == 1 ? &convolution->filter : part == 2 ? &convolution->input : &convolution->output) = from->tensor;
    }
}

Status cudnnBackendSetAttribute(Descriptor *d, int name, int type, int64_t num, const void *array) {
    Descriptor *const *others = array;
    switch (name) {
    case CONVOLUTION_DILATIONS: copy_sizes(d->convolution.dilations, array, num); break;
    case CONVOLUTION_STRIDES: copy_sizes(d->convolution.strides, array, num); break;
    case CONVOLUTION_PADDINGS: copy_sizes(d->convolution.paddings, array, num); break;
    case TENSOR_TYPE: d->tensor.type = *(const int *)array; break;
    case TENSOR_SIZES:
        d->tensor.rank = (int)(num < MAX_RANK ? num : MAX_RANK);
        copy_sizes(d->tensor.sizes, array, num);
        break;
    case TENSOR_STRIDES: copy_sizes(d->tensor.strides, array, num); break;
    case GRAPH_OPERATIONS:
        for (int64_t i = 0; i < num; i++)
            if (others[i]->convolution.direction != NO_CONVOLUTION) d->convolution = others[i]->convolution;
        break;
    case HEURISTIC_GRAPH:
    case ENGINE_GRAPH:
    case CONFIGURATION_ENGINE:
    case PLAN_CONFIGURATION:
        d->convolution = (*others)->convolution;
        d->is_spare = (*others)->is_spare;
        break;
    default:
        if (name >= FORWARD_CONVOLUTION && name < FORWARD_CONVOLUTION + 4)
            set_tensor_of(&d->convolution, FORWARD, name - FORWARD_CONVOLUTION, *others);
        else if (name >= BACKWARD_DATA_CONVOLUTION && name < BACKWARD_DATA_CONVOLUTION + 4)
            set_tensor_of(&d->convolution, BACKWARD_DATA, name - BACKWARD_DATA_CONVOLUTION, *others);
        else if (name >= BACKWARD_FILTER_CONVOLUTION && name < BACKWARD_FILTER_CONVOLUTION + 4)
            set_tensor_of(&d->convolution, BACKWARD_FILTER, name - BACKWARD_FILTER_CONVOLUTION, *others);
    }
    return 0;
}

Status cudnnBackendGetAttribute(Descriptor *d, int name, int type, int64_t wanted, int64_t *num, void *array) {
    int64_t found = 0;
    bool fill = wanted >= 1 && array;
    switch (name) {
    case HEURISTIC_RESULTS:
        found = fill && wanted < 2 ? wanted : 2; // who asks for fewer takes the number for that of those written
        for (int64_t i = 0; fill && i < found; i++) {
            ((Descriptor **)array)[i]->convolution = d->convolution;
            ((Descriptor **)array)[i]->is_spare = i == 1;
        }
        break;
    case CONFIGURATION_ENGINE:
        found = 1;
        if (fill) {
            (*(Descriptor **)array)->convolution = d->convolution;
            (*(Descriptor **)array)->is_spare = d->is_spare;
        }
        break;
    case CONFIGURATION_SHARED_BYTES:
        found = 1;
        if (fill) *(int *)array = 0;
        break;
    case CONFIGURATION_WORKSPACE_BYTES:
    case PLAN_WORKSPACE_BYTES:
        found = 1;
        if (fill) *(int64_t *)array = d->is_spare ? 0 : convolution_workspace_bytes(&d->convolution, cudnn_version);
        break;
    case GRAPH_NUM_ENGINES:
    case ENGINE_INDEX:
        found = 1;
        if (fill) *(int64_t *)array = name == GRAPH_NUM_ENGINES;
        break;
    }
    if (num) *num = found;
    return 0;
}

// What the classic functions hand back.  Batch normalisation asks for nothing in the modes that PyTorch uses.
#define FILLS_NOTHING(function, k)                                                                                     \
    Status function(uintptr_t a0, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4, uintptr_t a5, uintptr_t a6,  \
                    uintptr_t a7, uintptr_t a8, uintptr_t a9, uintptr_t a10) {                                         \
        *(size_t *)a##k = 0;                                                                                           \
        return 0;                                                                                                      \
    }
FILLS_NOTHING(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, 8)
FILLS_NOTHING(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, 5)
FILLS_NOTHING(cudnnGetBatchNormalizationBackwardExWorkspaceSize, 10)
FILLS_NOTHING(cudnnGetCTCLossWorkspaceSize, 8)
FILLS_NOTHING(cudnnGetCTCLossWorkspaceSize_v8, 5)
