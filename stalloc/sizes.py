"""The units that memory is handed out in: 512 bytes to a program, as by PyTorch and CuPy, and 2 MiB to an allocator."""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from stalloc.columns import Column

ALIGNMENT_BYTES = 512  #: requests are rounded up to it, and blocks begin at multiples of it
MIB, GIB = 1 << 20, 1 << 30
PAGE_BYTES = 2 << 20  #: what the driver maps on every GPU so far; segments are multiples of it
LITTLE_BYTES = PAGE_BYTES >> 5  #: requests below it lie together: one that lived on alone would keep a page from others

Size = TypeVar("Size", int, "Column")


def aligned(size_bytes: Size, alignment: int = ALIGNMENT_BYTES) -> Size:
    """What a request takes: the next multiple of a power of two, of one size or of each in a column."""
    return (size_bytes + (alignment - 1)) & -alignment


def whole_pages(size_bytes: Size) -> Size:
    """The next multiple of PAGE_BYTES, of one size or of each in a column."""
    return (size_bytes + (PAGE_BYTES - 1)) & -PAGE_BYTES
