"""Host memory that a GPU copies from and to by itself.

Contract: so many bytes as are asked for, from the driver; torch's own pinned memory comes in powers of two.
"""

from typing import Any


def pinned_memory(size_bytes: int) -> Any:
    """CuPy's pointer to so many bytes, given back with its last reference. MemoryError if the driver gives no more."""
    from cupy import cuda

    try:
        return cuda.PinnedMemoryPointer(cuda.PinnedMemory(size_bytes), 0)
    except cuda.runtime.CUDARuntimeError as error:
        raise MemoryError(str(error)) from error
