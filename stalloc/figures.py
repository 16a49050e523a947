"""Figures as people read them, the same everywhere: sizes, and fragmentation, the one ratio that is talked about.

Contract: fragmentation is of a whole record or run, never of a moment: 1 - allocated peak / reserved peak, where the
allocated peak counts sizes rounded up to 512 bytes, as torch counts them, from alloc to free_completed.
"""

import html
from collections.abc import Iterable

from stalloc.sizes import GIB, MIB


def human_bytes(num_bytes: int) -> str:
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if abs(num_bytes) >= MIB // 10:
        return f"{num_bytes / MIB:.2f} MiB"
    return f"{num_bytes} B"


def human_seconds(seconds: float) -> str:
    if seconds >= 1 or not seconds:
        return f"{seconds:.2f} s" if seconds else "0 s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
    return f"{seconds * 1e6:.0f} us"


def fragmentation(allocated_peak_bytes: int, reserved_peak_bytes: int) -> float:
    """The share of the reserved peak that the allocated peak leaves unused; 0 where nothing was reserved."""
    if reserved_peak_bytes <= 0:
        return 0.0
    return round(max(0.0, 1 - allocated_peak_bytes / reserved_peak_bytes), 6)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def html_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(label)}</th><td>{html.escape(text)}</td></tr>"
        for label, text in rows
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"
