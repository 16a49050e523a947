// A convolution as cuDNN is told of it, and the table of workspaces that it asks for.
#ifndef STALLOC_VIRTUAL_CONVOLUTION_H
#define STALLOC_VIRTUAL_CONVOLUTION_H

#include "virtual_gpu.h"

#define MAX_RANK 8

enum { NO_CONVOLUTION = -1, FORWARD = 0, BACKWARD_DATA = 1, BACKWARD_FILTER = 2 };

typedef struct {
    int type, rank; // cudnnDataType_t; dimensions, those of batch and channels included
    int64_t sizes[MAX_RANK], strides[MAX_RANK];
} Tensor;

typedef struct {
    int direction;
    Tensor input, filter, output; // or their gradients
    int64_t strides[MAX_RANK], dilations[MAX_RANK], paddings[MAX_RANK];
} Convolution;

// A row of the table: which convolutions it is for, and their workspace.  -1 stands for any; a range of 0 to 0 too.
typedef struct {
    int64_t cudnn_from, cudnn_below, architecture_from, architecture_below;
    int64_t element_bytes, channels_last, direction, window, strided, grouped, several; // several: images
    int64_t input[MAX_RANK], filter[MAX_RANK], stride[MAX_RANK]; // one shape alone, where input[0] is not 0
    int64_t num_inputs, num_filters, num_outputs; // copies of each tensor, with its channels rounded up to a
    int64_t channel_multiple, tile, round_bytes;  // multiple, in Winograd's tiles of `tile`, if that is not 0, each copy
                                                  // rounded up to so many bytes,
    int64_t more_bytes;                           // and so much more
    int64_t unknown_bytes;   // how far off that may be at most; 0 where it was seen
    int64_t unknown_tensors; // nor in all more than so many times the tensors and 2 filters; 0 for no such limit
} WorkspaceRow;

// One convolution that a program asked about, and the row that answered (-1: none).
typedef struct {
    Convolution convolution;
    int64_t row, workspace_bytes;
    int64_t unknown_bytes; // how far off that may be
} AskedConvolution;

int64_t convolution_workspace_bytes(const Convolution *convolution, int cudnn_version);

#endif
