"""Wordings without figures: of libraries other than PyTorch, then those of drivers, which many libraries hand on.

Contract: the first wording that fits a place in a text is the one that counts.
"""

import re

from stalloc.analysis.error_text import HOST, KV_CACHE, ON_CHIP, SHARED
from stalloc.analysis.error_wording import (
    BNB,
    CHIP,
    CUPY,
    HOST_MEMORY,
    JAX,
    NCCL,
    NVIDIA_SMI,
    ORT,
    OUTSIDE,
    PINNED,
    RMM,
    ROCM,
    SGLANG,
    SHM,
    TGI,
    VLLM,
    worded,
)

OF_LIBRARIES = (
    worded("CuPy", r"[Oo]ut of memory allocating <wanted> \(allo", CUPY),
    worded(
        "RMM",
        r"RMM[_ ](?:failure|ERROR)[^\n]{0,300}(?:[Mm]aximum pool size|memory limit|MEMORY)|aximum pool size "
        r"exceeded",
        RMM,
        told="limit",
    ),
    worded(
        "RMM",
        r"RMM_ERROR_OUT_OF_MEMORY|(?:bad_alloc|out_of_memory): (?:out_of_memory: )?(?:CUDA error|RMM)",
        f"RMM asked the driver, which had no room: hold less, or let cuDF spill (CUDF_SPILL=on); {NVIDIA_SMI}",
    ),
    worded(
        "CUDA",
        r"(?:cudaMallocHost|cudaHostAlloc|cudaHostRegister|cuMemHostAlloc|cuMemAllocHost|hipHostMalloc|"
        r"hipHostRegister)\b|pinned host memory|in pin_memory\b(?=[\s\S]{0,400}out of memory)",
        PINNED,
        HOST,
    ),
    worded(
        "Numba",
        r"Call to cuMemAlloc\w* results in \w*OUT_OF_MEMORY",
        f"Hold less (numba.cuda frees in batches: cuda.current_context().deallocations.clear()); {NVIDIA_SMI}",
    ),
    worded("PyCUDA", r"cuMemAlloc failed: out of memory|pycuda\.\w+\.MemoryError", f"Hold less; {NVIDIA_SMI}"),
    worded(
        "TensorFlow",
        r"Dst tensor is not initialized",
        f"A copy to the GPU found no room: a smaller batch; {NVIDIA_SMI}",
    ),
    worded("JAX", r"(?:RESOURCE_EXHAUSTED|XlaRuntimeError)[^\n]{0,200}[Mm]emory|RESOURCE_EXHAUSTED", JAX),
    worded(
        "vLLM",
        r"No available memory for the cache blocks|larger than the maximum number of tokens that can be stored "
        r"in(?: the)? KV cache|Available KV cache memory: -|not enough KV cache space|out of memory occurred when "
        r"warming up sampler",
        VLLM,
        KV_CACHE,
    ),
    worded("SGLang", r"mem[-_]fraction[-_]static|KV cache pool is full", SGLANG, KV_CACHE),
    worded("Text Generation Inference", r"Not enough memory to handle", TGI, KV_CACHE),
    worded("ONNX Runtime", r"CUDA failure 2: out of memory|BFCArena::AllocateRawInternal", ORT),
    worded(
        "Triton",
        r"out of resources?: \w|OutOfResources|too many resources requested for launch|uses too much shared data",
        CHIP,
        ON_CHIP,
        "limit",
    ),
    worded(
        "Triton",
        r"Triton Error \[\w+\]: out of memory",
        f"A kernel could not be loaded, or its scratch memory not be had: leave room outside of PyTorch's "
        f"allocator; {NVIDIA_SMI}",
    ),
    worded(
        "NCCL",
        r"(?:NCCL|nccl)[^\n]{0,300}(?:out of memory|Failed to (?:CUDA|cuda))|Cuda failure (?:\d+ )?'out of memory'",
        NCCL,
    ),
    worded("bitsandbytes", r"Error out of memory at line \d+ in file", BNB),
    worded(
        "the host",
        r"DataLoader worker[^\n]{0,200}(?:Bus error|shared memory)|out of shared memory|shared memory limit|"
        r"/dev/shm|shared memory object|No space left on device[^\n]{0,80}shm",
        SHM,
        SHARED,
    ),
    worded(
        "the host",
        r"[Oo]ut of memory: Killed process|oom-kill|oom_kill|OOMKilled|Memory cgroup out of memory|DataLoader "
        r"worker[^\n]{0,80}signal: Killed|node running low on memory|Cannot allocate memory|"
        r"java\.lang\.OutOfMemoryError: Java heap",
        HOST_MEMORY,
        HOST,
    ),
    worded(
        "Spark RAPIDS",
        r"Gpu(?:Split[Aa]nd)?RetryOOM|Could not allocate native memory",
        "Smaller spark.rapids.sql.batchSizeBytes, or fewer spark.rapids.sql.concurrentGpuTasks.",
    ),
    worded(
        "Intel XPU",
        r"(?:UR|ZE)_RESULT_ERROR_OUT_OF_\w+|PI_ERROR_OUT_OF_\w+|Allocation is out of device memory",
        "Hold less, or torch.xpu.empty_cache() before; `xpu-smi ps` names who holds the device.",
    ),
    worded(
        "Ascend (NPU)",
        r"EL0004|aclrtMalloc\w*|error code is 2070(?:01|18)|rtMalloc",
        "Hold less; `npu-smi info` names who holds the device.",
    ),
    worded(
        "Metal",
        r"CallbackErrorOutOfMemory|Insufficient Memory \(",
        "Hold less: the memory of the whole machine is short.",
    ),
    worded("Vulkan", r"(?:VK_)?ERROR_OUT_OF_DEVICE_MEMORY|ErrorOutOfDeviceMemory", "Hold less, or a smaller model."),
    worded(
        "OpenCL",
        r"CL_(?:MEM_OBJECT_ALLOCATION_FAILURE|OUT_OF_RESOURCES|OUT_OF_HOST_MEMORY)",
        "Hold less, or smaller buffers.",
    ),
    worded("MXNet", r"cudaMalloc(?: retry)? failed: out of memory", f"A smaller batch; {NVIDIA_SMI}"),
    worded("Thrust", r"thrust::\S{0,60}bad_alloc|parallel_for failed: out of memory", f"Hold less; {NVIDIA_SMI}"),
)

#: names that drivers and their libraries give the error
OF_DRIVERS = (
    worded(
        "HIP",
        r"HIP error: out of memory|hipErrorOutOfMemory|hipErrorMemoryAllocation|HIPBLAS_STATUS_ALLOC_FAILED|"
        r"rocblas_status_memory_error|miopenStatusAllocFailed|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        ROCM,
    ),
    worded(
        "CUDA",
        r"CUDA (?:driver )?error:? (?:\d+: )?(?:\w+: )?out of memory|(?:CUDA_|NVRTC_)ERROR_OUT_OF_MEMORY|"
        r"cudaError(?:MemoryAllocation|OutOfMemory)|CU(?:BLAS|DNN|SOLVER|SPARSE|RAND|"
        r"TENSOR)_STATUS_(?:ALLOC(?:ATION)?_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)|CUFFT_ALLOC_FAILED|"
        r"CUDA_OUT_OF_MEMORY|cuda runtime error \(2\)|error=2 : out of memory|CUBLAS_STATUS_NOT_INITIALIZED|CUDA "
        r"failed with error out of memory|cudaMalloc\w* failed",
        OUTSIDE,
    ),
)

UNKNOWN_ADVICE = f"Whether this is memory of the GPU cannot be told from it: {NVIDIA_SMI}"
_ALLOCATES = r"(?:[Aa]lloc(?:at\w+)?|request\w*)"
#: what is left: a line that says so in words of its own
IN_OTHER_WORDS = re.compile(
    r"(?:[Oo]ut[ _-]?[Oo]f[ _-]?[Mm]em|OUT[ _]OF[ _]\w*MEMORY|OutOfMemory|\bOOM\b|bad_alloc|\bMemoryError\b"
    r"|(?:[Nn]ot enough|[Ii]nsufficient|[Rr]an out of)(?: \w+){0,3} (?:memory|VRAM|vram)|RESOURCE_EXHAUSTED"
    r"|(?:[Ff]ailed|[Uu]nable|[Cc]annot|[Cc]ould not|[Cc]an't|[Cc]ouldn't)(?: to)? (?:re)?allocat|ALLOC(?:ATION)?_FAIL"
    r"|[Aa]llocation (?:of \S+ \w+ )?(?:failed|failure|error)|[Mm]emory limit exceeded"
    r"|exceed\w* [^\n]{0,9}(?:available|GPU|device|video) memory)"
)
WANTED = re.compile(rf"{_ALLOCATES}[^\n\d]{{0,60}}(\d{{5,}}|\d[\d.,]* ?(?:[KMGT]i?B|bytes))\b")
