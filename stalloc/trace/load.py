"""Reading traces of any kind: the content decides what a file is, its name only breaks ties.

Whatever is wrong with a file ends in a BadInputError of one sentence; nothing from the file is ever executed.
"""

import gzip
import os
import zlib
from pathlib import Path

from stalloc.errors import BadInputError
from stalloc.trace.record import Trace
from stalloc.trace.sources.dtr_log import read_dtr_log
from stalloc.trace.sources.kineto import read_kineto
from stalloc.trace.sources.memory_timeline import read_memory_timeline
from stalloc.trace.sources.planning_csv import looks_like_planning_csv, read_planning_csv
from stalloc.trace.sources.rmm_log import looks_like_rmm_log, read_rmm_log
from stalloc.trace.sources.torch_snapshot import read_torch_snapshot
from stalloc.trace.sources.viz_page import read_viz_page
from stalloc.trace.storage import read_npz

MAX_BYTES = 8 << 30
"""Larger contents are refused, which also bounds what a compressed file may grow to."""
_CHUNK = 16 << 20


def load_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """The traces of a file, one for each device that has events, ordered by device.

    Reads `.trace.npz` and, plain or gzip: snapshots of torch as pickles and as HTML pages; traces (JSON with `[memory]`
    events) and raw memory timelines of torch.profiler; logs of RMM and of the DTR simulator; planning CSV
    `id,lower,upper,size[,offset][,stream]`. Raises BadInputError for everything else.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic.startswith(b"PK"):
            return read_npz(path)
        return _read_content(path, _read(path, compressed=magic.startswith(b"\x1f\x8b")))
    except IsADirectoryError as error:
        raise BadInputError(f"{path} is a directory: give a trace file inside it.") from error
    except FileNotFoundError as error:
        raise BadInputError(f"{path} does not exist: check the name.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInputError(f"{path}: the gzip data is damaged or cut short: copy the file again.") from error
    except MemoryError as error:
        raise BadInputError(f"{path}: too large for this machine's memory: record fewer steps.") from error
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}: check the file and its permissions.") from error


def _read(path: Path, *, compressed: bool) -> bytes:
    limit = min(MAX_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    parts, total = [], 0
    with gzip.open(path) if compressed else path.open("rb") as file:
        while part := file.read(_CHUNK):
            parts.append(part)
            total += len(part)
            if total > limit:
                raise BadInputError(f"{path}: holds more than {limit >> 30} GiB of data: record fewer steps.")
    return b"".join(parts)


def _read_content(path: Path, data: bytes) -> list[Trace]:
    head = data[:4096].lstrip()
    if not head:
        raise BadInputError(f"{path} is empty: record it again.")
    if data[0] == 0x80 or {".pickle", ".pkl"} & set(path.suffixes):
        return read_torch_snapshot(path, data)
    if looks_like_planning_csv(head):
        return [read_planning_csv(path, data)]
    if looks_like_rmm_log(head):
        return [read_rmm_log(path, data)]
    if head.startswith(b"<"):
        return read_viz_page(path, data)
    if head.startswith(b"{") and b'"INSTRUCTION"' in head.splitlines()[0]:
        return [read_dtr_log(path, data)]
    if head.startswith(b"[") and head[1:].lstrip().startswith(b"["):
        return [read_memory_timeline(path, data)]
    if head.startswith((b"{", b"[")):
        return read_kineto(path, data)
    raise BadInputError(
        f"{path}: not a trace: expected a .trace.npz, a snapshot pickle of torch.cuda.memory or its HTML page, a trace "
        f"or raw memory timeline of torch.profiler, a log of RMM or DTR, or a CSV with the columns id,lower,upper,size."
    )
