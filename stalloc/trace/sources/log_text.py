"""Files as they were kept or sent, and logs as text: compressed, as UTF-16, as the JSON of a container or a journal.

Contract: no more is unpacked (gzip, bzip2, xz, a zip archive of one file, as issue trackers take them) than the size of
the packed file allows. What looks like any kind of trace is no log. The text of a log in JSON is that of its strings, a
line each; that of an HTML page is what a reader sees. What is damaged or cut short gives the text up to there.
"""

import bz2
import gzip
import html
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stalloc.errors import BadInputError
from stalloc.inputs import memory_limit_bytes, read_bounded
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


_CHUNK = 1 << 20
_BINARY = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")  # pickles, archives
_TRACE_JSON = re.compile(r'"(?:traceEvents|ph|INSTRUCTION|device_traces|segments|schemaVersion|total_size)"\s*:')
_TIMELINE = re.compile(rb"\s*\[\s*\[\s*(?:-?\d+\s*[,\].]|[\[\]\"])")
_VIZ_PAGE = re.compile(r'alloc_data|"base64"|_memory_viz')
_PAGE = re.compile(rb"<(?:!doctype|html|head|body|script|\?xml|div|pre|span)\b", re.IGNORECASE)
#: marks before text, and how it is encoded then
BOMS = ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"), (b"\xef\xbb\xbf", "utf-8"))
_MAX_DEPTH = 8
_HEAD = 4096
_CONTROL = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f]")  # which no text has
_HOLE = re.compile(rb"\0{8,}")  # zeros where a log was emptied while written to, or a machine failed
_CUT = re.compile(r"(?m)^\S+ std(?:out|err) P ")  # Kubernetes: the line goes on in the next one of that stream
_CRI = re.compile(r"\S+ (std(?:out|err)) ([PF]) ")
_DOCKER_CUTS_AT = 16_000  # bytes of a line; the rest is in the next object


def unpacked(file: BinaryIO) -> bytes:
    """What a file holds, unpacked if it was packed, as far as it can be; nothing where it begins as a binary trace."""
    head = file.read(8)
    packed_bytes = file.seek(0, 2)
    file.seek(0)
    if head.startswith(ARCHIVE):
        data = unpack(Path("the archive"), file) or b""
        return b"" if _BINARY.match(data) else data
    opened = next((opener for magic, _, opener in PACKED if head.startswith(magic)), None)
    if opened is not None:
        head = _up_to(opened(file), 8, chunk=8)
        file.seek(0)
    if _BINARY.match(head):
        return b""
    if opened is None:
        return read_bounded(file, "the log", memory_limit_bytes())
    return _up_to(opened(file), unpacked_limit_bytes(packed_bytes))


def _up_to(file: Any, limit: int, chunk: int = _CHUNK) -> bytes:
    parts, total = [], 0
    try:
        while total < limit and (part := file.read1(chunk)):
            parts.append(part)
            total += len(part)
    except (EOFError, OSError, zlib.error, lzma.LZMAError):
        pass  # cut short: what came before is there
    return b"".join(parts)


def log_text(data: bytes) -> str | None:
    """The text of a log; None for a trace, or for what is no text at all."""
    if _HOLE.search(data, 0, _HEAD):
        data = _HOLE.sub(b"", data)
    head = data[:4096]
    if _BINARY.match(head) or is_tar(data) or not head.strip():
        return None
    text = _decoded(data)
    if text is None or len(_CONTROL.findall(text, 0, _HEAD)) > _HEAD // 100:
        return None
    start = text[:4096].lstrip().encode("utf-8", "replace")
    if start[:1] in (b"{", b"["):
        if _TIMELINE.match(start) or _TRACE_JSON.search(text):
            return None
        return "\n".join(_json_lines(text))
    if _PAGE.search(start[:1024]) and start[:1] == b"<":
        return None if _VIZ_PAGE.search(text) else html.unescape(re.sub(r"<[^<>\n]{1,2000}>", "", text))
    if _CUT.search(text):
        text = _whole_lines(text)
    if "\\n" in text:  # a message that was written as a quoted string
        text = text.replace("\\n", "\n")
    return "\n".join(_json_lines(text)) if '{"' in text else text


def _decoded(data: bytes) -> str | None:
    for mark, encoding in BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace")
    zeros_even, zeros_odd = data[:4096:2].count(0), data[1:4096:2].count(0)
    half = len(data[:4096]) // 2
    if max(zeros_even, zeros_odd) > 0.4 * half > 0:  # UTF-16 without a mark
        return data.decode("utf-16-be" if zeros_even > zeros_odd else "utf-16-le", "replace")
    return None if b"\0" in data[:4096] else data.decode("utf-8", "replace")


def _whole_lines(text: str) -> str:
    """The lines of a Kubernetes log, each whole."""
    lines: list[str] = []
    open_lines: dict[str, int] = {}  # of each stream, the one that goes on
    for line in text.splitlines():
        found = _CRI.match(line)
        if found is None:
            lines.append(line)
            continue
        at = open_lines.pop(found[1], None)
        if at is None:
            at = len(lines)
            lines.append(line)
        else:
            lines[at] += line[found.end() :]
        if found[2] == "P":
            open_lines[found[1]] = at
    return "\n".join(lines)


def _json_lines(text: str) -> Iterator[str]:
    """Each line; of one that holds a JSON object the strings in it. A text that is one JSON value is like a line."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            yield from _strings(json.loads(text), 0)
            return
        except (ValueError, RecursionError):
            pass
    cut = ""
    for line in io.StringIO(text):
        at = line.find('{"')
        if at >= 0:
            try:
                value, _ = json.JSONDecoder().raw_decode(line[at:])
                if isinstance(value, dict) and isinstance(part := value.get("log"), str):
                    value["log"] = cut + part
                    cut = value["log"] if len(part) >= _DOCKER_CUTS_AT and not part.endswith("\n") else ""
                    if cut:
                        continue
                yield line[:at] + " ".join(_strings(value, 0))
                continue
            except (ValueError, RecursionError):
                line = line.replace('\\"', '"').replace("\\n", "\n")
        yield line.rstrip("\n")
    if cut:
        yield cut


def _strings(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value.rstrip("\n")
    elif isinstance(value, dict) and depth < _MAX_DEPTH:
        for part in value.values():
            yield from _strings(part, depth + 1)
    elif isinstance(value, list) and depth < _MAX_DEPTH:
        if value and all(isinstance(one, int) and 0 <= one < 256 for one in value):  # the journal's way with escapes
            yield bytes(value).decode("utf-8", "replace")
            return
        for part in value:
            yield from _strings(part, depth + 1)
