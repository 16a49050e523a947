"""Wordings that have figures, of libraries other than PyTorch.

Contract: the first wording that fits a place in a text is the one that counts.
"""

from stalloc.analysis.error_text import HOST, KV_CACHE, ON_CHIP, SHARED
from stalloc.analysis.error_wording import (
    CHIP,
    CHIP_OF_KERNEL,
    CUPY,
    DRIVER,
    FLASHINFER,
    HOST_MEMORY,
    JAX,
    LLAMA,
    METAL,
    NCCL,
    NPU,
    NVIDIA_SMI,
    ORT,
    ORT_LIMIT,
    PADDLE,
    PINNED,
    RMM,
    SHM,
    TF,
    TRT,
    VLLM,
    VLLM_AT_START,
    XGB,
    worded,
)

WITH_FIGURES = (
    worded(
        "CuPy",
        r"[Oo]ut of memory allocating <wanted> \(allocated so far: <reserved>(?:, limit set to: <limit>)?",
        CUPY,
    ),
    worded("CuPy", r"out of memory to allocate <wanted> \(total (?P<sum>\d+) bytes(?:, limit set to <limit>)?", CUPY),
    worded(  # of RMM's logger, before the exception
        "RMM",
        r"\[FAILURE[^=\n]{0,200}current/max/try size = <reserved>, <limit>, <wanted>",
        RMM,
    ),
    worded(
        "RMM",
        r"(?:pool size exceeded|Not enough room to grow)[^=\n]{0,200}current/max/try size = <reserved>, <limit>, "
        r"<wanted>",
        RMM,
    ),
    worded(
        "RMM",
        r"RMM failure[^\n]{0,300}(?:pool size|memory limit)[^\n]{0,20}exceeded[^\n]{0,20}failed to allocate "
        r"<wanted>",
        RMM,
        told="limit",
    ),
    worded(
        "RMM",
        r"(?:pool size exceeded|Exceeded memory limit)[^\n]{0,20}failed to allocate <wanted>",
        RMM,
        told="limit",
    ),
    worded(
        "RMM",
        r"(?:out_of_memory|bad_alloc)[^\n]{0,300}failed to allocate <wanted>",
        f"RMM asked the driver, which had no room: hold less, or let cuDF spill (CUDF_SPILL=on); {NVIDIA_SMI}",
    ),
    worded("CUDA", r"failed to alloc(?:ate)? <wanted> on host", PINNED, HOST),
    worded("CUDA", r"allocate pinned host memory of size:? <wanted>", PINNED, HOST),
    worded("CUDA", r"failed to allocate <wanted> of pinned memory", PINNED, HOST),
    worded(
        "TensorFlow",
        r"failed to allocate <wanted>: CUDA error: out of memory[^\n]*(?:\n[^\n]{0,80}Free memory/Total memory: "
        r"<free>/<total>)?",
        TF,
    ),
    worded("TensorFlow", r"failed to allocate [\d.]+[KMGT]?i?B? \(<wanted>\) from device", TF),
    worded(
        "JAX",
        r"external/(?:xla|tsl|org_tensorflow)/[^\n]{0,120}[Aa]llocator \((?:GPU|gpu)\w*\) ran out of memory trying to "
        r"allocate (?:[\d.]+\w+ \(rounded to )?<wanted>",
        JAX,
    ),
    worded(
        "TensorFlow",
        r"(?:[Aa]llocator \((?:GPU|gpu|xla)\w*\) r|bfc_allocator[^\n]{0,20}R)an out of memory trying to allocate "
        r"(?:[\d.]+\w+ \(rounded to )?<wanted>",
        TF,
    ),
    worded(
        "TensorFlow",
        r"[Aa]llocator \((?:cuda_host|gpu_host)\w*\) ran out of memory trying to allocate <wanted>",
        PINNED,
        HOST,
    ),
    worded(
        "TensorFlow",
        r"OOM when allocating tensor with shape\s?\[(?P<shape>[\d,]*)\] and type (?P<type>\w+) on \S*CPU:",
        HOST_MEMORY,
        HOST,
    ),
    worded(
        "TensorFlow",
        r"OOM when allocating tensor with shape\s?\[(?P<shape>[\d,]*)\](?: and type (?P<type>\w+))?(?: on "
        r"\S*GPU:(?P<device>\d+))?",
        TF,
    ),
    worded(
        "JAX",
        r"Scoped allocation with size <wanted> and limit <limit> exceeded scoped vmem limit",
        CHIP_OF_KERNEL,
        ON_CHIP,
        "limit",
    ),
    worded("JAX", r"Ran out of memory in memory space hbm[^\n]{0,40}Used <wanted> of <total> hbm", JAX),
    worded(
        "JAX",
        r"Attempting to (?:allocate|reserve) <wanted>(?: at the bottom of memory)?\. That was not possible\. "
        r"There are <free> free",
        JAX,
    ),
    worded(
        "JAX",
        r"RESOURCE_EXHAUSTED:[^\n]{0,200}?(?:allocat(?:e|ing)|request for|reserve) <wanted>(?:[^\n]{0,60}device "
        r"ordinal (?P<device>\d+))?",
        JAX,
    ),
    worded(
        "Paddle",
        r"Out of memory error on \w+ (?P<device>\d+)\. Cannot allocate <wanted> (?:memory on \w+ \d+|GPU memory),"
        r"(?: <reserved> memory has been allocated and)? available memory is (?:only )?<free>",
        PADDLE,
    ),
    worded("Paddle", r"Cannot (?:m?alloc|allocate) <wanted> (?:of )?GPU memory", PADDLE),
    worded(
        "vLLM",
        r"\(?<wanted> (?:of )?KV cache is ?needed, which is larger than the available KV [Cc]ache memory "
        r"\(<free>\)",
        VLLM,
        KV_CACHE,
        "capacity",
    ),
    worded(
        "vLLM",
        r"Free memory on device(?: \S+)? \(<free>/<total>\)(?: on startup)? is less than desired GPU memory "
        r"utilization \([\d.]+, <wanted>\)",
        VLLM_AT_START,
        at_start=True,
    ),
    worded("llama.cpp", r"allocating <wanted> on device (?P<device>\d+): \w+ failed: out of memory", LLAMA),
    worded(
        "llama.cpp",
        r"failed to allocate (?:CUDA|ROCm|Vulkan|SYCL|Metal)(?P<device>\d*)\w* buffer of size <wanted>",
        LLAMA,
    ),
    worded("llama.cpp", r"Device memory allocation of size <wanted> failed", LLAMA),
    worded("llama.cpp", r"metal_\w+: error: failed to allocate buffer, size = <wanted>", LLAMA),
    worded("llama.cpp", r"can't allocate <wanted> of memory on device", LLAMA),
    worded("llama.cpp", r"cpu_buffer\w*: failed to allocate buffer of size <wanted>", HOST_MEMORY, HOST),
    worded("Ollama", r"more system memory \(<wanted>\) than is available \(<free>\)", HOST_MEMORY, HOST, "capacity"),
    worded(
        "ONNX Runtime",
        r"Available memory of <free> is smaller than requested bytes of <wanted>",
        ORT_LIMIT,
        told="limit",
    ),
    worded("ONNX Runtime", r"Failed to allocate memory for requested buffer of size <wanted>", ORT),
    worded(
        "XGBoost",
        r"Memory allocation error on worker[\s\S]{0,200}?Free memory: <free>[\s\S]{0,60}?Requested memory: "
        r"<wanted>",
        XGB,
    ),
    worded("TensorRT", r"Requested amount of GPU memory \(<wanted>\) could not be allocated", TRT),
    worded("TensorRT", r"Tactic Device request: <wanted> Available: <free>", TRT),
    worded("TensorRT", r"OutOfMemory[^\n]{0,40}Requested size was <wanted>", TRT),
    worded(
        "the host's allocator",
        r"(?:can't allocate memory|not enough memory): you tried to allocate <wanted>",
        HOST_MEMORY,
        HOST,
    ),
    worded(
        "the host's allocator",
        r"Alloc <wanted> error![\s\S]{0,80}posix_memalign",
        HOST_MEMORY,
        HOST,
    ),
    worded("NumPy", r"Unable to allocate <wanted> for an array with shape", HOST_MEMORY, HOST),
    worded("NCCL", r"failed to extend \S*shm/\S+ to <wanted>", SHM, SHARED),
    worded("NCCL", r"creating shared memory segment[^\n]{0,120}size <wanted>", SHM, SHARED),
    worded(
        "the host",
        r"unable to (?:mmap|open|write|resize|allocate shared memory)[^\n]{0,40}? <wanted> (?:from|in|to) "
        r"[^\n]{0,80}(?:shm|torch_|shared)",
        SHM,
        SHARED,
    ),
    worded("NCCL", r"Failed to (?:CUDA|cuda) \w+(?: \w+)? <wanted>", NCCL),
    worded(
        "Triton",
        r"out of resources?: (?!tensor memory|registers|threads)[\w ]{3,80},? ?Required: <wanted>,? Hardware "
        r"limit(?:ation)?: ?<limit>",
        CHIP,
        ON_CHIP,
        "limit",
    ),
    worded(
        "Habana (HPU)",
        r"PT_DEVMEM Allocation failed for size::<wanted>",
        "Hold less on that HPU, or a smaller batch; `hl-smi` shows who holds it.",
    ),
    worded(
        "MLX",
        r"Attempting to allocate <wanted>,? which is greater than the maximum allowed buffer size of <limit>",
        METAL,
        told="limit",
    ),
    worded(
        "MLX",
        r"\[(?:metal::)?malloc\w*\] Unable to allocate <wanted>",
        "Hold less: mx.clear_cache(), a smaller batch or model.",
    ),
    worded("PyTorch (MPS)", r"Invalid buffer size: <wanted>", METAL, told="limit"),
    worded(
        "DirectML",
        r"Could not allocate tensor with <wanted>\. There is not enough GPU video memory",
        "A smaller batch or model.",
    ),
    worded(
        "CUDA.jl",
        r"Out of GPU memory trying to allocate <wanted>(?:\s[^\n]{0,80}\((?P<used>[\d.]+ \w+)/<total>\))?"
        r"(?: Memory pool usage: <allocated> \(<reserved> reserved\))?",
        "CUDA.reclaim() after GC.gc(true), or hold less.",
    ),
    worded(
        "Faiss",
        r"alloc fail[\s\S]{0,160}?size <wanted>",
        "Faiss: a smaller StandardGpuResources temporary memory, or a sharded or quantized index.",
    ),
    worded("FlashInfer", r"allocate memory for \w+ with size <wanted> and alignment", FLASHINFER, told="limit"),
    worded("Ascend (NPU)", r"allocate resource\[DeviceMemory\] with info \[size:<wanted>\]", NPU),
    worded("Neuron", r"Failed to alloc DEVICE memory: <wanted>", "Hold less; `neuron-top` shows who holds the core."),
    worded("MindSpore", r"memory isn't enough and alloc failed[^\n]{0,200}alloc size: ?<wanted>", DRIVER),
    worded("Theano", r"allocating <wanted> of device memory \(out of memory\)", DRIVER),
    worded("Warp", r"Failed to allocate <wanted> on device '?cuda:(?P<device>\d+)", f"Hold less; {NVIDIA_SMI}"),
    worded(
        "DALI",
        r"Can't allocate <wanted> on device (?P<device>\d+)",
        "DALI: a smaller batch_size or prefetch_queue_depth.",
    ),
)
