// NVIDIA's libraries over the virtual GPU: what callers read back from them is plausible, what they compute is nothing.
//
// Contract: functions that only enqueue work are not here (a stub that returns 0 does); here are those that hand
// something back: handles, versions, sizes of workspaces, pointers.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <string.h>

typedef int Status;
typedef void *Handle;

// --- cuBLAS and cuBLASLt

typedef struct { Handle stream; int pointer_mode, math_mode; } Blas;
static __thread Blas blas; // what was set last is what is read back

Status cublasCreate_v2(Handle *handle) { *handle = new_handle(); return 0; }
Status cublasDestroy_v2(Handle handle) { (void)handle; return 0; }
Status cublasGetVersion_v2(Handle handle, int *version) { (void)handle; *version = 130100; return 0; }
Status cublasGetProperty(int which, int *value) { *value = which == 0 ? 13 : 0; return 0; }
Status cublasSetStream_v2(Handle handle, Handle stream) { (void)handle; blas.stream = stream; return 0; }
Status cublasGetStream_v2(Handle handle, Handle *stream) { (void)handle; *stream = blas.stream; return 0; }
Status cublasSetPointerMode_v2(Handle handle, int mode) { (void)handle; blas.pointer_mode = mode; return 0; }
Status cublasGetPointerMode_v2(Handle handle, int *mode) { (void)handle; *mode = blas.pointer_mode; return 0; }
Status cublasSetMathMode(Handle handle, int mode) { (void)handle; blas.math_mode = mode; return 0; }
Status cublasGetMathMode(Handle handle, int *mode) { (void)handle; *mode = blas.math_mode; return 0; }
Status cublasGetAtomicsMode(Handle handle, int *mode) { (void)handle; *mode = 0; return 0; }
Status cublasGetSmCountTarget(Handle handle, int *target) { (void)handle; *target = 0; return 0; }
const char *cublasGetStatusString(Status status) { return status == 0 ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_INVALID_VALUE"; }
const char *cublasGetStatusName(Status status) { return cublasGetStatusString(status); }
size_t cublasLtGetVersion(void) { return 130100; }
size_t cublasLtGetCudartVersion(void) { return 13000; }
Status cublasLtCreate(Handle *handle) { *handle = new_handle(); return 0; }
Status cublasLtMatmulDescCreate(Handle *made) { *made = new_handle(); return 0; }
Status cublasLtMatrixLayoutCreate(Handle *made) { *made = new_handle(); return 0; }
Status cublasLtMatmulPreferenceCreate(Handle *made) { *made = new_handle(); return 0; }
Status cublasLtMatrixTransformDescCreate(Handle *made) { *made = new_handle(); return 0; }

typedef struct { uint64_t algorithm[8]; size_t workspace_bytes; int state; float waves; int reserved[4]; } Heuristic;

Status cublasLtMatmulAlgoGetHeuristic(Handle handle, Handle operation, Handle a, Handle b, Handle c, Handle d, Handle preference,
                                      int num_wanted, Heuristic *results, int *num) {
    (void)handle; (void)operation; (void)a; (void)b; (void)c; (void)d; (void)preference; (void)num_wanted;
    memset(results, 0, sizeof *results);
    *num = 1;
    return 0;
}
