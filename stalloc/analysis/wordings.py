"""The wordings in which libraries other than PyTorch, drivers and launchers say that memory ran out: `wordings.toml`.

Contract: the named groups of a pattern are the figures that it has, and `device`, `shape` with `type`, `sum`, and
`used`. A space in a pattern is any space, as a log may be wrapped.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalloc.analysis.error_text import DEVICE, SIZE

FIGURES = ("wanted", "total", "free", "allocated", "reserved", "limit")
_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ADVICE: dict[str, str] = {
    name: text.replace("<nvidia-smi>", _FILE["advice"]["nvidia-smi"]) for name, text in _FILE["advice"].items()
}


@dataclass(frozen=True)
class Wording:
    """One wording of one library."""

    library: str
    pattern: re.Pattern[str]
    advice: str
    place: str = DEVICE
    told: str = ""
    """The verdict that the words themselves give."""
    at_start: bool = False
    """Whether it is said before the process holds anything."""


def _worded(*, pattern: str | list[str], advice: str = "", **row: Any) -> Wording:
    spaced = re.sub(
        r"\[[^\]]*\]| (?![?*+{])", lambda part: r"\s{1,80}" if part[0] == " " else part[0], "".join(pattern)
    )
    sized = re.sub(rf"<({'|'.join(FIGURES)})>", lambda name: f"(?P<{name[1]}>{SIZE})", spaced)
    text = advice.replace("<nvidia-smi>", ADVICE["nvidia-smi"])
    return Wording(pattern=re.compile(sized), advice=ADVICE.get(advice, text), **row)


WITH_FIGURES, OF_LIBRARIES, OF_DRIVERS, OF_LAUNCHERS = (
    tuple(_worded(**row) for row in _FILE[kind])
    for kind in ("with_figures", "of_libraries", "of_drivers", "of_launchers")
)

#: words by which a line tells which memory it is about
OF_GPU = re.compile(r"GPU|[Dd]evice memory|CUDA|[Cc]uda|V?RAM on device|VRAM|vram|HIP|[Vv]ideo memory|on device")
OF_HOST = re.compile(r"\b(?:host|CPU|RAM|numpy|MemoryError|bad_alloc)\b")
_ALLOCATES = r"(?:[Aa]lloc(?:at\w+)?|request\w*)"
#: what is left: a line that says so in words of its own
IN_OTHER_WORDS = re.compile(
    r"(?:[Oo]ut[ _-]?[Oo]f[ _-]?[Mm]em|OUT[ _]OF[ _]\w*MEMORY|OutOfMemory|\bOOM\b|bad_alloc|\bMemoryError\b"
    r"|(?:[Nn]ot enough|[Ii]nsufficient|[Rr]an out of)(?: \w+){0,3} (?:memory|VRAM|vram)"
    r"|(?:[Ff]ailed|[Uu]nable|[Cc]annot|[Cc]ould not|[Cc]an't|[Cc]ouldn't)(?: to)? (?:re)?allocat|ALLOC(?:ATION)?_FAIL"
    r"|[Aa]llocation (?:of \S+ \w+ )?(?:failed|failure|error)|[Mm]emory limit exceeded"
    r"|exceed\w* [^\n]{0,9}(?:available|GPU|device|video) memory)"
)
WANTED = re.compile(rf"{_ALLOCATES}[^\n\d]{{0,60}}(\d{{5,}}|\d[\d.,]* ?(?:[KMGT]i?B|bytes))\b")
