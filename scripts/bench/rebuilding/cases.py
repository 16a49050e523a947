"""The programs that were rebuilt: what runs them, and which recording they are held against."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program, as it was when its memory was recorded on a real GPU."""

    name: str
    recording: str
    """Below the shared directory."""
    torch: str
    """The release that made the recording, or the nearest one."""
    gpu: str
    """Its name, and after a colon the bytes that were left for the allocator, where the recording ran out of them."""
    program: tuple[str, ...]
    """The script beside this file, or below `fidelity/programs`, and its arguments."""
    writes: str
    """The file that the program leaves in its working directory."""
    needs: tuple[str, ...] = ()
    """Packages beside torch."""
    blocks: bool = False
    """The recording holds the sizes of blocks, as a profiler sees them, not of requests."""


CASES = (
    Case(
        name="transformer, forward, autograd off",
        recording="fidelity/recordings/lm_charan_train.pickle.gz",
        torch="2.11",
        gpu="RTX-4090",
        program=("charan/benchmark.py", "--mode", "forward"),
        writes="memory_snapshot.pickle",
        needs=("numpy", "einops", "einx", "jaxtyping"),
    ),
    Case(
        name="transformer, training from the first allocation",
        recording="traces/lm_fb_ctx200.pickle.gz",
        torch="2.6",
        gpu="A100-40GB",
        program=("niu/profile_memory.py", "--mode", "fb", "--context_length", "200"),
        writes="forward_and_backward_memory_snapshot_200.pickle",
        needs=("numpy", "einops"),
    ),
    Case(
        name="the same, forward",
        recording="traces/lm_fwd_ctx200.pickle.gz",
        torch="2.6",
        gpu="A100-40GB",
        program=("niu/profile_memory.py", "--mode", "forward", "--context_length", "200"),
        writes="forward_memory_snapshot_200.pickle",
        needs=("numpy", "einops"),
    ),
    Case(
        name="2.7B, one full step, fp32, AdamW",
        recording="traces/lm27b_ctx128_fullstep.pickle.gz",
        torch="2.6",
        gpu="H100",
        program=("lm27b.py", "step", "128"),
        writes="lm27b.128.pickle",
        needs=("numpy", "einops"),
    ),
    Case(
        name="Llama 3 8B, FSDP on 4 GPUs, to its out-of-memory error",
        recording="traces/llama3_8b_fsdp4_oom_rank0.pickle.gz",
        torch="2.11",
        gpu="A100-40GB:41000000000",
        program=("llama3_fsdp.py",),
        writes="llama3_fsdp.pickle",
    ),
    Case(
        name="Qwen 0.5B, Hugging Face, inference",
        recording="traces/qwen05b_h100.json.gz",
        torch="2.6",
        gpu="H100",
        program=("hf.py", "qwen"),
        writes="qwen.json",
        needs=("numpy", "transformers"),
        blocks=True,
    ),
    Case(
        name="BERT, Hugging Face, inference",
        recording="traces/h100/bert.json.gz",
        torch="2.6",
        gpu="H100",
        program=("hf.py", "bert"),
        writes="bert.json",
        needs=("numpy", "transformers"),
        blocks=True,
    ),
    Case(
        name="ResNet-50, batch 1, SGD",
        recording="traces/resnet50_pytorch_blog.pickle.gz",
        torch="2.1",
        gpu="A100-40GB",
        program=("blog.py",),
        writes="resnet50.pickle",
        needs=("numpy", "torchvision"),
    ),
    Case(
        name="ResNet-50, batch 32, SGD",
        recording="traces/resnet_timeline_hta.json.gz",
        torch="2.1",
        gpu="A100-40GB",
        program=("resnet50_batch.py",),
        writes="resnet50_batch.pickle",
        needs=("numpy", "torchvision"),
        blocks=True,
    ),
)
