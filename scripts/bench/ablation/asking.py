"""The loop that makes a recording's requests, by the entries that torch and CuPy use; it holds nothing of the core."""

import ctypes

import numba

from ablation.rows import FREE, MALLOC
from stalloc.core.requests import free_entry, malloc_entry

_malloc = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(malloc_entry.address)
_free = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(free_entry.address)


@numba.njit  # type: ignore[misc]  # small, since it holds nothing of the core
def ask(device, rows, address):  # type: ignore[no-untyped-def]
    """Make requests and frees; False if one is not served that was when it was recorded."""
    for i in range(len(rows)):
        what, block = rows[i, 0], rows[i, 1]
        if what == FREE:
            _free(device, address[block])
        else:
            address[block] = _malloc(device, rows[i, 2], rows[i, 3])
            if what == MALLOC and address[block] == 0:
                return False
            if what != MALLOC:
                _free(device, address[block])
    return True
