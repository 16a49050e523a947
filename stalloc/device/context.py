"""What a process takes on a GPU beside its allocators: the CUDA context with the kernels it loads, and NCCL's buffers.

Contract: no figure of allocated or reserved memory counts it, native ones included; where it matters it is a row of its
own, with where it is from. cuBLAS's and cuDNN's workspaces are allocations of the program, and counted as such.
"""

from dataclasses import dataclass

ASSUMED_BYTES = 512 << 20

#: What is known of it. The last two are the memory of the card less what a recording says was reserved and free when it
#: ran out of memory; the card's memory is known to within 1 %, and nobody wrote down what else ran there.
SOURCE = (
    "an assumption; PyTorch's maintainers speak of 300 to 400 MiB (issues 107667 and 109888), recordings of errors "
    "leave room for 0.8 GiB, and for 1.1 to 1.3 GiB with NCCL on 4 GPUs"
)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The CUDA context of one process on one card, with the kernels that it loads."""

    least_bytes: int
    most_bytes: int
    source: str


_ANY = Context(
    least_bytes=300 << 20,
    most_bytes=819 << 20,
    source="no figure of this card is known: PyTorch's maintainers speak of 300 to 400 MiB (pytorch#107667, "
    "pytorch#109888), and recordings of errors leave room for 0.8 GiB",
)
# What nvidia-smi showed of a process with hardly an allocation, as others published it. Kernels come as they are first
# called, so a program that does more has more: up to what is known of any card.
_PUBLISHED = {
    "RTX-6000-Ada": (426, "nvidia-smi with PyTorch 2.10 and CUDA 13.0 (unslothai/unsloth-zoo#1053)"),
    "RTX-3090": (484, "nvidia-smi with CUDA 13.0 and NCCL's kernels (NVIDIA/nccl#2366)"),
}


def context_of(card: str) -> Context:
    """What is known of a card, by its name in `known_gpus`."""
    if card not in _PUBLISHED:
        return _ANY
    mib, source = _PUBLISHED[card]
    return Context(least_bytes=mib << 20, most_bytes=_ANY.most_bytes, source=f"at least what was seen: {source}")
