"""Reading traces of any kind: the content decides what a file is, its name only breaks ties.

Whatever is wrong with a file ends in a BadInputError of one sentence; nothing from the file is ever executed.
"""

import gzip
import os
import zlib
from pathlib import Path
from typing import BinaryIO

from stalloc.errors import BadInputError
from stalloc.inputs import memory_limit_bytes, open_input, read_bounded, shown_name
from stalloc.npz import unpacked_limit_bytes
from stalloc.trace.check import check_read
from stalloc.trace.record import Trace
from stalloc.trace.sources.dtr_log import read_dtr_log
from stalloc.trace.sources.kineto import read_kineto
from stalloc.trace.sources.memory_timeline import read_memory_timeline
from stalloc.trace.sources.planning_csv import looks_like_planning_csv, read_planning_csv
from stalloc.trace.sources.rmm_log import looks_like_rmm_log, read_rmm_log
from stalloc.trace.sources.torch_snapshot import read_torch_snapshot
from stalloc.trace.sources.viz_page import read_viz_page
from stalloc.trace.storage import read_npz

_DAMAGED_GZIP = "the gzip data is damaged or cut short: copy the file again"


def load_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """The traces of a file, one for each device that has events, ordered by device.

    Reads `.trace.npz` and, plain or gzip: snapshots of torch as pickles and as HTML pages; traces (JSON with `[memory]`
    events) and raw memory timelines of torch.profiler; logs of RMM and of the DTR simulator; planning CSV
    `id,lower,upper,size[,offset][,stream]`. The name `-` is standard input. Raises BadInputError for everything else.
    """
    name = shown_name(path)
    try:
        with open_input(path, "a trace file") as file:
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(b"PK"):
                traces = read_npz(name, file)
            else:
                traces = _read_content(name, _read(name, file, compressed=magic.startswith(b"\x1f\x8b")))
            for trace in traces:
                check_read(trace)
            return traces
    except BadInputError as error:  # what a trace says of itself does not know the file
        raise error if str(name) in str(error) else BadInputError(f"{name}: {error}") from error
    except (EOFError, zlib.error) as error:
        raise BadInputError(f"{name}: {_DAMAGED_GZIP}.") from error
    except MemoryError as error:
        raise BadInputError(f"{name}: too large for this machine's memory: record fewer steps.") from error


def _read(name: Path, file: BinaryIO, *, compressed: bool) -> bytes:
    if not compressed:
        return read_bounded(file, str(name), memory_limit_bytes())
    packed_bytes = file.seek(0, 2)
    file.seek(0)
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            return read_bounded(unpacked, str(name), unpacked_limit_bytes(packed_bytes))
    except gzip.BadGzipFile as error:
        raise BadInputError(f"{name}: {_DAMAGED_GZIP}.") from error


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
        "or raw memory timeline of torch.profiler, a log of RMM or DTR, or a CSV with the columns id,lower,upper,size; "
        "for `stalloc explain` also the text of an out-of-memory error of PyTorch or CuPy."
    )
