// The CUDA runtime's functions for streams, events, graphs and kernels.  Everything has happened by the time it is
// asked for; what a graph's capture allocates is real, what it launches is nothing.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <string.h>

typedef int Error;
typedef void *Handle; // streams, events, graphs, pools, kernels, arrays
typedef struct {
    unsigned x, y, z;
} Dim3;

Error cudaStreamCreateWithFlags(Handle *stream, unsigned flags) {
    NEEDS_CONTEXT();
    RUNTIME_MAY_FAIL(cudaStreamCreate);
    *stream = new_handle();
    order_stream_made(*stream, !(flags & 1)); // 1: cudaStreamNonBlocking
    return SUCCESS;
}
Error cudaStreamCreate(Handle *stream) { return cudaStreamCreateWithFlags(stream, 0); }
Error cudaStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) {
    return cudaStreamCreateWithFlags(stream, flags);
}
Error cudaStreamDestroy(Handle stream) {
    order_stream_gone(stream);
    return SUCCESS;
}
Error cudaStreamSynchronize(Handle stream) {
    NEEDS_CONTEXT();
    RUNTIME_MAY_FAIL(cudaStreamSynchronize);
    if (order_forbids_on("cudaStreamSynchronize", capture_id(stream))) return failed(STREAM_CAPTURE_UNSUPPORTED);
    pools_wait();
    order_host_waits_for_stream(stream);
    return SUCCESS;
}
Error cudaStreamQuery(Handle stream) {
    if (order_forbids_on("cudaStreamQuery", capture_id(stream))) return failed(STREAM_CAPTURE_UNSUPPORTED);
    return order_stream_is_done(stream) ? SUCCESS : NOT_READY;
}
Error cudaStreamGetPriority(Handle stream, int *priority) {
    *priority = 0;
    return SUCCESS;
}
Error cudaStreamGetFlags(Handle stream, unsigned *flags) {
    *flags = 0;
    return SUCCESS;
}
Error cudaStreamGetId(Handle stream, unsigned long long *id) {
    *id = (unsigned long long)(uintptr_t)stream;
    return SUCCESS;
}
Error cudaStreamGetDevice(Handle stream, int *device) {
    *device = current_device;
    return SUCCESS;
}
enum { EXTERNAL = 1 }; // of an event in a capture: each launch of the graph records it, or waits for it
Error cudaStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    if (flags == EXTERNAL && order_captured_event(capture_id(stream), event, true)) return SUCCESS;
    if (order_forbids_wait(stream, event_capture(event))) return failed(STREAM_CAPTURE_ISOLATION);
    stream_wait(stream, event);
    return SUCCESS;
}
// A function of the host that a stream calls, and whoever that tells of it, come after what the stream did before.
static void comes_before_host(Handle stream) {
    if (order_level == ORDER_STRICT && !capture_id(stream)) order_host_waits_for_stream(stream);
}
Error cudaStreamAddCallback(Handle stream, void (*callback)(Handle, Error, void *), void *data, unsigned flags) {
    comes_before_host(stream);
    callback(stream, SUCCESS, data);
    return SUCCESS;
}
Error cudaLaunchHostFunc(Handle stream, void (*function)(void *), void *data) {
    comes_before_host(stream);
    function(data);
    return SUCCESS;
}
Error cudaEventCreate(Handle *event) {
    NEEDS_CONTEXT();
    RUNTIME_MAY_FAIL(cudaEventCreate);
    *event = event_create();
    return failed(*event ? SUCCESS : OUT_OF_MEMORY);
}
Error cudaEventCreateWithFlags(Handle *event, unsigned flags) { return cudaEventCreate(event); }
Error cudaEventDestroy(Handle event) {
    event_destroy(event);
    return SUCCESS;
}
Error cudaEventRecord(Handle event, Handle stream) {
    RUNTIME_MAY_FAIL(cudaEventRecord);
    return failed(event_record(event, stream));
}
Error cudaEventRecordWithFlags(Handle event, Handle stream, unsigned flags) {
    if (flags == EXTERNAL && order_captured_event(capture_id(stream), event, false)) return SUCCESS;
    return cudaEventRecord(event, stream);
}
Error cudaEventQuery(Handle event) {
    RUNTIME_MAY_FAIL(cudaEventQuery);
    if (order_forbids_on("cudaEventQuery", event_capture(event))) return failed(STREAM_CAPTURE_UNSUPPORTED);
    return failed(event_query(event));
}
Error cudaEventSynchronize(Handle event) {
    RUNTIME_MAY_FAIL(cudaEventSynchronize);
    if (order_forbids_on("cudaEventSynchronize", event_capture(event))) return failed(STREAM_CAPTURE_UNSUPPORTED);
    pools_wait();
    host_waits_for_event(event);
    return SUCCESS;
}
Error cudaEventElapsedTime(float *ms, Handle start, Handle end) { return failed(event_elapsed_ms(ms, start, end)); }
Error cudaEventElapsedTime_v2(float *ms, Handle start, Handle end) { return cudaEventElapsedTime(ms, start, end); }

Error cudaStreamBeginCapture(Handle stream, int mode) {
    if (order_level == ORDER_STRICT && order_is_legacy(stream)) return failed(STREAM_CAPTURE_UNSUPPORTED);
    Error error = capture_begin(stream);
    if (error == SUCCESS) order_capture_began(capture_id(stream), stream, mode);
    return failed(error);
}
Error cudaStreamEndCapture(Handle stream, Handle *graph) {
    *graph = new_handle();
    uint64_t capture = capture_id(stream);
    Error error = capture_end(stream);
    if (order_capture_ended(capture, *graph)) return failed(error);
    *graph = NULL;
    return failed(STREAM_CAPTURE_INVALIDATED);
}
Error cudaStreamIsCapturing(Handle stream, int *status) {
    *status = capture_id(stream) != 0;
    return SUCCESS;
}
Error cudaStreamGetCaptureInfo(Handle stream, int *status, unsigned long long *id, Handle *graph,
                               const void **dependencies, const void **edges, size_t *num_dependencies) {
    uint64_t capture = capture_id(stream);
    *status = capture != 0;
    if (id) *id = capture;
    if (graph) *graph = (Handle)(uintptr_t)capture;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (num_dependencies) *num_dependencies = 0;
    return SUCCESS;
}
Error cudaStreamGetCaptureInfo_v3(Handle stream, int *status, unsigned long long *id, Handle *graph,
                                  const void **dependencies, const void **edges, size_t *num_dependencies) {
    return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, edges, num_dependencies);
}
Error cudaStreamGetCaptureInfo_v2(Handle stream, int *status, unsigned long long *id, Handle *graph,
                                  const void **dependencies, size_t *num_dependencies) {
    return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, NULL, num_dependencies);
}
Error cudaThreadExchangeStreamCaptureMode(int *mode) {
    *mode = order_exchange_mode(*mode);
    return SUCCESS;
}
Error cudaGraphCreate(Handle *graph, unsigned flags) {
    *graph = new_handle();
    return SUCCESS;
}
Error cudaGraphInstantiate(Handle *executable, Handle graph, unsigned long long flags) {
    *executable = new_handle();
    order_graph_copied(graph, *executable);
    return SUCCESS;
}
Error cudaGraphInstantiateWithFlags(Handle *executable, Handle graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}
Error cudaGraphLaunch(Handle executable, Handle stream) {
    count(COUNT_LAUNCH);
    order_graph_launched(executable, stream);
    return SUCCESS;
}
Error cudaGraphUpload(Handle executable, Handle stream) { return SUCCESS; }
Error cudaGraphDestroy(Handle graph) {
    order_graph_gone(graph);
    return SUCCESS;
}
Error cudaGraphExecDestroy(Handle executable) {
    order_graph_gone(executable);
    return SUCCESS;
}
Error cudaGraphDebugDotPrint(Handle graph, const char *path, unsigned flags) { return SUCCESS; }
Error cudaGraphGetNodes(Handle graph, Handle *nodes, size_t *num) {
    if (nodes && *num) nodes[0] = NULL;
    *num = 1; // not empty: torch warns about an empty graph
    return SUCCESS;
}
Error cudaGraphNodeGetDependencies(Handle node, Handle *dependencies, void *edges, size_t *num) {
    *num = 0;
    return SUCCESS;
}

static __thread struct {
    Dim3 grid, block;
    size_t shared_bytes;
    Handle stream;
} call_configuration;

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared_bytes, Handle stream) {
    call_configuration.grid = grid;
    call_configuration.block = block;
    call_configuration.shared_bytes = shared_bytes;
    call_configuration.stream = stream;
    return 0;
}
Error __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared_bytes, Handle *stream) {
    *grid = call_configuration.grid;
    *block = call_configuration.block;
    *shared_bytes = call_configuration.shared_bytes;
    *stream = call_configuration.stream;
    return SUCCESS;
}
Error __cudaGetKernel(Handle *kernel, const void *function) {
    *kernel = (Handle)function;
    return SUCCESS;
}
Error cudaGetKernel(Handle *kernel, const void *function) { return __cudaGetKernel(kernel, function); }
Error cudaGetFuncBySymbol(Handle *made, const void *function) { return __cudaGetKernel(made, function); }
Error cudaLaunchKernel(void) {
    NEEDS_CONTEXT();
    RUNTIME_MAY_FAIL(cudaLaunchKernel);
    count(COUNT_LAUNCH);
    return SUCCESS;
}
Error __cudaLaunchKernel(void) { return cudaLaunchKernel(); }
Error cudaLaunchKernelExC(void) { return cudaLaunchKernel(); }
Error cudaLaunchCooperativeKernel(void) { return cudaLaunchKernel(); }
Error cudaFuncSetAttribute(const void *function, int attribute, int value) { return SUCCESS; }
Error cudaFuncSetCacheConfig(const void *function, int configuration) { return SUCCESS; }

typedef struct {
    size_t shared_bytes, constant_bytes, local_bytes;
    int max_threads, num_registers, ptx_version, binary_version, cache_mode, max_dynamic_shared_bytes, carveout;
    int cluster_must_be_set, cluster_width, cluster_height, cluster_depth, cluster_policy, non_portable_cluster;
} FunctionAttributes;

Error cudaFuncGetAttributes(FunctionAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->max_threads = 1024;
    attributes->num_registers = 32;
    attributes->ptx_version = attributes->binary_version = kernel_architecture(function);
    attributes->max_dynamic_shared_bytes = attribute_of(97, current_device);
    return SUCCESS;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *num, const void *function, int block,
                                                             size_t shared_bytes, unsigned flags) {
    *num = 2;
    return SUCCESS;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *num, const void *function, int block, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num, function, block, shared_bytes, 0);
}
Error cudaOccupancyMaxActiveClusters(int *num, const void *function, const void *launch) {
    *num = 1;
    return SUCCESS;
}
Error cudaOccupancyMaxPotentialClusterSize(int *size, const void *function, const void *launch) {
    return cudaOccupancyMaxActiveClusters(size, function, launch);
}
Error cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *function, int num_blocks, int block) {
    *bytes = 49152;
    return SUCCESS;
}
