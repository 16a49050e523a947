"""Wordings without figures: of libraries other than PyTorch, then those of drivers, which many libraries hand on.

Contract: the first wording that fits a place in a text is the one that counts.
"""

import re

from stalloc.analysis.error_text import HOST, KV_CACHE, ON_CHIP, SHARED
from stalloc.analysis.error_wording import (
    BNB,
    CHIP,
    CHIP_OF_KERNEL,
    CUPY,
    DRIVER,
    HOST_MEMORY,
    JAX,
    KILLED,
    NCCL,
    NPU,
    NVIDIA_SMI,
    OPEN_FILES,
    ORT,
    OUTSIDE,
    PINNED,
    RMM,
    ROCM,
    SGLANG,
    SGLANG_GRAPHS,
    SHM,
    TF,
    TGI,
    THC,
    TRT,
    TRT_LLM,
    VLLM,
    worded,
)

OF_LIBRARIES = (
    worded("PyTorch", r"torch\.(?:cuda\.)?OutOfMemoryError", ""),
    worded("CuPy", r"[Oo]ut of memory allocating <wanted> \(allo", CUPY),
    worded(
        "RMM",
        r"RMM failure[^\n]{0,300}(?:[Mm]aximum pool size|memory limit)|aximum pool size exceeded",
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
        r"hipHostRegister)\b(?=[\s\S]{0,120}(?:fail|error|out of memory|OUT_OF_MEMORY))|"
        r"(?:allocat|out of|lack)[^\n]{0,40}pinned (?:host )?memory|in pin memory thread[\s\S]{0,1500}?out of memory|"
        r"in _?pin_memory\w*\b[\s\S]{0,400}?out of memory|"
        r"out of memory[^\n]*\n(?:[^\n]*\n){0,6}?[^\n]*in _?pin_memory\w*\b",
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
    worded("TensorFlow", r"ResourceExhaustedError[^\n]{0,300}failed to allocate memory", TF),
    worded(
        "JAX",
        r"RESOURCE_EXHAUSTED[^\n]{0,200}memory space (?:vmem|smem|sflag)",
        CHIP_OF_KERNEL,
        ON_CHIP,
        "limit",
    ),
    worded("JAX", r"(?:RESOURCE_EXHAUSTED|XlaRuntimeError)[^\n]{0,200}(?:[Mm]emory|[Aa]llocat|\bOOM\b|hbm|HBM)", JAX),
    worded(
        "vLLM",
        r"No available memory for the cache blocks|larger than the maximum number of tokens that can be stored "
        r"in(?: the)? KV cache|Available KV cache memory: -|not enough KV cache space|out of memory occurred when "
        r"warming up sampler",
        VLLM,
        KV_CACHE,
    ),
    worded(
        "vLLM",
        r"Error in memory profiling",
        "Another process gave memory back or took it while vLLM measured its own: start one instance after the other.",
    ),
    worded("SGLang", r"[Cc]apture (?:\w+ )?cuda graph failed", SGLANG_GRAPHS),
    worded("SGLang", r"increase --mem-fraction-static|KV cache pool is full", SGLANG, KV_CACHE),
    worded("TensorRT-LLM", r"[Cc]an't allocate enough blocks", TRT_LLM, KV_CACHE),
    worded(
        "TensorRT",
        r"TRT[^\n]{0,200}OutOfMemory|insuff?icient memory on requested size|nvinfer1::\S*[Aa]llocat\S*[^\n]{0,40}out "
        r"of memory|Error Code 2: OutOfMemory",
        TRT,
    ),
    worded("Text Generation Inference", r"Not enough memory to handle", TGI, KV_CACHE),
    worded("ONNX Runtime", r"CUDA failure 2: out of memory|BFCArena::AllocateRawInternal", ORT),
    worded(
        "Triton",
        r"(?:OutOfResources(?:: )?)?out of resources?: \w|OutOfResources|too many resources requested for launch|"
        r"uses too much shared data",
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
        r"(?:shared memory object|/torch_|received 0 items of ancdata)[^\n]{0,120}Too many open files|"
        r"received 0 items of ancdata",
        OPEN_FILES,
        HOST,
    ),
    worded(
        "the host",
        r"DataLoader worker[^\n]{0,200}(?:Bus error|shared memory)|insufficient shared memory|out of shared memory|"
        r"shared memory limit|(?:[Ee]rror|[Ff]ail|[Uu]nable|[Cc]annot|WARN)[^\n]{0,120}"
        r"(?:/dev/shm|shared memory object)|/dev/shm[^\n]{0,80}(?:[Nn]o space|too small|[Ff]ull\b)|"
        r"No space left on device[^\n]{0,80}shm",
        SHM,
        SHARED,
    ),
    worded(
        "the host",
        r"[Oo]ut of memory: Kill(?:ed)? process|oom_kill|OOMKilled|Memory cgroup out of memory|DataLoader "
        r"worker[^\n]{0,80}signal: Killed|node running low on memory|killed due to memory pressure|exceeded \d+% "
        r"memory budget|Cannot allocate memory|"
        r"Exceeded (?:step|job) memory limit|posix_memalign\(&data, \w+, nbytes\) == 0|"
        r"java\.lang\.OutOfMemoryError: Java heap",
        HOST_MEMORY,
        HOST,
    ),
    worded("the host", r"oom-kill", HOST_MEMORY, HOST),
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
        r"EL0004|aclrtMalloc\w*[^\n]{0,80}(?:fail|error)|error code is 2070(?:01|18)|rtMalloc[^\n]{0,80}fail",
        NPU,
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
    worded(
        "MXNet",
        r"cudaMalloc(?: retry)? failed: out of memory|storage_manager\.h\S{0,9} Memory allocation failed",
        f"A smaller batch; {NVIDIA_SMI}",
    ),
    worded("Thrust", r"thrust::\S{0,60}bad_alloc|parallel_for failed: out of memory", f"Hold less; {NVIDIA_SMI}"),
)

#: names that drivers and their libraries give the error
OF_DRIVERS = (
    worded(
        "HIP",
        r"(?:HIP|ROCm) error: out of memory|hipErrorOutOfMemory|hipErrorMemoryAllocation|HIPBLAS_STATUS_ALLOC_FAILED|"
        r"rocblas_status_memory_error|miopenStatusAllocFailed|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        ROCM,
    ),
    worded("CUDA", r"cuda runtime error \(2\)", THC),
    worded("CUDA", r"error=2 : out of memory", THC),
    worded(
        "CUDA",
        r"RuntimeError: (?:CUDA|cuDNN|cuFFT|cusolver)(?: driver)? error: (?:out of memory|\w+_ALLOC(?:ATION)?_FAILED|"
        r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)|AcceleratorError: CUDA "
        r"error: out of memory|CUDA(?:Driver|Runtime)Error: (?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation)",
        OUTSIDE,
    ),
    worded(
        "CUDA",
        r"(?:CUDA_|NVRTC_)ERROR_OUT_OF_MEMORY|cudaError(?:MemoryAllocation|OutOfMemory)|CU(?:BLAS|DNN|SOLVER|SPARSE|"
        r"RAND|TENSOR)_STATUS_(?:ALLOC(?:ATION)?_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)|CUFFT_ALLOC_FAILED|"
        r"CUDA_OUT_OF_MEMORY|CUBLAS_STATUS_NOT_INITIALIZED|cudaMalloc\w* failed|CUresult error[^\n]{0,20}result=2\b|"
        r"(?:CUDA|[Cc]uda|\bcu[A-Z]\w+|\bGPU\b|\bGpu\b|\.cu\b)[^\n]{0,200}[Oo]ut of (?:device )?memory|"
        r"[Oo]ut of (?:GPU|device|CUDA|video) memory|\b[Dd]evice out of memory",
        DRIVER,
    ),
)

#: what a launcher says of a process that the kernel has ended
OF_LAUNCHERS = (worded("the host", r"Signal 9 \(SIGKILL\)|exitcode +: -9\b|exit code:? 137\b", KILLED, HOST),)

UNKNOWN_ADVICE = f"Whether this is memory of the GPU cannot be told from it: {NVIDIA_SMI}"
#: words by which a line tells which memory it is about
OF_GPU = re.compile(r"GPU|[Dd]evice memory|CUDA|[Cc]uda|V?RAM on device|VRAM|vram|HIP|[Vv]ideo memory|on device")
OF_HOST = re.compile(r"\b(?:host|CPU|RAM|numpy|MemoryError|bad_alloc)\b")
_ALLOCATES = r"(?:[Aa]lloc(?:at\w+)?|request\w*)"
#: what is left: a line that says so in words of its own
IN_OTHER_WORDS = re.compile(
    r"(?:[Oo]ut[ _-]?[Oo]f[ _-]?[Mm]em|OUT[ _]OF[ _]\w*MEMORY|OutOfMemory|\bOOM\b|bad_alloc|\bMemoryError\b"
    r"|(?:[Nn]ot enough|[Ii]nsufficient|[Rr]an out of)(?: \w+){0,3} (?:memory|VRAM|vram)"
    r"|(?:[Ff]ailed|[Uu]nable|[Cc]annot|[Cc]ould not|[Cc]an't|[Cc]ouldn't)(?: to)? (?:re)?allocat|ALLOC(?:ATION)?_FAIL"
    r"|[Aa]llocation (?:of \S+ \w+ )?(?:failed|failure|error)|[Mm]emory limit exceeded"
    r"|exceed\w* [^\n]{0,9}(?:available|GPU|device|video) memory)"
)
WANTED = re.compile(rf"{_ALLOCATES}[^\n\d]{{0,60}}(\d{{5,}}|\d[\d.,]* ?(?:[KMGT]i?B|bytes))\b")
