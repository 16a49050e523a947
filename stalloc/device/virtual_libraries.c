// NVIDIA's libraries over the virtual GPU: what callers read back from them is plausible, what they compute is nothing.
//
// Contract: functions that only enqueue work are not here (a stub that returns 0 does); here are those that hand
// something back: handles, versions, sizes of workspaces, pointers.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <string.h>

typedef int Status;
typedef void *Handle;

typedef struct {
    Handle stream;
    int pointer_mode, math_mode;
} Blas;
static __thread Blas blas; // what was set last is what is read back

Status cublasCreate_v2(Handle *handle) {
    *handle = new_handle();
    return 0;
}
Status cublasDestroy_v2(Handle handle) { return 0; }
Status cublasGetVersion_v2(Handle handle, int *version) {
    *version = 130100;
    return 0;
}
Status cublasGetProperty(int which, int *value) {
    *value = which == 0 ? 13 : 0;
    return 0;
}
Status cublasSetStream_v2(Handle handle, Handle stream) {
    blas.stream = stream;
    return 0;
}
Status cublasGetStream_v2(Handle handle, Handle *stream) {
    *stream = blas.stream;
    return 0;
}
Status cublasSetPointerMode_v2(Handle handle, int mode) {
    blas.pointer_mode = mode;
    return 0;
}
Status cublasGetPointerMode_v2(Handle handle, int *mode) {
    *mode = blas.pointer_mode;
    return 0;
}
Status cublasSetMathMode(Handle handle, int mode) {
    blas.math_mode = mode;
    return 0;
}
Status cublasGetMathMode(Handle handle, int *mode) {
    *mode = blas.math_mode;
    return 0;
}
Status cublasGetAtomicsMode(Handle handle, int *mode) {
    *mode = 0;
    return 0;
}
Status cublasGetSmCountTarget(Handle handle, int *target) {
    *target = 0;
    return 0;
}
const char *cublasGetStatusString(Status status) {
    return status == 0 ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_INVALID_VALUE";
}
const char *cublasGetStatusName(Status status) { return cublasGetStatusString(status); }
size_t cublasLtGetVersion(void) { return 130100; }
size_t cublasLtGetCudartVersion(void) { return 13000; }
Status cublasLtCreate(Handle *handle) {
    *handle = new_handle();
    return 0;
}
Status cublasLtMatmulDescCreate(Handle *made) {
    *made = new_handle();
    return 0;
}
Status cublasLtMatrixLayoutCreate(Handle *made) {
    *made = new_handle();
    return 0;
}
Status cublasLtMatmulPreferenceCreate(Handle *made) {
    *made = new_handle();
    return 0;
}
Status cublasLtMatrixTransformDescCreate(Handle *made) {
    *made = new_handle();
    return 0;
}

typedef struct {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
} Heuristic;

Status cublasLtMatmulAlgoGetHeuristic(Handle handle, Handle operation, Handle a, Handle b, Handle c, Handle d,
                                      Handle preference, int num_wanted, Heuristic *results, int *num) {
    memset(results, 0, sizeof *results);
    *num = 1;
    return 0;
}

// Functions that hand back one thing: a fresh handle, a version, or the size of a workspace (none is needed).
// Callers pass up to twenty words, of which one is the address to fill; the others are of no interest.  On the
// machines that CUDA supports, integers and pointers travel one a word, so reading argument k needs no prototype.
#define ARGUMENTS                                                                                                      \
    uintptr_t a0, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4, uintptr_t a5, uintptr_t a6, uintptr_t a7,    \
        uintptr_t a8, uintptr_t a9, uintptr_t a10, uintptr_t a11, uintptr_t a12, uintptr_t a13, uintptr_t a14,         \
        uintptr_t a15, uintptr_t a16, uintptr_t a17, uintptr_t a18, uintptr_t a19
#define FILLS(function, type, k, value)                                                                                \
    Status function(ARGUMENTS) {                                                                                       \
        *(type *)a##k = (type)(value);                                                                                 \
        return 0;                                                                                                      \
    }
#define HANDLE(function) FILLS(function, Handle, 0, new_handle())
#define NO_SPACE(function, type, k) FILLS(function, type, k, 0)
#define NO_SPACE_TWICE(function, k, l)                                                                                 \
    Status function(ARGUMENTS) {                                                                                       \
        *(size_t *)a##k = 0;                                                                                           \
        *(size_t *)a##l = 0;                                                                                           \
        return 0;                                                                                                      \
    }
// one function for each type of element
#define EACH(fill, library, function, type, k)                                                                         \
    fill(library##S##function, type, k) fill(library##D##function, type, k) fill(library##C##function, type, k)        \
        fill(library##Z##function, type, k)
#define EACH_REAL(fill, library, function, type, k)                                                                    \
    fill(library##S##function, type, k) fill(library##D##function, type, k)
#define EACH_COMPLEX(fill, library, function, type, k)                                                                 \
    fill(library##C##function, type, k) fill(library##Z##function, type, k)

// cuBLAS: which argument of a batch is wrong, on the host
EACH(NO_SPACE, cublas, geqrfBatched, int, 6)
EACH(NO_SPACE, cublas, gelsBatched, int, 9)

// cuSOLVER
HANDLE(cusolverDnCreate)
HANDLE(cusolverDnCreateParams)
HANDLE(cusolverDnCreateSyevjInfo) HANDLE(cusolverDnCreateGesvdjInfo) HANDLE(cusolverSpCreate) FILLS(
    cusolverGetProperty, int, 1, 12) EACH(NO_SPACE, cusolverDn, gebrd_bufferSize, int,
                                          3) EACH(NO_SPACE, cusolverDn, geqrf_bufferSize, int,
                                                  5) EACH(NO_SPACE, cusolverDn, gesvd_bufferSize, int, 3)
    EACH(NO_SPACE, cusolverDn, gesvdj_bufferSize,
         int, 12) EACH(NO_SPACE, cusolverDn, gesvdjBatched_bufferSize, int,
                       11) EACH(NO_SPACE, cusolverDn, gesvdaStridedBatched_bufferSize, int, 16)
        EACH(NO_SPACE, cusolverDn, getrf_bufferSize,
             int, 5) EACH(NO_SPACE, cusolverDn, potrf_bufferSize,
                          int, 5) EACH(NO_SPACE, cusolverDn, sytrf_bufferSize, int, 4)
            EACH_REAL(NO_SPACE, cusolverDn, orgqr_bufferSize, int,
                      7) EACH_COMPLEX(NO_SPACE, cusolverDn, ungqr_bufferSize, int, 7)
                EACH_REAL(NO_SPACE, cusolverDn, ormqr_bufferSize, int,
                          11) EACH_COMPLEX(NO_SPACE, cusolverDn, unmqr_bufferSize, int,
                                           11) EACH_REAL(NO_SPACE, cusolverDn, syevd_bufferSize, int, 7)
                    EACH_COMPLEX(NO_SPACE, cusolverDn, heevd_bufferSize,
                                 int, 7) EACH_REAL(NO_SPACE, cusolverDn, syevj_bufferSize,
                                                   int, 7) EACH_COMPLEX(NO_SPACE, cusolverDn, heevj_bufferSize, int, 7)
                        EACH_REAL(NO_SPACE, cusolverDn, syevjBatched_bufferSize, int,
                                  7) EACH_COMPLEX(NO_SPACE, cusolverDn, heevjBatched_bufferSize, int, 7)
#define MIXED(types)                                                                                                   \
    NO_SPACE(cusolverDn##types##gesv_bufferSize, size_t, 11) NO_SPACE(cusolverDn##types##gels_bufferSize, size_t, 11)
                            MIXED(CC) MIXED(
                                CK) MIXED(CY) MIXED(DD)
                                MIXED(DH) MIXED(DS)
                                    MIXED(DX) MIXED(SH)
                                        MIXED(SS) MIXED(SX)
                                            MIXED(ZC) MIXED(ZK)
                                                MIXED(ZY) MIXED(ZZ)
                                                    NO_SPACE_TWICE(cusolverDnXgeqrf_bufferSize, 10,
                                                                   11) NO_SPACE_TWICE(cusolverDnXpotrf_bufferSize, 8, 9)
                                                        NO_SPACE_TWICE(cusolverDnXsyevd_bufferSize, 11, 12)
                                                            NO_SPACE_TWICE(cusolverDnXsyevBatched_bufferSize, 11, 12)
                                                                NO_SPACE_TWICE(cusolverDnXgeev_bufferSize, 17, 18)
                                                                    NO_SPACE_TWICE(cusolverDnXsytrs_bufferSize, 11, 12)

    // cuSPARSE
    HANDLE(cusparseCreate) HANDLE(cusparseCreateMatDescr) HANDLE(cusparseCreateCsr) HANDLE(cusparseCreateCoo) HANDLE(
        cusparseCreateCsc) HANDLE(cusparseCreateDnMat) HANDLE(cusparseCreateDnVec) HANDLE(cusparseCreateSpVec)
        HANDLE(cusparseCreateCsric02Info) HANDLE(cusparseCreateCsrilu02Info) HANDLE(cusparseCreateBsric02Info)
            HANDLE(cusparseCreateBsrilu02Info) HANDLE(cusparseCreateBsrsm2Info) HANDLE(cusparseCreateBsrsv2Info) HANDLE(
                cusparseSpGEMM_createDescr) HANDLE(cusparseSpSV_createDescr) HANDLE(cusparseSpSM_createDescr)
                FILLS(cusparseGetVersion, int, 1,
                      12600) NO_SPACE(cusparseSpMM_bufferSize, size_t, 10) NO_SPACE(cusparseSpMV_bufferSize, size_t, 9)
                    NO_SPACE(cusparseSpVV_bufferSize, size_t, 6) NO_SPACE(cusparseSDDMM_bufferSize, size_t, 10)
                        NO_SPACE(cusparseSpSV_bufferSize, size_t, 9) NO_SPACE(cusparseSpSM_bufferSize, size_t, 10)
                            NO_SPACE(cusparseSpGEMM_workEstimation, size_t,
                                     11) NO_SPACE(cusparseSpGEMM_compute, size_t,
                                                  11) NO_SPACE(cusparseCsr2cscEx2_bufferSize, size_t,
                                                               14) NO_SPACE(cusparseDenseToSparse_bufferSize, size_t, 4)
                                NO_SPACE(cusparseSparseToDense_bufferSize, size_t,
                                         4) NO_SPACE(cusparseXcoosort_bufferSizeExt, size_t, 6)
                                    NO_SPACE(cusparseXcscsort_bufferSizeExt, size_t,
                                             6) NO_SPACE(cusparseXcsrsort_bufferSizeExt, size_t, 6)
                                        NO_SPACE(cusparseXcsrgeam2Nnz, int,
                                                 13) EACH(NO_SPACE, cusparse, csrgeam2_bufferSizeExt, size_t,
                                                          19) EACH(NO_SPACE, cusparse, gtsv2_bufferSizeExt, size_t, 8)
                                            EACH(NO_SPACE, cusparse, gtsv2_nopivot_bufferSizeExt, size_t,
                                                 8) EACH(NO_SPACE, cusparse, gtsv2StridedBatch_bufferSizeExt, size_t, 8)
                                                EACH(NO_SPACE, cusparse, gtsvInterleavedBatch_bufferSizeExt, size_t, 8)
                                                    EACH(NO_SPACE, cusparse, gpsvInterleavedBatch_bufferSizeExt, size_t,
                                                         10) EACH(NO_SPACE, cusparse, csric02_bufferSize, int, 8)
                                                        EACH(NO_SPACE, cusparse, csrilu02_bufferSize, int,
                                                             8) EACH(NO_SPACE, cusparse, bsric02_bufferSize, int, 10)
                                                            EACH(NO_SPACE, cusparse, bsrilu02_bufferSize, int, 10)
                                                                EACH(NO_SPACE, cusparse, bsrsm2_bufferSize, int, 13)
                                                                    EACH(NO_SPACE, cusparse, bsrsv2_bufferSize, int, 11)

                                                                        Status cusparseDenseToSparse_analysis(void) {
    return 0;
}
Status cusparseDenseToSparse_convert(void) { return 0; }
Status cusparseSparseToDense(void) { return 0; }
Status cusparseSpMatGetSize(Handle matrix, int64_t *rows, int64_t *columns, int64_t *num_nonzero) {
    *rows = *columns = *num_nonzero = 0;
    return 0;
}

// cuFFT, cuRAND
FILLS(cufftCreate, int, 0, 1)
FILLS(cufftGetVersion, int, 0, 12000)
NO_SPACE(cufftMakePlan1d, size_t, 4)
NO_SPACE(cufftMakePlan2d, size_t, 4)
NO_SPACE(cufftMakePlan3d, size_t, 5)
NO_SPACE(cufftMakePlanMany, size_t, 11)
NO_SPACE(cufftMakePlanMany64, size_t, 11)
NO_SPACE(cufftXtMakePlanMany, size_t, 12)
NO_SPACE(cufftGetSize, size_t, 1)
HANDLE(curandCreateGenerator)
FILLS(curandGetVersion, int, 0, 10400)

// messages: a stub's 0 would be a null pointer
const char *ncclGetErrorString(Status status) {
    return status == 0 ? "no error" : "error of the virtual GPU";
}
const char *ncclGetLastError(Handle communicator) { return "no error"; }
const char *cusparseGetErrorString(Status status) { return ncclGetErrorString(status); }
const char *cusparseGetErrorName(Status status) { return ncclGetErrorString(status); }
const char *cutensorGetErrorString(Status status) { return ncclGetErrorString(status); }
size_t cutensorGetVersion(void) { return 20300; }
