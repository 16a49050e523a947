"""Sizes: rounding, and what torch takes from the device for a request. Compiled, and usable from Python."""

from stalloc.compiled import inner, njit
from stalloc.sizes import PAGE_BYTES

GRANULE = PAGE_BYTES  # segments begin at multiples of it, and what the device maps is a multiple
SMALL_BYTES = 1 << 20  # torch serves requests up to this from segments of one granule
LARGE_SEGMENT = 20 << 20  # bytes that torch takes for requests from there to 10 MiB


@njit()
def round_up(size, unit):
    """The least multiple of `unit` that is not less."""
    return (size + unit - 1) // unit * unit


@inner()
def torch_segment_size(size, large):
    """What torch takes from the device for a block of `size` bytes; `large`: for those from 1 MiB to below 10 MiB."""
    if size <= SMALL_BYTES:
        return GRANULE
    return large if size < 10 * SMALL_BYTES else round_up(size, GRANULE)


@inner()
def log2(value):
    """The position of the highest bit of a positive number."""
    position = 0
    for step in (32, 16, 8, 4, 2, 1):
        if value >> step:
            value >>= step
            position += step
    return position
