"""Run a command as under Docker's default profile: no namespaces and no mounts, and with `all` no Landlock either."""

import ctypes
import os
import struct
import sys

ARM = os.uname().machine == "aarch64"
NAMESPACES = (97, 40, 39, 41) if ARM else (272, 165, 166, 155)  # unshare, mount, umount2, pivot_root
LANDLOCK = (444, 445, 446)


def refuse(numbers: dict[int, int]) -> None:
    """Let system calls fail, each with an error number, in this process and its children."""
    lines = [(0x20, 0, 0, 0)]
    for number, error in numbers.items():
        lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)]
    lines.append((0x06, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    whole = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0
    assert libc.prctl(22, ctypes.c_ulong(2), whole, ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0


def refuse_all_or_namespaces(what: str) -> None:
    refuse(dict.fromkeys(NAMESPACES, 1) | (dict.fromkeys(LANDLOCK, 38) if what == "all" else {}))


if __name__ == "__main__":
    refuse_all_or_namespaces(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])
