"""Writes are refused: this process and its children can change files below some folders only.

Contract: after `deny_writes` what would create, change, rename or remove a file elsewhere fails with EACCES, for good;
what changes only a file's mode, owner, times or attributes is left undone, as if it had been done. It takes no
privilege and no namespace, only Landlock (Linux 5.13, landlock(7)) and a filter of system calls (seccomp(2)), which
Docker's default profile allows. Raises OSError, with nothing changed, where the kernel has no Landlock.
"""

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from stalloc.sandbox.overlay import LIBC, checked

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_NO_NEW_PRIVILEGES, _SET_SECCOMP = 38, 22  # options of prctl(2)
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))  # remove and make entries of every kind
_SHARED_MEMORY = "/dev/shm"
#: names of shared memory that processes make for one another: of multiprocessing, torch, OpenMP and semaphores
_SEGMENT_PREFIXES = ("sem.", "psm_", "mp-", "pym-", "torch_", "__KMP", "nccl-", "cuda.shm.", "ompi", "vader", "psm2")


def version() -> int:
    """The version of Landlock that the kernel offers; 0 if it offers none."""
    return max(0, int(LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def deny_writes(writable: Sequence[Path]) -> None:
    """Refuse what is not below these folders, a device, or of this process itself."""
    found = version()
    handled = _WRITE_FILE | _CHANGE_FOLDER | (_REFER if found >= 2 else 0) | (_TRUNCATE if found >= 3 else 0)
    of_files = handled & (_WRITE_FILE | _TRUNCATE)
    attributes = ctypes.create_string_buffer(struct.pack("=Q", handled), 8)
    rules = checked(LIBC.syscall(_CREATE, attributes, ctypes.c_size_t(8), ctypes.c_uint32(0)), "landlock")
    try:
        for path in [*writable, Path("/proc"), *_devices()]:
            with contextlib.suppress(OSError):  # gone, or of a kind that has no rules
                folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    allowed = handled if stat.S_ISDIR(os.fstat(folder).st_mode) else of_files
                    rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, folder), 12)
                    checked(LIBC.syscall(_ADD, rules, 1, rule, ctypes.c_uint32(0)), "landlock")
                finally:
                    os.close(folder)
        checked(LIBC.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0))), "no_new_privs")
        _leave_attributes(may_truncate=found >= 3)
        checked(LIBC.syscall(_RESTRICT, rules, ctypes.c_uint32(0)), "landlock")
    finally:
        os.close(rules)


def _devices() -> list[Path]:
    """What is in /dev, without shared memory in which files lie that are no segment of a running program's."""
    shared = Path(_SHARED_MEMORY)
    found = [one for one in Path("/dev").iterdir() if one != shared and not one.is_symlink()]
    with contextlib.suppress(OSError):
        if all(one.name.startswith(_SEGMENT_PREFIXES) for one in shared.iterdir()):
            found.append(shared)
    return found


# System calls by their numbers on x86-64 and on 64-bit ARM, which lacks the older ones
_IS_ARM = os.uname().machine == "aarch64"
_ARCHITECTURE = 0xC00000B7 if _IS_ARM else 0xC000003E
_ATTRIBUTES = (
    (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88)  # setxattr to fremovexattr, fchmod, fchmodat, fchownat, fchown, utimensat
    if _IS_ARM
    else (90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280)
)
_LATER_ATTRIBUTES = (452, 463, 466, 469)  # fchmodat2, setxattrat, removexattrat, file_setattr
_IO_URING = 425  # its requests go past a filter
_OF_X32 = 1 << 30  # calls of x86-64's other interface have this bit in their numbers
_TRUNCATE_CALL = 45 if _IS_ARM else 76
_OPENS = ((56, 2),) if _IS_ARM else ((2, 1), (257, 2))  #: open and openat, and which argument has the flags
_OPENAT2 = 437  # whose flags a filter cannot see
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


def _leave_attributes(*, may_truncate: bool) -> None:
    """A filter under which calls that change attributes do nothing and say that they did: Landlock knows none of them.

    Without `may_truncate` (an older Landlock, which lets every file be cut) calls that cut a file by its path fail.
    """
    program = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _ARCHITECTURE), (_RETURN, 0, 0, _ERRNO | 38)]
    program += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _OF_X32), (_RETURN, 0, 0, _ERRNO | 38)]
    for number in (*_ATTRIBUTES, *_LATER_ATTRIBUTES):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | 0)]
    program += [(_EQUAL, 0, 1, _IO_URING), (_RETURN, 0, 0, _ERRNO | 38)]
    if not may_truncate:
        program += [(_EQUAL, 0, 1, _TRUNCATE_CALL), (_RETURN, 0, 0, _ERRNO | 13)]
        program += [(_EQUAL, 0, 1, _OPENAT2), (_RETURN, 0, 0, _ERRNO | 38)]
        for number, argument in _OPENS:  # opened for reading only, and cut: no write, as Landlock sees it
            program += [
                (_EQUAL, 0, 5, number),
                (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),
                (_AND, 0, 0, os.O_ACCMODE | os.O_TRUNC),
                (_EQUAL, 0, 1, os.O_TRUNC),
                (_RETURN, 0, 0, _ERRNO | 13),
                (_LOAD, 0, 0, _NUMBER_AT),
            ]
    program.append((_RETURN, 0, 0, _ALLOW))
    lines = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    whole = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(lines)))
    checked(LIBC.prctl(_SET_SECCOMP, ctypes.c_ulong(2), whole, ctypes.c_ulong(0), ctypes.c_ulong(0)), "seccomp")
