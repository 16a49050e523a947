"""One wording in which a library says that memory ran out, and what to do about it in each library.

Contract: the named groups of a pattern are the figures that it has, and `device`, `shape` with `type`, and `sum`. A
space in a pattern is any space, as a log may be wrapped.
"""

import re
from dataclasses import dataclass

from stalloc.analysis.error_text import DEVICE
from stalloc.analysis.size_text import SIZE

FIGURES = ("wanted", "total", "free", "allocated", "reserved", "limit")


@dataclass(frozen=True)
class Wording:
    """One wording of one library."""

    library: str
    pattern: re.Pattern[str]
    advice: str
    place: str = DEVICE
    told: str = ""
    """The verdict that the words themselves give."""
    at_start: bool = False
    """Whether it is said before the process holds anything."""


def worded(
    library: str, pattern: str, advice: str, place: str = DEVICE, told: str = "", *, at_start: bool = False
) -> Wording:
    """A wording; `<wanted>` and so on in the pattern stand for a size."""
    spaced = re.sub(r"\[[^\]]*\]| (?![?*+{])", lambda part: r"\s{1,80}" if part[0] == " " else part[0], pattern)
    sized = re.sub(rf"<({'|'.join(FIGURES)})>", lambda name: f"(?P<{name[1]}>{SIZE})", spaced)
    return Wording(library, re.compile(sized), advice, place, told, at_start)


NVIDIA_SMI = "`nvidia-smi` names the processes that hold the device."
CHIP_OF_KERNEL = (
    "This is memory on the chip that one kernel asks for, not memory of the device: smaller blocks in that kernel."
)
CUPY = "CuPy's limit is that of cupy.get_default_memory_pool().set_limit() or CUPY_GPU_MEMORY_LIMIT."
RMM = "RMM's pool: give it a larger maximum_pool_size, hold less, or let cuDF spill (CUDF_SPILL=on)."
JAX = (
    "JAX takes 75 % of the device at the start: XLA_PYTHON_CLIENT_MEM_FRACTION sets the share, "
    "XLA_PYTHON_CLIENT_PREALLOCATE=false takes it step by step; else hold less (jax.checkpoint, donated buffers)."
)
TF = (
    "TensorFlow takes nearly all of the device at the start: TF_FORCE_GPU_ALLOW_GROWTH=true takes it step by step; "
    "else a smaller batch."
)
PADDLE = f"A smaller batch, or another GPU; {NVIDIA_SMI}"
VLLM = (
    "vLLM divides gpu_memory_utilization of the device among weights, activations and KV cache: raise it, or lower "
    "max_model_len or max_num_seqs, or use more GPUs (tensor_parallel_size)."
)
VLLM_AT_START = (
    "Others hold that much of the device when vLLM starts: end them, or lower gpu_memory_utilization; "
    "`nvidia-smi` names them."
)
SGLANG = "SGLang: raise --mem-fraction-static for a larger KV cache, or lower --context-length."
SGLANG_GRAPHS = (
    "SGLang captures its CUDA graphs in what the static share leaves: lower --mem-fraction-static or "
    "--cuda-graph-max-bs."
)
TGI = "Text Generation Inference: lower --max-batch-prefill-tokens or --max-total-tokens."
TRT_LLM = "TensorRT-LLM: a larger free_gpu_memory_fraction for the KV cache, or a smaller max_seq_len."
LLAMA = "llama.cpp: fewer layers on the GPU (-ngl), a shorter context (-c), or a smaller quantization."
ORT_LIMIT = "It is what gpu_mem_limit of ONNX Runtime's CUDA provider leaves: raise it, or hold less."
ORT = "ONNX Runtime: gpu_mem_limit and arena_extend_strategy=kSameAsRequested of its CUDA provider bound the arena."
XGB = "XGBoost: a smaller max_bin, external memory, or fewer rows a GPU."
TRT = "TensorRT: a smaller workspace (the memory pool limit of the builder), or a smaller batch or shape."
PINNED = (
    "This is page-locked (pinned) memory of the host, not memory of the GPU: fewer or smaller pinned buffers, and look "
    "at `free -h`, `ulimit -l` and the limit of the container."
)
HOST_MEMORY = "This is memory of the host, not of the GPU: look at `free -h` and at the limit of the container or job."
KILLED = (
    "A process was ended by signal 9, which is mostly what the kernel does when the host's memory runs out: "
    "`dmesg -T | grep -i oom` tells, and so does the log of the container or job."
)
OPEN_FILES = (
    "These are open files, not memory: `ulimit -n 65536`, or torch.multiprocessing.set_sharing_strategy('file_system')."
)
SHM = (
    "This is /dev/shm, memory that processes of the host share, not memory of the GPU: docker run --shm-size=16g or "
    "--ipc=host, an emptyDir of medium Memory in Kubernetes, or fewer workers."
)
CHIP = (
    "This is memory on the chip that one kernel asks for, not memory of the device: smaller blocks or fewer num_stages "
    "in that kernel; a smaller batch does not help."
)
NCCL = (
    "NCCL's buffers lie outside of PyTorch's allocator: leave room for them "
    "(torch.cuda.set_per_process_memory_fraction), or make them smaller (NCCL_BUFFSIZE, fewer communicators)."
)
BNB = "bitsandbytes: hold less, or use its paged optimizers, which take memory of the host."
OUTSIDE = (
    "It is not for a tensor, but for a context, a kernel or a library's workspace, which lie outside PyTorch's and "
    f"CuPy's allocators. Either those hold nearly all of the device, or other processes do: {NVIDIA_SMI}"
)
DRIVER = f"The driver had no room for what the program asked it for: hold less; {NVIDIA_SMI}"
FLASHINFER = "It is the workspace that FlashInfer was given that is full, not the device: give it a larger one."
NPU = "Hold less; `npu-smi info` names who holds the device."
THC = (
    "This is the wording of PyTorch 0.4 or earlier, whose errors have no figures: hold less (a smaller batch, no graph "
    f"kept of the losses); {NVIDIA_SMI}"
)
ROCM = OUTSIDE.replace("nvidia-smi", "rocm-smi")
METAL = "Metal refuses one buffer above its maximum, whatever is free: split that tensor, or use a smaller batch."
