"""The page as one file: markup, style, scripts and data, under a policy that lets nothing else in and nothing out.

Contract: strings of a trace stand only in JSON, in which nothing can end the element that holds it, and the scripts
set them as text. The policy allows the style and the script of the page by their hashes, and no request at all.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from stalloc.printable import printable
from stalloc.replay.simulation import Candidate
from stalloc.trace import DeviceRecord
from stalloc.writers import palettes
from stalloc.writers.page.device_data import DeviceData, device_data
from stalloc.writers.writing import write_chunks

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
    style, script = _joined(STYLES), f"const PALETTES = {_json(_palettes())};\n{_joined(SCRIPTS)}"
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


def _palettes() -> dict[str, object]:
    names = ("OKABE_ITO", "TOL_MUTED", "REST", "SIZES", "HOLE", "FRAME", "INK")
    return {name: getattr(palettes, name) for name in names}


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
