"""Archives of columns (.npz) that anyone may have written: read within bounds that are known beforehand.

Contract: before a column is made, the sizes that the archive states are held against its file and the machine, each
column's shape against the size of its member, and no more is unpacked than is stated. No column holds objects.
"""

import math
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from stalloc.inputs import memory_limit_bytes

MAX_RATIO, FREE_BYTES = 250, 16 << 20
"""Contents of a compressed file are at most FREE_BYTES and so many times its size: columns shrink to a tenth,
snapshots to a hundredth."""
MAX_MEMBERS = 100_000
_CHUNK = 1 << 20
_MAX_DIMENSIONS = 8

DAMAGE: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    EOFError,
    MemoryError,
    RuntimeError,
    RecursionError,
    SyntaxError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What damaged archives and headers raise, none of it a defect of ours."""


def unpacked_limit_bytes(packed_bytes: int) -> int:
    """What the contents of a compressed file of so many bytes may take on this machine."""
    return min(memory_limit_bytes(), FREE_BYTES + MAX_RATIO * packed_bytes)


class Columns:
    """The columns of an open archive, by name. Whatever is wrong with it raises one of DAMAGE."""

    def __init__(self, file: BinaryIO) -> None:
        file.seek(0, 2)
        limit = unpacked_limit_bytes(file.tell())
        file.seek(0)
        self._archive = zipfile.ZipFile(file)
        entries = self._archive.infolist()
        if len(entries) > MAX_MEMBERS:
            raise ValueError(f"it has {len(entries)} members")
        self._entries = {entry.filename.removesuffix(".npy"): entry for entry in entries}
        if len(self._entries) < len(entries):
            raise ValueError("two of its columns have one name")
        for name, entry in self._entries.items():
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
                raise ValueError(f"{name[:40]} is packed in a way that columns are not")
        total = sum(entry.file_size for entry in entries)
        if total > limit:
            raise ValueError(f"its columns take {total:,} bytes, more than the {limit:,} that its size allows")

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """A column, writable; KeyError if there is none of that name."""
        if name not in self._entries:
            raise KeyError(name)
        entry = self._entries[name]
        with self._archive.open(entry) as member:
            shape, dtype = _header(name, member, entry.file_size)
            column = np.empty(shape, dtype)
            target = column.reshape(-1).view(np.uint8)
            done = 0
            while done < len(target):
                part = member.read(min(_CHUNK, len(target) - done))
                if not part:
                    raise EOFError(f"{name[:40]} is cut short")
                target[done : done + len(part)] = np.frombuffer(part, np.uint8)
                done += len(part)
            if member.read(1):  # also the moment when the checksum is compared
                raise ValueError(f"{name[:40]} holds more than it states")
        return column


def _header(name: str, member: Any, member_bytes: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    if version != (1, 0):  # later ones are for longer headers, which columns do not have
        raise ValueError(f"{name[:40]} has the array format {version}")
    try:
        shape, in_fortran_order, dtype = np.lib.format.read_array_header_1_0(member)
    except Exception as error:  # it is parsed as Python, which fails in many ways
        raise ValueError(f"the header of {name[:40]} is damaged") from error
    if dtype.kind not in "biufSU" or not dtype.isnative or dtype.itemsize == 0:
        raise ValueError(f"{name[:40]} holds {dtype}, which is no kind of number or text")
    if len(shape) > _MAX_DIMENSIONS or (in_fortran_order and len(shape) > 1) or any(length < 0 for length in shape):
        raise ValueError(f"{name[:40]} has a shape that columns do not have")
    if math.prod(shape) * dtype.itemsize != member_bytes - member.tell():
        raise ValueError(f"{name[:40]} states another length than it has")
    return shape, dtype
