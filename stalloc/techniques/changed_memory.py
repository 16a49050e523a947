"""Whether a private mapping of a file was written to, by whoever: each page that was is a copy of its own.

Contract: a change is never overlooked; where the kernel does not tell, anything may have been changed.
Source: the Linux kernel's documentation of /proc/PID/pagemap: of each page bit 63 says that it is in memory, bit 62
that it was swapped out, bit 61 that it is still that of the file.
"""

import ctypes
import functools
import mmap

import numpy as np

_HELD, _OF_FILE = 3 << 62, 1 << 61


def is_changed(memory: mmap.mmap) -> bool:
    """Whether any page of mapped memory may have been changed, so that it is a copy of the file's."""
    try:
        return not _kernel_tells() or _has_copies(memory)
    except OSError:
        return True


def drop_changes(memory: mmap.mmap) -> None:
    """Let every page show the file's content again."""
    memory.madvise(mmap.MADV_DONTNEED)


@functools.cache
def _kernel_tells() -> bool:
    """Whether the kernel tells which pages are copies; some sandboxes have an empty file."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
    page[0] = 1
    return _has_copies(page)


def _has_copies(memory: mmap.mmap) -> bool:
    """Whether any page is a copy. Raises OSError where /proc/self/pagemap is missing or must not be read."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(begin // mmap.PAGESIZE * 8)
        pages = np.frombuffer(file.read(len(memory) // mmap.PAGESIZE * 8), np.uint64)
    is_whole = len(pages) * mmap.PAGESIZE == len(memory)
    return not is_whole or bool(((pages & _HELD != 0) & (pages & _OF_FILE == 0)).any())
