// cuDNN's recurrent networks over the virtual GPU: the sizes of their weights, and where each lies.
//
// Contract: the weights are laid out as cuDNN does it, all matrices (by layer, direction and gate), then all biases, so
// their sum is exact.  The workspace and the reserve of a training step are an estimate: what a backward pass has to
// keep, the gates and the states of every step.  Descriptors are as large as what is set in them.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <stdlib.h>
#include <string.h>

typedef int Status;
typedef void *Handle;
enum { NO_BIAS = 0, DOUBLE_BIAS = 2 };

typedef struct {
    int cell, bias, directions, input, hidden, projected, layers;
    size_t element_bytes;
} Network;
typedef struct {
    int longest, batch, vector;
} Sequences;
typedef struct {
    int type, rank, sizes[8];
} Sizes;

static size_t bytes_of(int type) { return type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4; } // cudnnDataType_t

#define MAKES(function, Kind)                                                                                          \
    Status function(Handle *made) {                                                                                    \
        *made = calloc(1, sizeof(Kind));                                                                               \
        return *made ? 0 : 1002;                                                                                       \
    }
#define DESTROYS(function)                                                                                             \
    Status function(Handle made) {                                                                                     \
        free(made);                                                                                                    \
        return 0;                                                                                                      \
    }
MAKES(cudnnCreateRNNDescriptor, Network)
DESTROYS(cudnnDestroyRNNDescriptor)
MAKES(cudnnCreateRNNDataDescriptor, Sequences)
DESTROYS(cudnnDestroyRNNDataDescriptor)
MAKES(cudnnCreateTensorDescriptor, Sizes)
DESTROYS(cudnnDestroyTensorDescriptor)
MAKES(cudnnCreateFilterDescriptor, Sizes)
DESTROYS(cudnnDestroyFilterDescriptor)

Status cudnnSetTensorNdDescriptor(Sizes *tensor, int type, int rank, const int *sizes, const int *strides) {
    tensor->type = type;
    tensor->rank = rank < 8 ? rank : 8;
    memcpy(tensor->sizes, sizes, sizeof(int) * (size_t)tensor->rank);
    return 0;
}
Status cudnnSetFilterNdDescriptor(Sizes *tensor, int type, int format, int rank, const int *sizes) {
    return cudnnSetTensorNdDescriptor(tensor, type, rank, sizes, NULL);
}
static Status read_sizes(const Sizes *tensor, int wanted, int *type, int *rank, int *sizes, int *strides) {
    *type = tensor->type;
    *rank = tensor->rank;
    int stride = 1;
    for (int i = (tensor->rank < wanted ? tensor->rank : wanted) - 1; i >= 0; i--) {
        sizes[i] = tensor->sizes[i];
        if (strides) strides[i] = stride;
        stride *= sizes[i];
    }
    return 0;
}
Status cudnnGetTensorNdDescriptor(const Sizes *tensor, int wanted, int *type, int *rank, int *sizes, int *strides) {
    return read_sizes(tensor, wanted, type, rank, sizes, strides);
}
Status cudnnGetFilterNdDescriptor(const Sizes *tensor, int wanted, int *type, int *format, int *rank, int *sizes) {
    *format = 0;
    return read_sizes(tensor, wanted, type, rank, sizes, NULL);
}

Status cudnnSetRNNDescriptor_v8(Network *network, int algorithm, int cell, int bias, int direction, int input_mode,
                                int data_type, int precision, int math, int input, int hidden, int projected,
                                int layers, Handle dropout, unsigned flags) {
    *network = (Network){cell, bias, direction == 0 ? 1 : 2, input, hidden, projected, layers, bytes_of(data_type)};
    return 0;
}
Status cudnnSetRNNDataDescriptor(Sequences *sequences, int type, int layout, int longest, int batch, int vector,
                                 const int *lengths, void *padding) {
    *sequences = (Sequences){longest, batch, vector};
    return 0;
}

static size_t num_gates(const Network *network) { return network->cell == 2 ? 4 : network->cell == 3 ? 3 : 1; }
static bool has_projection(const Network *network) {
    return network->projected > 0 && network->projected != network->hidden;
}
static size_t state_size(const Network *network) {
    return (size_t)(has_projection(network) ? network->projected : network->hidden);
}
static size_t input_size(const Network *network, int pseudo_layer) { // of a direction of a layer
    bool first = pseudo_layer < network->directions;
    return first ? (size_t)network->input : state_size(network) * (size_t)network->directions;
}
static size_t matrix_elements(const Network *network, int pseudo_layer) { // of all gates, input, state, projection
    size_t columns = input_size(network, pseudo_layer) + state_size(network), rows = (size_t)network->hidden;
    return num_gates(network) * rows * columns + (has_projection(network) ? rows * state_size(network) : 0);
}
static size_t bias_elements(const Network *network) {
    size_t one = num_gates(network) * (size_t)network->hidden;
    return network->bias == NO_BIAS ? 0 : network->bias == DOUBLE_BIAS ? 2 * one : one;
}
static int num_pseudo_layers(const Network *network) { return network->layers * network->directions; }

Status cudnnGetRNNWeightSpaceSize(Handle handle, const Network *network, size_t *bytes) {
    size_t elements = 0;
    for (int i = 0; i < num_pseudo_layers(network); i++)
        elements += matrix_elements(network, i) + bias_elements(network);
    *bytes = elements * network->element_bytes;
    return 0;
}

static void describe(Sizes *found, const Network *network, size_t rows, size_t columns) {
    if (!found) return;
    *found = (Sizes){network->element_bytes == 8 ? 1 : network->element_bytes == 2 ? 2 : 0, 3, {1, (int)rows, (int)columns}};
}

Status cudnnGetRNNWeightParams(Handle handle, const Network *network, int pseudo_layer, size_t space_bytes,
                               const char *space, int linear, Sizes *matrix, void **matrix_at, Sizes *bias,
                               void **bias_at) {
    size_t gates = num_gates(network), hidden = (size_t)network->hidden, of_input = input_size(network, pseudo_layer);
    size_t before = 0, matrices = 0, gate = (size_t)linear;
    for (int i = 0; i < num_pseudo_layers(network); i++) {
        if (i < pseudo_layer) before += matrix_elements(network, i);
        matrices += matrix_elements(network, i);
    }
    size_t columns = gate < gates ? of_input : state_size(network), rows = hidden, offset;
    if (gate < gates) {
        offset = gate * hidden * of_input;
    } else if (gate < 2 * gates) {
        offset = gates * hidden * of_input + (gate - gates) * hidden * columns;
    } else { // the projection
        offset = gates * hidden * (of_input + columns);
        rows = state_size(network);
        columns = hidden;
    }
    if (matrix_at) *matrix_at = (void *)(space + (before + offset) * network->element_bytes);
    describe(matrix, network, rows, columns);
    bool is_there = gate < bias_elements(network) / hidden;
    size_t at = matrices + (size_t)pseudo_layer * bias_elements(network) + gate * hidden;
    if (bias_at) *bias_at = is_there ? (void *)(space + at * network->element_bytes) : NULL;
    describe(bias, network, is_there ? hidden : 0, 1);
    return 0;
}

Status cudnnGetRNNTempSpaceSizes(Handle handle, const Network *network, int training, const Sequences *sequences,
                                 size_t *work_bytes, size_t *reserve_bytes) {
    size_t steps = (size_t)sequences->longest * (size_t)sequences->batch, gates = num_gates(network);
    size_t layers = (size_t)num_pseudo_layers(network), hidden = (size_t)network->hidden;
    size_t states = gates == 4 ? 2 : 1; // an LSTM has a cell state too
    if (work_bytes) *work_bytes = steps * hidden * gates * (size_t)network->directions * network->element_bytes;
    if (reserve_bytes) *reserve_bytes = training ? steps * hidden * layers * (gates + states) * network->element_bytes : 0;
    return 0;
}

// A generator's state for each thread that may run: 2,048 a multiprocessor at 8 bytes, an estimate.
Status cudnnDropoutGetStatesSize(Handle handle, size_t *bytes) {
    *bytes = (size_t)gpu.num_multiprocessors * 2048 * 8;
    return 0;
}

// The older functions of cuDNN 8, which PyTorch before 2.3 calls: the input is told with each question, by a descriptor
// of the first step or of all of them.
Status cudnnSetRNNDescriptor_v6(Handle handle, Network *network, int hidden, int layers, Handle dropout, int input_mode,
                                int direction, int cell, int algorithm, int precision) {
    *network = (Network){cell, DOUBLE_BIAS, direction == 0 ? 1 : 2, 0, hidden, 0, layers, bytes_of(precision)};
    return 0;
}
Status cudnnSetRNNProjectionLayers(Handle handle, Network *network, int projected, int of_output) {
    network->projected = projected;
    return 0;
}

static const Network *with_input(Network *network, const Sizes *step) {
    network->input = step->sizes[1];
    network->element_bytes = bytes_of(step->type);
    return network;
}
Status cudnnGetRNNParamsSize(Handle handle, Network *network, const Sizes *step, size_t *bytes, int type) {
    return cudnnGetRNNWeightSpaceSize(handle, with_input(network, step), bytes);
}
Status cudnnGetRNNLinLayerMatrixParams(Handle handle, Network *network, int pseudo_layer, const Sizes *step,
                                       Handle weights, const char *space, int linear, Sizes *matrix, void **at) {
    return cudnnGetRNNWeightParams(handle, with_input(network, step), pseudo_layer, 0, space, linear, matrix, at, NULL,
                                   NULL);
}
Status cudnnGetRNNLinLayerBiasParams(Handle handle, Network *network, int pseudo_layer, const Sizes *step,
                                     Handle weights, const char *space, int linear, Sizes *bias, void **at) {
    return cudnnGetRNNWeightParams(handle, with_input(network, step), pseudo_layer, 0, space, linear, NULL, NULL, bias,
                                   at);
}
static Status temporary_bytes(Handle handle, Network *network, int num_steps, const Sizes *const *steps, size_t *work,
                              size_t *reserve) {
    Sequences sequences = {num_steps, num_steps ? steps[0]->sizes[0] : 0, 0}; // the longest sequences come first
    if (num_steps) with_input(network, steps[0]);
    return cudnnGetRNNTempSpaceSizes(handle, network, 1, &sequences, work, reserve);
}
Status cudnnGetRNNWorkspaceSize(Handle handle, Network *network, int num_steps, const Sizes *const *steps,
                                size_t *bytes) {
    return temporary_bytes(handle, network, num_steps, steps, bytes, NULL);
}
Status cudnnGetRNNTrainingReserveSize(Handle handle, Network *network, int num_steps, const Sizes *const *steps,
                                      size_t *bytes) {
    return temporary_bytes(handle, network, num_steps, steps, NULL, bytes);
}
