"""`stalloc explain error.log` of any GPU library: what ran out is told, no figures contradict each other."""
# ruff: noqa: E501
# the texts stand in one line, as libraries write them

import json

import pytest

from stalloc.cli import main

GIB = 1 << 30
NEW = (
    "Tried to allocate {w}. GPU 0 has a total capacity of {t} of which {f} is free. Including non-PyTorch memory, this "
    "process has {p} memory in use. Of the allocated memory {a} is allocated by PyTorch, and {r} is reserved by PyTorch "
    "but unallocated."
)
OLD = "Tried to allocate {w} ({d} 0; {t} total capacity; {a} already allocated; {f} free; {r} reserved in total by PyTorch)"
FIGURES = {"w": "3.00 GiB", "t": "24.00 GiB", "f": "1.00 GiB", "p": "22.50 GiB", "a": "19.00 GiB", "r": "2.75 GiB"}


def new(backend="CUDA", **changes):
    return f"torch.OutOfMemoryError: {backend} out of memory. " + NEW.format(**FIGURES | changes)


def old(backend="CUDA", device="GPU", **changes):
    return f"RuntimeError: {backend} out of memory. " + OLD.format(
        **FIGURES | {"d": device, "r": "21.75 GiB"} | changes
    )


#: text, library, memory that was short
TEXTS = [
    (new(), "PyTorch", "device"),
    (new("HIP"), "PyTorch", "device"),
    (new("XPU"), "PyTorch", "device"),
    (new(p="0 bytes"), "PyTorch", "device"),
    (new(p="17179869184.00 GiB"), "PyTorch", "device"),
    (new(f="17179869183.50 GiB"), "PyTorch", "device"),
    (new(p="1.00 GiB"), "PyTorch", "device"),
    (new(p="40.00 GiB"), "PyTorch", "device"),
    (new(a="31.00 GiB", f="0 bytes"), "PyTorch", "device"),
    (new(f="9.00 GiB"), "PyTorch", "device"),
    (new(w="more than 1EB memory"), "PyTorch", "device"),
    (old(), "PyTorch", "device"),
    (old("HIP"), "PyTorch", "device"),
    (old("NPU", "NPU"), "PyTorch", "device"),
    (old("MLU", "MLU"), "PyTorch", "device"),
    (old("MUSA", "MUSA"), "PyTorch", "device"),
    (old("XPU").replace(" 1.00 GiB free;", ""), "PyTorch", "device"),
    (old(a="25.00 GiB", r="25.50 GiB"), "PyTorch", "device"),
    (old().replace("21.75 GiB reserved in total by PyTorch", "2.75 GiB cached"), "PyTorch", "device"),
    ("NPU out of memory. NPUWorkspaceAllocator tried to allocate 2.00 GiB(NPU 1; 61.28 GiB total capacity; 1.2 GiB free).", "PyTorch", "device"),
    ("RuntimeError: XPU out of memory, please use `empty_cache` to release all unoccupied cached memory.", "PyTorch", "device"),
    ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 3 has a total capa", "PyTorch", "device"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to all", "PyTorch", "device"),
    ("RuntimeError: MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB, max allowed: 18.13 GB). Tried to allocate 512.00 MB on shared pool.", "PyTorch", "device"),
    ("RuntimeError: MPS backend out of memory (MPS allocated: 8.10 GiB, other allocations: 300.00 MiB). Tried to allocate 1.00 GiB on private pool.", "PyTorch", "device"),
    ("RuntimeError: Invalid buffer size: 48.00 GB", "PyTorch (MPS)", "device"),
    ("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 20.00 GiB\nRequested               : 2.00 GiB\nDevice limit            : 23.00 GiB\nFree (according to CUDA): 10.00 MiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB", "PyTorch", "device"),
    ("SamplerCustom: Allocation on device 0 would exceed allowed memory. (out of memory)", "PyTorch", "device"),
    ("THCudaCheck FAIL file=/pytorch/aten/src/THC/generic/THCStorage.cu line=58 error=2 : out of memory", "CUDA", "device"),
    ("RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensor.cu:98", "CUDA", "device"),
    ("RuntimeError: CUDA error: out of memory", "CUDA", "device"),
    ("RuntimeError: CUDA driver error: out of memory", "CUDA", "device"),
    ("torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual", "CUDA", "device"),
    ("RuntimeError: HIP error: out of memory", "HIP", "device"),
    ("hipErrorOutOfMemory: out of memory", "HIP", "device"),
    ("HSA_STATUS_ERROR_OUT_OF_RESOURCES: failed to allocate the resources", "HIP", "device"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA", "device"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "CUDA", "device"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDA", "device"),
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "CUDA", "device"),
    ("RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED", "CUDA", "device"),
    ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED", "CUDA", "device"),
    ("cupy_backends.cuda.api.driver.CUDADriverError: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "CUDA", "device"),
    ("RuntimeError: CUDA failed with error out of memory", "CUDA", "device"),
    ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,147,483,648 bytes (allocated so far: 5,368,709,120 bytes).", "CuPy", "device"),
    ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,147,483,648 bytes (allocated so far: 5,368,709,120 bytes, limit set to: 6,442,450,944 bytes).", "CuPy", "device"),
    ("cupy.cuda.memory.OutOfMemoryError: out of memory to allocate 536870912 bytes (total 8589934592 bytes)", "CuPy", "device"),
    ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,147,483,648 bytes (allo", "CuPy", "device"),
    ("MemoryError: std::bad_alloc: out_of_memory: CUDA error at: /rmm/include/rmm/mr/device/cuda_memory_resource.hpp:70: cudaErrorMemoryAllocation out of memory", "RMM", "device"),
    ("MemoryError: std::bad_alloc: out_of_memory: CUDA error (failed to allocate 4294967296 bytes) at: /x/cuda_async_view.hpp:101: cudaErrorMemoryAllocation out of memory", "RMM", "device"),
    ("MemoryError: std::bad_alloc: CUDA error at: ../include/rmm/mr/device/cuda_memory_resource.hpp:70: cudaErrorMemoryAllocation out of memory", "RMM", "device"),
    ("MemoryError: std::bad_alloc: out_of_memory: RMM failure at:/x/arena.hpp:382: Maximum pool size exceeded", "RMM", "device"),
    ("std::bad_alloc: out_of_memory: RMM failure at: limiting_resource_adaptor.hpp:140: Exceeded memory limit (failed to allocate 2.000000 GiB)", "RMM", "device"),
    ("rmm.rmm.RMMError: b'RMM_ERROR_OUT_OF_MEMORY'", "RMM", "device"),
    ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.", "JAX", "device"),
    ("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.", "JAX", "device"),
    ("XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 4.00GiB (4294967296B) on device ordinal 1", "JAX", "device"),
    ("RESOURCE_EXHAUSTED: Attempting to reserve 9.50G at the bottom of memory. That was not possible. There are 7.21G free, 0B reserved, and 7.21G reservable.", "JAX", "device"),
    ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 16.90G of 15.48G hbm. Exceeded hbm capacity by 1.42G.", "JAX", "device"),
    ("2024-01-01 W external/local_tsl/tsl/framework/bfc_allocator.cc:497] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.50GiB (rounded to 2684354560)requested by op Conv", "TensorFlow", "device"),
    ("I tensorflow/stream_executor/cuda/cuda_driver.cc:763] failed to allocate 7.42G (7967145984 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "TensorFlow", "device"),
    ("ResourceExhaustedError: OOM when allocating tensor with shape[64,512,512,32] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:Conv2D]", "TensorFlow", "device"),
    ("OOM when allocating tensor with shape[4096,4096] and type double on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu", "TensorFlow", "host"),
    ("InternalError: Dst tensor is not initialized.", "TensorFlow", "device"),
    ("ResourceExhaustedError: \n\nOut of memory error on GPU 1. Cannot allocate 1.500000GB memory on GPU 1, 22.250000GB memory has been allocated and available memory is only 512.000000MB.", "Paddle", "device"),
    ("Out of memory error on GPU 0. Cannot allocate 296.000244MB memory on GPU 0, available memory is only 211.875000MB.", "Paddle", "device"),
    ("Out of memory error on GPU 7. Cannot allocate 39.250000kB memory on GPU 7, 85.412131TB memory has been allocated and available memory is only 0.000000B.", "Paddle", "device"),
    ("ValueError: To serve at least one request with the models's max seq len (65536), (8.00 GiB KV cache is needed, which is larger than the available KV cache memory (2.50 GiB). Try increasing `gpu_memory_utilization`", "vLLM", "KV cache"),
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.", "vLLM", "KV cache"),
    ("The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (9328).", "vLLM", "KV cache"),
    ("ValueError: Free memory on device (5.0/24.0 GiB) on startup is less than desired GPU memory utilization (0.9, 21.6 GiB).", "vLLM", "device"),
    ("RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.", "vLLM", "KV cache"),
    ("AssertionError: Error in memory profiling. Initial free memory 21.1 GiB, current free memory 22.4 GiB.", "vLLM", "device"),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "SGLang", "KV cache"),
    ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 6144.00 MiB on device 0: cudaMalloc failed: out of memory", "llama.cpp", "device"),
    ("ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 1073741824", "llama.cpp", "device"),
    ("[E:onnxruntime] BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 2147483648", "ONNX Runtime", "device"),
    ("xgboost.core.XGBoostError: Memory allocation error on worker 0: std::bad_alloc: cudaErrorMemoryAllocation: out of memory\n- Free memory: 1073741824\n- Requested memory: 4294967296", "XGBoost", "device"),
    ("[TRT] [E] Requested amount of GPU memory (5368709120 bytes) could not be allocated.", "TensorRT", "device"),
    ("numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY", "Numba", "device"),
    ("pycuda._driver.MemoryError: cuMemAlloc failed: out of memory", "PyCUDA", "device"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:116] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)", "the host's allocator", "host"),
    ("RuntimeError: $ Torch: not enough memory: you tried to allocate 4GB. Buy new RAM! at /pytorch/TH/THGeneral.cpp:201", "the host's allocator", "host"),
    ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with shape (2000000000,) and data type float64", "NumPy", "host"),
    ("kernel: Out of memory: Killed process 991 (python) total-vm:99kB, anon-rss:88kB", "the host", "host"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=4.0", "the host", "host"),
    ("cudaMallocHost failed: cudaErrorMemoryAllocation", "CUDA", "host"),
    ("W could not allocate pinned host memory of size: 34359738368", "CUDA", "host"),
    ("RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.", "the host", "shared memory of the host"),
    ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)", "NCCL", "shared memory of the host"),
    ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'", "NCCL", "device"),
    ("node:1:9 [0] NCCL WARN Failed to CUDA calloc async 10485760 bytes", "NCCL", "device"),
    ("Error out of memory at line 380 in file /src/csrc/pythonInterface.c", "bitsandbytes", "device"),
    ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 135168, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.", "Triton", "on chip"),
    ("RuntimeError: Triton Error [CUDA]: out of memory", "Triton", "device"),
    ("RuntimeError: Native API failed. level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", "Intel XPU", "device"),
    ("EL0004: Failed to allocate memory. Possible Cause: Available memory is insufficient.", "Ascend (NPU)", "device"),
    ("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::4294967296 (4096)MB", "Habana (HPU)", "device"),
    ("[metal::malloc] Attempting to allocate 30000000000 bytes which is greater than the maximum allowed buffer size of 22613000192 bytes.", "MLX", "device"),
    ("Could not allocate tensor with 268435456 bytes. There is not enough GPU video memory available!", "DirectML", "device"),
    ("Out of GPU memory trying to allocate 2.000 GiB\nEffective GPU memory usage: 98.5% (23.3 GiB/23.7 GiB)", "CUDA.jl", "device"),
    ("Error: StandardGpuResources: alloc fail type TemporaryMemoryOverflow dev 0 space Device stream 0x1 size 1610612736 bytes (cudaMalloc error out of memory [2])", "Faiss", "device"),
    ("MXNetError: cudaMalloc retry failed: out of memory", "MXNet", "device"),
    ("thrust::system::system_error: parallel_for failed: out of memory", "Thrust", "device"),
    ("vk::Device::allocateMemory: ErrorOutOfDeviceMemory", "Vulkan", "device"),
    ("RuntimeError: This GPU can NOT take blocks larger than 4GB! Tried to allocate 6.00 GiB (GPU  0; 15.00 GiB total capacity; 0 bytes already allocated; 0 bytes reserved in total by PyTorch)", "PyTorch", "device"),
    ("allocate 3.00 GiB. GPU 0 has\nTried to allocate 3.00 GiB (GPU 1; 8.00 GiB total capacity; 5.00 GiB already allocated; 1.00 GiB free; 6.00 GiB reserved in total by PyTorch)", "PyTorch", "device"),
    ("torch.OutOfMemoryError: Allocation on device \nyou ran out of memory on your GPU", "PyTorch", "device"),
    ("out of memory to allocate 2147483648 bytes (total 6442450944 bytes, limit set to 6000000000 bytes)", "CuPy", "device"),
    ("W external/xla/xla/tsl/framework/bfc_allocator.cc:1] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.00GiB (rounded to 2147483904)requested by op\nXlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483904 bytes.", "JAX", "device"),
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Scoped allocation with size 20.00M and limit 16.00M exceeded scoped vmem limit by 4.00M.", "JAX", "on chip"),
    ("W core/common_runtime/bfc_allocator.cc:270] Ran out of memory trying to allocate 4.00MiB.  See logs\nW op_kernel.cc:1] OOM when allocating tensor with shape[1024,1024]", "TensorFlow", "device"),
    ("errors_impl.ResourceExhaustedError: {{function_node __wrapped__Mul}} failed to allocate memory [Op:Mul]", "TensorFlow", "device"),
    ("gpu_async_0 cuMemAllocAsync failed to allocate 536870912 bytes: CUDA error: out of memory\n Reported by CUDA: Free memory/Total memory: 131072000/8589934592", "TensorFlow", "device"),
    ("Out of memory error on GPU 2. Cannot allocate 1.500000GB memory on GPU 2, available memory is only \n        416.500000MB.", "Paddle", "device"),
    ("Out of memory error on GPU 2. Cannot allocate 145.500000MB GPU memory, available memory is 72.250000MB.", "Paddle", "device"),
    ("Error: Alloc 262144000 error!\n [Hint: Expected posix_memalign(&p, alignment, size) == 0, but received 12]", "the host's allocator", "host"),
    ("[enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0", "the host", "host"),
    ("[19:00:00] src/storage/./pooled_storage_manager.h:62: Memory allocation failed.", "MXNet", "device"),
    ("(8.00 GiB KV cach\ne is needed, which is larger than the available KV cache memory (2.50 GiB). Based on", "vLLM", "KV cache"),
    ("torch.AcceleratorError: CUDA error: out of memory\nException: Capture cuda graph failed: CUDA error: out of memory\n1. set --mem-fraction-static to a smaller value", "SGLang", "device"),
    ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 2048.00 MiB on device 1: cudaMalloc failed: out of memory\nalloc_tensor_range: failed to allocate CUDA1 buffer of size 2147483648\nunable to allocate CUDA1 buffer", "llama.cpp", "device"),
    ("ggml_vulkan: Device memory allocation of size 1610612736 failed.\nvk::Device::allocateMemory: ErrorOutOfDeviceMemory", "llama.cpp", "device"),
    ("ggml_backend_metal_buffer_type_alloc_buffer: error: failed to allocate buffer, size =  8192.00 MiB", "llama.cpp", "device"),
    ("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 34359738368", "llama.cpp", "host"),
    ("WARNING: failed to allocate 1024,00 MiB of pinned memory: invalid argument", "CUDA", "host"),
    ("Error: model requires more system memory (40.0 GiB) than is available (30.0 GiB)", "Ollama", "host"),
    ("CUDA error 2 at /go/ggml-cuda.cu:4856: out of memory", "CUDA", "device"),
    ("CUDA Error: out of memory: Resource temporarily unavailable", "CUDA", "device"),
    ("F0101 syncedmem.cpp:56] Check failed: error == cudaSuccess (2 vs. 0)  out of memory", "CUDA", "device"),
    ("Error in MemoryManager: Device out of memory", "CUDA", "device"),
    ("[TRT] [W] Tactic Device request: 512MB Available: 300MB. Device memory is insufficient to use tactic.", "TensorRT", "device"),
    ("[TRT]: 2: [virtualMemoryBuffer.cpp::resizePhysical::160] Error Code 2: OutOfMemory (no further information)", "TensorRT", "device"),
    ("Assertion failed: Can't allocate enough blocks for even one sequence", "TensorRT-LLM", "KV cache"),
    ("NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030532 bytes\nNCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 33030528)", "NCCL", "shared memory of the host"),
    ("No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 147456 Hardware limit:101376 Reducing", "Triton", "on chip"),
    ("out of resource: tensor memory, Required: 640, Hardware limit: 512. Reducing block sizes may help.", "Triton", "on chip"),
    ("in pin_memory\n    return data.pin_memory()\nRuntimeError: CUDA error: out of memory", "CUDA", "host"),
    ("RuntimeError: Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback:\nRuntimeError: CUDA error: out of memory", "CUDA", "host"),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).", "the host", "shared memory of the host"),
    ("1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons", "the host", "host"),
    ("slurmstepd: error: Exceeded job memory limit", "the host", "host"),
    ("  exitcode  : -9 (pid: 4321)\n  traceback : Signal 9 (SIGKILL) received by PID 4321", "the host", "host"),
    ("error code is 207001\nEL0004: Failed to allocate memory.\n Failed to allocate resource[DeviceMemory] with info [size:1073741824].", "Ascend (NPU)", "device"),
    ("Failed to allocate memory for batch_prefill_tmp_v with size 402653184 and alignment 16 in AlignedAllocator", "FlashInfer", "device"),
    ("TDRV:dmem_alloc_internal Failed to alloc DEVICE memory: 536870912", "Neuron", "device"),
    ("MemoryError: Error allocating 411041792 bytes of device memory (out of memory).", "Theano", "device"),
    ("mylib: not enough video memory, could not allocate 3.00 GiB for the frame buffer", "a library that stalloc does not know", "device"),
]  # fmt: skip


def explained(tmp_path, capsys, data, name="error.log"):
    """What JSON and people are told of a log."""
    file = tmp_path / name
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    assert main(["explain", str(file), "--json", "-"]) == 0
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert main(["explain", str(file)]) == 0
    return errors, capsys.readouterr().out


def test_there_are_a_hundred_texts():
    assert len(TEXTS) >= 100


@pytest.mark.parametrize(("text", "library", "place"), TEXTS)
def test_a_text_is_read_and_its_figures_agree(tmp_path, capsys, text, library, place):
    errors, shown = explained(tmp_path, capsys, f"step 7 of 9\n{text}\n")
    (error,) = errors
    assert (error["library"], error["place"]) == (library, place)
    assert "not a trace" not in shown
    rows = {name: error[f"{name}_bytes"] or 0 for name in ("allocated", "unallocated", "outside", "others", "free")}
    if error["total_bytes"] and not error["contradiction"]:
        assert sum(rows.values()) <= error["total_bytes"] + GIB // 40
    if error["contradiction"]:
        assert "contradict" in shown
        assert "  free" not in shown
    assert len([line for line in shown.splitlines() if line.endswith(".")]) >= 1, "what it is, or what to do"


@pytest.mark.parametrize(
    "text",
    [
        "n1:1:9 [0] NCCL INFO Allocated 9637892 bytes of shared memory in /dev/shm/nccl-x",
        "server_args=ServerArgs(model_path='m', mem_fraction_static=0.88, max_total_tokens=None)",
        "cudaHostAlloc   12 calls   3.2 ms",
        "google.api_core: 429 RESOURCE_EXHAUSTED. Quota exceeded for requests per minute",
        "[TensorRT] INFO: Some tactics do not have sufficient workspace memory to run.",
        "aclrtMallocPhysical 12 calls",
    ],
)
def test_what_names_memory_and_no_error_is_none(tmp_path, capsys, text):
    file = tmp_path / "info.log"
    file.write_text(f"step 1\n{text}\nstep 2\n")
    assert main(["explain", str(file)]) == 2
    assert "a log without an out-of-memory error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("gpu_async_0 failed to allocate 536870912 bytes: CUDA error: out of memory\n Reported: Free memory/Total memory: 1048576/8589934592", (536870912, 1 << 20, 8 << 30)),
        ("Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.17GiB (rounded to 1258291200)requested by op", (1258291200, None, None)),
        ("Cannot allocate 145.500000MB GPU memory, available memory is 72.250000MB.", (152567808, None, None)),
        ("Out of memory error on GPU 0. Cannot allocate 1.500000GB memory on GPU 0, available memory is only\n   416.500000MB.", (3 << 29, 436731904, None)),
        ("WARNING: failed to allocate 1024,50 MiB of pinned memory", (1074266112, None, None)),
        ("CuPy: Out of memory allocating 1,024 bytes (allocated so far: 512 bytes).", (1024, None, None)),
        ("can't allocate 5368709120 Bytes of memory on device", (5 << 30, None, None)),
        ("Out of GPU memory trying to allocate 12.000 GiB\nEffective GPU memory usage: 97.00% (23.000 GiB/24.000 GiB)\nMemory pool usage: 8.000 GiB (15.000 GiB reserved)", (12 << 30, GIB, 24 << 30)),
        ("Free memory on device cuda:0 (5.00/24.00 GiB) on startup is less than desired GPU memory utilization (0.9, 21.60 GiB)", (round(21.6 * GIB), 5 << 30, 24 << 30)),
    ],
)  # fmt: skip
def test_sizes_are_read_to_the_byte(tmp_path, capsys, text, figures):
    (error,), _ = explained(tmp_path, capsys, text)
    assert (error["wanted_bytes"], error["free_bytes"], error["total_bytes"]) == figures
