"""A kernel of Triton for the programs beside it: kernels are in files of their own, where Triton reads them."""

import triton
import triton.language as tl


@triton.jit
def add(one, other, total, num, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num
    tl.store(total + index, tl.load(one + index, mask=inside) + tl.load(other + index, mask=inside), mask=inside)
