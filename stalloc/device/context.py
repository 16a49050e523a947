"""What a process takes on a GPU beside its allocators: the CUDA context with the kernels it loads, and NCCL's buffers.

Contract: no figure of allocated or reserved memory counts it, native ones included; where it matters it is a row of its
own, with where it is from. cuBLAS's and cuDNN's workspaces are allocations of the program, and counted as such.
"""

ASSUMED_BYTES = 512 << 20

#: What is known of it. The last two are the memory of the card less what a recording says was reserved and free when it
#: ran out of memory; the card's memory is known to within 1 %, and nobody wrote down what else ran there.
SOURCE = (
    "an assumption; PyTorch's maintainers speak of 300 to 400 MiB (issues 107667 and 109888), recordings of errors "
    "leave room for 0.8 GiB, and for 1.1 to 1.3 GiB with NCCL on 4 GPUs"
)
