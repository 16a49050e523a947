"""The page as one file: markup, style, scripts and data, under a policy that lets nothing else in and nothing out.

Contract: strings of a trace stand only in JSON, in which nothing can end the element that holds it, and the scripts
set them as text. The policy allows the style and the script of the page by their hashes, and no request at all.

A device is a header of words and figures, those of `stats`, `explain` and `top`, and columns of 32-bit numbers. They
are sorted by level of detail, most shown first, and by start within a level; `page.js` reads them in the order in
which they are written here.
"""

import base64
import dataclasses
import gzip
import hashlib
import html
import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.analysis import explain, holders, summarize
from stalloc.analysis.holders import class_keys, module_keys, purposes, role_keys, site_keys, site_text, stack_names
from stalloc.analysis.moments import last_oom
from stalloc.analysis.study_record import as_json
from stalloc.columns import Column
from stalloc.device.known_gpus import shown_name
from stalloc.errors import BadInputError
from stalloc.lifespans.steady_step import named_phases
from stalloc.printable import printable
from stalloc.replay.simulation import Candidate
from stalloc.sizes import ALIGNMENT_BYTES
from stalloc.trace import MARK_STEP, Action, DeviceRecord, Trace
from stalloc.trace.operations import read_operations
from stalloc.trace.sites import read_sites
from stalloc.writers import palettes
from stalloc.writers.page.address_map import detail_levels, planned_map, recorded_map, replayed_map
from stalloc.writers.page.story import drawn_study, headline, remarks
from stalloc.writers.writing import write_chunks

_MAX_MARKS = 2000
_MAX_NAME = 60  # characters of the name of a GPU


@dataclass(frozen=True)
class DeviceData:
    """One device as it stands in the page."""

    header: dict[str, Any]  #: JSON-able; strings may hold anything that a stranger wrote
    packed: str  #: base64 of gzip of the columns, one behind the other


def device_data(record: DeviceRecord, allocators: Sequence[Candidate] = ()) -> DeviceData:
    """Everything that the page shows of a device, with maps of more allocators.

    Raises BadInputError as `explain` and `plan` do, and as `replayed_map` does.
    """
    drawn = drawn_study(record)
    shown = {
        "device": record.device,
        "device_name": _device_name(record),
        "study": drawn and dataclasses.asdict(drawn) | {"found": as_json(drawn.found)},
        "has_memory": record.trace is not None,
    }
    if record.trace is not None:
        return _memory(record.trace, shown, allocators)
    if drawn is None:
        raise BadInputError(
            f"device {record.device} has neither memory nor kernels nor copies: there is nothing to show."
        )
    return DeviceData(
        shown | {"headline": drawn.findings or ["Nothing stands out."], "remarks": drawn.found.missing}, ""
    )


def _memory(trace: Trace, shown: dict[str, Any], allocators: Sequence[Candidate]) -> DeviceData:
    told = explain(trace, "oom" if last_oom(trace) is not None else "peak")
    held, summary = holders(trace), summarize(trace)
    rows = np.arange(trace.num_requests)
    kinds, kind = _numbered(class_keys(trace, rows))
    sites, stacks, stack = _sites(trace)
    size = trace.aligned_size()
    level = detail_levels(trace.start, trace.end, size)
    order = np.lexsort((trace.start, -level.astype(np.int64)))
    replayed = [replayed_map(trace, candidate) for candidate in allocators]
    maps = [made for made in (recorded_map(trace), *replayed, planned_map(trace)) if made is not None]
    columns = {
        "start": trace.start + 1,  # 0: before the first event
        "duration": trace.end - trace.start,
        "size": size // ALIGNMENT_BYTES,
        "kind": kind,
        "stream": trace.stream,
        "stack": stack,
    }
    operations = read_operations(trace)
    groups = {}
    if operations is not None:
        groups["module"] = _numbered(module_keys(operations, rows))
        groups["role"] = _numbered(role_keys(operations, rows))
    columns |= {name: number for name, (_, number) in groups.items()}
    explanation = dataclasses.asdict(told)
    if explanation["out_of_memory"]:
        del explanation["out_of_memory"]["avoided_by"]
    levels, counts = np.unique(level[order], return_counts=True)
    header = {
        **shown,
        "source": printable(str(trace.info.get("source", ""))),
        "headline": headline(told, held, summary),
        "remarks": remarks(trace, told),
        "summary": dataclasses.asdict(summary),
        "explanation": explanation,
        "moment": {"event": held.event, "at": held.at},
        "growth": [dataclasses.asdict(growth) for growth in held.growth],
        "num_requests": trace.num_requests,
        "num_events": max(trace.num_events, 1),
        "levels": [[int(one), int(count)] for one, count in zip(levels[::-1], counts[::-1], strict=True)],
        "kinds": kinds,
        "sites_are": "call site" if read_sites(trace) is not None else "purpose" if operations is not None else "",
        "streams": [str(stream) for stream in trace.streams],
        "sites": sites,
        "stacks": stacks,
        "groups": {name: names for name, (names, _) in groups.items()},
        "steps": trace.mark_event[trace.mark_kind == MARK_STEP][:_MAX_MARKS].tolist(),
        "phases": [[begin, end, printable(name)] for begin, end, name in named_phases(trace)[:_MAX_MARKS]],
        "errors": np.flatnonzero(trace.action == Action.OOM)[:_MAX_MARKS].tolist(),
        "reserved": _reserved(trace),
        "maps": [
            {"name": made.name, "height": made.height, "segments": len(made.segments), "note": made.note}
            for made in maps
        ],
    }
    parts = [column[order] for column in columns.values()]
    parts += [made.place[order] for made in maps]
    parts += [made.segments.reshape(-1) for made in maps]
    return DeviceData(header, _packed(parts))


def _packed(parts: Sequence[Column]) -> str:
    raw = b"".join(np.ascontiguousarray(part, dtype="<u4").tobytes() for part in parts)
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode("ascii")


def _numbered(keys: Sequence[Hashable]) -> tuple[list[str], Column]:
    """The distinct keys, and which of them each is."""
    numbers: dict[Hashable, int] = {}
    column = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    return [printable(str(key)) for key in numbers], column


def _sites(trace: Trace) -> tuple[list[str], list[list[Any]], Column]:
    """The names of call sites; of each distinct stack its site and frames, outermost first; the stack of each row.

    Where operations are known instead, a site is what requests are for, and a stack the module and the role.
    """
    read, operations = read_sites(trace), read_operations(trace)
    if read is None and operations is not None:
        names, number = _numbered(purposes(operations, np.arange(trace.num_requests)))
        return names, [[row, *reversed(name.split(" of ", 1))] for row, name in enumerate(names)], number
    number = np.zeros(trace.num_requests, np.int64) if read is None else read.site.astype(np.int64)
    _, rows, column = np.unique(number, return_index=True, return_inverse=True)
    names, site = _numbered([site_text(key) for key in site_keys(trace, rows)])
    frames = [[printable(name) for name in stack] for stack in stack_names(trace, rows)]
    return names, [[int(one), *stack] for one, stack in zip(site, frames, strict=True)], column


def _device_name(record: DeviceRecord) -> str:
    """Which GPU it was; empty where the file does not say."""
    name = record.info.get("device_name")
    kind = "virtual" if record.info.get("virtual") is True else "cuda"
    return printable(shown_name(kind, name), _MAX_NAME) if name and isinstance(name, str) else ""


def _reserved(trace: Trace) -> list[list[int]]:
    """Event and bytes reserved from there on, where that changes."""
    if not len(trace.action):
        return []
    reserved = trace.reserved_bytes()
    before = np.concatenate([[trace.reserved_start_bytes], reserved[:-1]])
    changed = np.flatnonzero(reserved != before)
    if not len(changed) and not trace.reserved_start_bytes:
        return []
    return [[0, trace.reserved_start_bytes], *([int(row) + 1, int(reserved[row])] for row in changed)]


_PALETTES = ("OKABE_ITO", "TOL_MUTED", "REST", "SIZES", "HOLE", "FRAME", "INK")
STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = (
    "uPlot.iife.min.js",
    "data.js",
    "colors.js",
    "holders.js",
    "map.js",
    "chart.js",
    "study.js",
    "devices.js",
    "page.js",
)


def write_page(path: Path, records: Sequence[tuple[str, DeviceRecord]], allocators: Sequence[Candidate] = ()) -> None:
    """Write the page of these devices, each with the name of its file, and with a map of each of these allocators.

    Raises BadInputError for a trace that cannot be explained, an allocator that has no map and a file that cannot be
    written; then what was there before is still there.
    """
    write_chunks(path, _chunks([(name, device_data(record, allocators)) for name, record in records]))


def page_text(records: Sequence[tuple[str, DeviceRecord]]) -> str:
    """The page of these devices, each with a name, as text. Raises BadInputError as `write_page` does."""
    return b"".join(_chunks([(name, device_data(record)) for name, record in records])).decode()


def _chunks(devices: Sequence[tuple[str, DeviceData]]) -> Iterator[bytes]:
    colors = {name: getattr(palettes, name) for name in _PALETTES}
    style, script = _joined(STYLES), f"const PALETTES = {_json(colors)};\n{_joined(SCRIPTS)}"
    title = html.escape(", ".join(dict.fromkeys(_short(name) for name, _ in devices)))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        f"img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}: GPU memory</title>\n<style>{style}</style>\n</head>\n<body>\n{_asset('page.html')}\n"
    )
    yield head.encode()
    headers = [{"file": _short(name), **made.header} for name, made in devices]
    yield f'<script type="application/json" id="headers">{_json(headers)}</script>\n'.encode()
    for number, (_, made) in enumerate(devices):
        yield f'<script type="application/octet-stream" id="columns-{number}">{made.packed}</script>\n'.encode()
    yield f"<script>{script}</script>\n</body>\n</html>\n".encode()


def _json(value: object) -> str:
    """JSON that may stand inside a script element, whatever its strings hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _joined(names: Sequence[str]) -> str:
    return "\n".join(_asset(name) for name in names)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _short(name: str) -> str:
    """The name of a file without its folders, which are nobody's business where the page is passed on."""
    return printable(Path(name).name)
