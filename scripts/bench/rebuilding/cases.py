"""The programs that were rebuilt: what runs them, and which recording they are held against."""

from typing import NamedTuple


class Case(NamedTuple):
    """One program, as it was when its memory was recorded on a real GPU."""

    name: str
    recording: str  #: below the shared directory
    torch: str  #: the release that made the recording, or the nearest one
    gpu: (
        str  #: its name, and after a colon the bytes that the allocator could have, where the recording ran out of them
    )
    program: list[str]  #: the script beside this file, or below `fidelity/programs`, and its arguments
    writes: str  #: the file that the program leaves in its working directory
    needs: list[str]  #: packages beside torch
    blocks: bool  #: the recording holds the sizes of blocks, as a profiler sees them, not of requests


#: by name: recording, torch, card; program, what it writes and needs
_CASES = {
    "transformer, forward, autograd off": (
        *("fidelity/recordings/lm_charan_train.pickle.gz", "2.11", "RTX-4090", "charan/benchmark.py --mode forward"),
        *("memory_snapshot.pickle", "numpy einops einx jaxtyping"),
    ),
    "transformer, training from the first allocation": (
        *("traces/lm_fb_ctx200.pickle.gz", "2.6", "A100-40GB", "niu/profile_memory.py --mode fb --context_length 200"),
        *("forward_and_backward_memory_snapshot_200.pickle", "numpy einops"),
    ),
    "the same, forward": (
        *("traces/lm_fwd_ctx200.pickle.gz", "2.6", "A100-40GB"),
        *("niu/profile_memory.py --mode forward --context_length 200", "forward_memory_snapshot_200.pickle"),
        "numpy einops",
    ),
    "2.7B, one full step, fp32, AdamW": (
        *("traces/lm27b_ctx128_fullstep.pickle.gz", "2.6", "H100", "lm27b.py step 128", "lm27b.128.pickle"),
        "numpy einops",
    ),
    "Llama 3 8B, FSDP on 4 GPUs, to its out-of-memory error": (
        *("traces/llama3_8b_fsdp4_oom_rank0.pickle.gz", "2.11", "A100-40GB:41000000000", "llama3_fsdp.py"),
        *("llama3_fsdp.pickle", ""),
    ),
    "Qwen 0.5B, Hugging Face, inference": (
        *("traces/qwen05b_h100.json.gz", "2.6", "H100", "hf.py qwen", "qwen.json", "numpy transformers"),
    ),
    "BERT, Hugging Face, inference": (
        *("traces/h100/bert.json.gz", "2.6", "H100", "hf.py bert", "bert.json", "numpy transformers"),
    ),
    "ResNet-50, batch 1, SGD": (
        *("traces/resnet50_pytorch_blog.pickle.gz", "2.1", "A100-40GB", "blog.py", "resnet50.pickle"),
        "numpy torchvision",
    ),
    "ResNet-50, batch 32, SGD": (
        *("traces/resnet_timeline_hta.json.gz", "2.1", "A100-40GB", "resnet50_batch.py", "resnet50_batch.pickle"),
        "numpy torchvision",
    ),
}
CASES = tuple(
    Case(name, recording, torch, gpu, program.split(), writes, needs.split(), blocks=recording.endswith(".json.gz"))
    for name, (recording, torch, gpu, program, writes, needs) in _CASES.items()
)
