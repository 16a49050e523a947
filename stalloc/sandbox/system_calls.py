"""System calls that Python has no function for, through the C library."""

import ctypes
import os

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
LIBC.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]

_IS_ARM = os.uname().machine == "aarch64"
PIVOT_ROOT = 41 if _IS_ARM else 155
NO_NEW_PRIVILEGES, SET_SECCOMP, DEATH_SIGNAL = 38, 22, 1  #: options of prctl(2)


def checked(result: int, what: str) -> int:
    """The result of a call. Raises OSError with `what` for a file name if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
