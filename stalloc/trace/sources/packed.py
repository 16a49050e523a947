"""Files that were packed to be sent: gzip, bzip2, xz, and a zip archive of one file, as issue trackers take them.

Contract: no more is unpacked than the size of the packed file allows.
"""

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from stalloc.errors import BadInputError
from stalloc.inputs import read_bounded
from stalloc.npz import MAX_MEMBERS, unpacked_limit_bytes

PACKED: tuple[tuple[bytes, str, Any], ...] = (
    (b"\x1f\x8b", "gzip", gzip.open),
    (b"BZh", "bzip2", bz2.open),
    (b"\xfd7zXZ\x00", "xz", lzma.open),
)
ARCHIVE = b"PK\x03\x04"
#: what damaged files raise
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, ValueError)
_TAR_MAGIC_AT = 257
_OURS, _COLUMN, _TORCH = ".npz", ".npy", "/data.pkl"  # a member of our own archives; what torch.save() writes


def unpack(where: Path, file: BinaryIO) -> bytes | None:
    """What a packed file holds, also if that was packed before; None if it is not packed, or an archive of columns.

    Raises BadInputError for one that is damaged, or an archive of several files.
    """
    head = file.read(8)
    packed_bytes = file.seek(0, 2)
    file.seek(0)
    limit = unpacked_limit_bytes(packed_bytes)
    kind, opener = next(((kind, one) for magic, kind, one in PACKED if head.startswith(magic)), ("zip", None))
    try:
        if opener is not None:
            with opener(file) as unpacked:
                return read_bounded(unpacked, str(where), limit)
        if not head.startswith(ARCHIVE) or where.suffix == _OURS:
            return None
        with zipfile.ZipFile(file) as archive:
            if any(name.endswith(_COLUMN) for name in archive.namelist()):
                return None
            with archive.open(_only_member(where, archive)) as member:
                data = read_bounded(member, str(where), limit)
    except BadInputError:
        raise
    except DAMAGE as error:
        raise BadInputError(f"{where}: the {kind} data is damaged or cut short: copy the file again.") from error
    finally:
        file.seek(0)
    inner = unpack(where, io.BytesIO(data))
    return data if inner is None else inner


def is_tar(data: bytes) -> bool:
    """Whether what was unpacked is a tar archive, which may hold anything."""
    return data[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar"


def _only_member(where: Path, archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    of_torch = [name for name in names if name.endswith(_TORCH)]
    if len(of_torch) == 1:
        return of_torch[0]
    if len(names) != 1 or len(names) > MAX_MEMBERS:
        raise BadInputError(f"{where}: an archive of {len(names)} files: unpack it, and give one of them.")
    return names[0]
