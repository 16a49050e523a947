// The workspace of a convolution, by the table that Python hands over (cudnn_workspaces.csv).
//
// Contract: the first row that fits answers; where none does, the workspace is 0.  Each different convolution that is
// asked about is kept with the row that answered, so that a report can say how much of a peak is not known for certain.
#define _GNU_SOURCE
#include "virtual_convolution.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static WorkspaceRow *rows; // set once, before torch is loaded
static int64_t num_rows;

static pthread_mutex_t asked_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(asked_lock)
enum { MAX_ASKED = 4096 }; // different convolutions of a program; later ones are answered, not kept
static AskedConvolution *asked; // under asked_lock
static int64_t num_asked;

static int guesses; // -1: workspaces that no GPU was seen to ask for are none; 1: the most that they may be; 0: as said
void stalloc_virtual_set_guesses(int which) { guesses = which; }

int stalloc_virtual_set_workspaces(const WorkspaceRow *table, int64_t num) {
    WorkspaceRow *copy = malloc((size_t)num * sizeof *copy);
    if (!copy) return OUT_OF_MEMORY;
    memcpy(copy, table, (size_t)num * sizeof *copy);
    rows = copy;
    num_rows = num;
    return SUCCESS;
}

// The convolutions asked about so far, at most `most`; returns how many were written.
int64_t stalloc_virtual_convolutions(AskedConvolution *out, int64_t most) {
    pthread_mutex_lock(&asked_lock);
    int64_t num = num_asked < most ? num_asked : most;
    if (num) memcpy(out, asked, (size_t)num * sizeof *asked);
    pthread_mutex_unlock(&asked_lock);
    return num;
}

static int64_t element_bytes(int type) { // cudnnDataType_t
    switch (type) {
    case 1: return 8;           // double
    case 2:
    case 9: return 2;           // half, bfloat16
    case 3:
    case 12:
    case 13: return 1;          // bytes, eight-bit floats
    default: return 4;
    }
}

static int64_t tiled(int64_t size, int64_t tile) { // each tile gives tile - 2 of a 3x3 window's outputs
    int64_t step = tile > 2 ? tile - 2 : 1;
    return (size + step - 1) / step * tile;
}

// `tile`, if it is not 0, cuts the sizes that are neither the first nor the channels into tiles; a filter is one.
static int64_t padded_bytes(const Tensor *tensor, const WorkspaceRow *row, int64_t tile, bool is_filter) {
    int64_t bytes = element_bytes(tensor->type);
    int64_t multiple = row->channel_multiple > 0 ? row->channel_multiple : 1;
    for (int i = 0; i < tensor->rank; i++)
        if (i == 1) bytes *= (int64_t)round_up((size_t)tensor->sizes[i], (size_t)multiple);
        else bytes *= i < 2 || !tile ? tensor->sizes[i] : is_filter ? tile : tiled(tensor->sizes[i], tile);
    return (int64_t)round_up((size_t)bytes, row->round_bytes > 0 ? (size_t)row->round_bytes : 1);
}

static bool in_range(int64_t value, int64_t from, int64_t below) { return value >= from && (!below || value < below); }
static bool is_any_or(int64_t wanted, int64_t value) { return wanted < 0 || wanted == value; }

static bool has_sizes(const int64_t *wanted, const int64_t *sizes, int num) {
    for (int i = 0; i < num; i++)
        if (wanted[i] != sizes[i]) return false;
    return true;
}

// Whether cuDNN has Winograd's algorithm for it, window and stride aside.
static bool can_be_tiled(const Convolution *c) {
    return c->filter.rank == 4 && c->dilations[0] == 1 && c->dilations[1] == 1;
}

static bool fits(const WorkspaceRow *row, const Convolution *c, int cudnn_version) {
    bool strided = false, has_window = true;
    int64_t widest = 1;
    for (int i = 2; i < c->filter.rank; i++) {
        int64_t size = c->filter.sizes[i];
        widest = size > widest ? size : widest;
        has_window = has_window && size == row->window;
        strided = strided || c->strides[i - 2] != 1;
    }
    if (row->window <= 0) has_window = row->window < 0 || widest > 1; // any, or wide
    bool grouped = c->input.sizes[1] != c->filter.sizes[1], last = c->input.rank > 2 && c->input.strides[1] == 1;
    if ((row->tile && !can_be_tiled(c)) || !in_range(cudnn_version, row->cudnn_from, row->cudnn_below) ||
        !in_range(10 * gpu.major + gpu.minor, row->architecture_from, row->architecture_below) ||
        !is_any_or(row->element_bytes, element_bytes(c->input.type)) || !is_any_or(row->channels_last, last) ||
        !is_any_or(row->direction, c->direction) || !has_window ||
        !is_any_or(row->strided, strided) || !is_any_or(row->grouped, grouped) ||
        !is_any_or(row->several, c->input.sizes[0] > 1))
        return false;
    return !row->input[0] || (has_sizes(row->input, c->input.sizes, c->input.rank) &&
                              has_sizes(row->filter, c->filter.sizes, c->filter.rank) &&
                              has_sizes(row->stride, c->strides, c->input.rank - 2));
}

// How much more than `bytes` it may be: to so many times the tensors, and two partial sums of the filter; where that is
// twice or more, to all tensors in Winograd's tiles of 6 if those of a 3x3 window are more.
static int64_t unknown_bytes(const WorkspaceRow *row, const Convolution *c, int64_t bytes) {
    if (!row->unknown_bytes || !row->unknown_tensors) return row->unknown_bytes;
    int64_t filter = padded_bytes(&c->filter, row, 0, true);
    int64_t tensors = padded_bytes(&c->input, row, 0, false) + filter + padded_bytes(&c->output, row, 0, false);
    int64_t most = row->unknown_tensors * tensors + 2 * filter;
    if (row->unknown_tensors > 1 && row->window == 3 && can_be_tiled(c)) {
        int64_t in_tiles = padded_bytes(&c->input, row, 6, false) + padded_bytes(&c->filter, row, 6, true) +
                           padded_bytes(&c->output, row, 6, false);
        if (in_tiles > most) most = in_tiles;
    }
    int64_t more = most - bytes;
    if (more < 512) more = 512; // it is a guess, however small
    return more < row->unknown_bytes ? more : row->unknown_bytes;
}

static void remember(const Convolution *c, int64_t row, int64_t workspace_bytes, int64_t unknown) {
    pthread_mutex_lock(&asked_lock);
    if (!asked) asked = calloc(MAX_ASKED, sizeof *asked);
    int64_t i = 0;
    while (asked && i < num_asked && memcmp(&asked[i].convolution, c, sizeof *c)) i++;
    if (asked && i == num_asked && num_asked < MAX_ASKED)
        asked[num_asked++] = (AskedConvolution){*c, row, workspace_bytes, unknown};
    pthread_mutex_unlock(&asked_lock);
}

int64_t convolution_workspace_bytes(const Convolution *c, int cudnn_version) {
    if (c->direction == NO_CONVOLUTION) return 0;
    int64_t i = 0, bytes = 0, unknown = 0;
    while (i < num_rows && !fits(&rows[i], c, cudnn_version)) i++;
    if (i < num_rows) {
        const WorkspaceRow *row = &rows[i];
        bytes = row->more_bytes;
        if (row->num_inputs) bytes += row->num_inputs * padded_bytes(&c->input, row, row->tile, false);
        if (row->num_filters) bytes += row->num_filters * padded_bytes(&c->filter, row, row->tile, true);
        if (row->num_outputs) bytes += row->num_outputs * padded_bytes(&c->output, row, row->tile, false);
        unknown = unknown_bytes(row, c, bytes);
        if (unknown && guesses) bytes = guesses < 0 ? 0 : bytes + unknown;
    }
    remember(c, i < num_rows ? i : -1, bytes, unknown);
    return bytes;
}
