"""Giving host memory back to the system: what is watched and planned is large once, and then no more.

Contract: a hint. Where the system does not know these calls, memory stays resident and nothing else changes.
"""

import contextlib
import ctypes
import mmap

import numpy as np

_PAGE = mmap.PAGESIZE
_DONT_NEED = 4  # Linux's MADV_DONTNEED: the pages read as zeros from then on


def forget_pages(table: np.ndarray) -> None:
    """Let go of the whole pages of a table of zeros, whose content nobody needs any more."""
    first = -(-table.ctypes.data // _PAGE) * _PAGE
    last = (table.ctypes.data + table.nbytes) // _PAGE * _PAGE
    with contextlib.suppress(OSError, AttributeError):
        if last > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONT_NEED)


def trim() -> None:
    """Hand what the C library's malloc holds without need back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
