"""Errors of PyTorch's allocators, and of stalloc in their place, in the wordings of all releases and backends.

Contract: a text may be cut off anywhere, and be wrapped by whatever wrote the log; what is missing is None.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from stalloc.analysis.error_text import ANY_BYTES, MOST_BYTES, SIZE, ErrorText, size_bytes

_SIZE = f"({SIZE})"
_BEGIN = re.compile(
    r"\b(?:(?P<backend>CUDA|HIP|XPU|NPU|MLU|MUSA|GCU|PrivateUse1|[A-Z]{3,5})\s+)?out of memory[.,]\s+"
    rf"(?:\w+\s+)?[Tt]ried\s+to\s+allocate(?:\s+(more than 1EB memory|{SIZE}))?"
    r"|\b(?P<bare>CUDA|HIP|XPU|NPU|MLU|MUSA|GCU) out of memory\b(?! occurred)"
    rf"|(?:larger\s+than\s+(?P<most>{SIZE})!\s+)?\bTried\s+to\s+allocate\s+(?P<beheaded>{SIZE})"
    r"(?=\s+\((?:[A-Z]\w+)\s+\d+;|\.\s+(?:GPU|[A-Z]{3,5})\s+\d+\s+has)"
)
_OLD = re.compile(rf"\((?:[A-Z]\w+)\s+(\d+); {_SIZE} total capacity(?:;([^)]*))?")
_NEW = re.compile(
    rf"(?:GPU|[A-Z]{{3,5}})\s+(\d+)\s+has\s+a\s+total\s+capac(?:i)?ty\s+of\s+{_SIZE}(?:\s+of\s+which\s+{_SIZE}\s+is\s+free)?"
)
_STALLOC = re.compile(
    rf"stalloc: out of memory on device (\d+) \(.*?(?:, limited to {_SIZE})?\)\. "
    rf"Allocated {_SIZE}, reserved {_SIZE}.*?\. Free: {_SIZE} on the device"
)
_MPS = re.compile(
    rf"MPS backend out of memory(?:\s+\(MPS allocated:\s+{_SIZE},\s+other allocations:\s+{_SIZE}"
    rf"(?:,\s+max allowed:\s+{_SIZE})?\))?"
    rf"(?:\.\s+Tried\s+to\s+allocate\s+{_SIZE})?"
)
_ASYNC = re.compile(
    r"Allocation on device (?:(\d+) )?would exceed allowed memory|OutOfMemoryError: Allocation on device\b"
)
_ASYNC_FIGURES = {
    "allocated_bytes": r"Currently allocated\s*:",
    "wanted_bytes": r"Requested\s*:",
    "total_bytes": r"Device limit\s*:",
    "free_bytes": r"Free \(according to CUDA\)\s*:",
    "limit_bytes": r"PyTorch limit \(set by user-supplied memory fraction\)[\s\S]{0,120}?:",
}
_VARIABLE = re.compile(r"PYTORCH_(?:[A-Z]+_)?ALLOC_CONF")
_SETTING = re.compile(r"expandable_segments|max_split_size_mb")
#: what a logger puts before each line: a quote, a rank, a worker, a container
_PREFIX = re.compile(r"\s*(>+|\[[^\]\n]{1,40}\]:?|\([^)\n]{1,60}\)|[\w.-]{1,40} *\|)(?=\s)")
_REACH = 2000  # characters that one error takes at most

_MPS_ADVICE = (
    "Hold less, or let go first (torch.mps.empty_cache()); PYTORCH_MPS_HIGH_WATERMARK_RATIO sets how much of the "
    "machine's memory PyTorch may take: 0.0 lifts it, and then the whole machine may run out."
)
_ONE_BLOCK = "It is more than that platform gives in one piece, whatever is free: make that tensor in parts."


def torch_errors(text: str) -> Iterator[tuple[int, ErrorText]]:
    """The errors of PyTorch in a text, each with the position where it begins."""
    matches = list(_BEGIN.finditer(text))
    ends = [match.start() for match in matches[1:]] + [len(text)] * bool(matches)
    for match, end in zip(matches, ends, strict=True):
        rest = text[match.end() : min(end, match.end() + _REACH)]
        if prefix := _PREFIX.match(text, text.rfind("\n", 0, match.start()) + 1, match.start()):
            rest = rest.replace(f"\n{prefix[1]}", "\n")  # where a logger has wrapped the error
        rest = " ".join(rest.split())
        backend = match["backend"] or match["bare"] or "CUDA"
        one = _error(match[2] or match["beheaded"], backend, rest)
        if match["most"]:
            one = dataclasses.replace(one, backend="XPU", told="limit", advice=_ONE_BLOCK)
        yield match.start(), one
    for match in _MPS.finditer(text):
        allocated, others, limit, wanted = (_bytes(group) for group in match.groups())
        yield match.start(), ErrorText(
            library="PyTorch", backend="MPS", wanted_bytes=wanted, allocated_bytes=allocated, limit_bytes=limit,
            process_bytes=None if allocated is None or others is None else allocated + others, advice=_MPS_ADVICE,
        )  # fmt: skip
    for match in _ASYNC.finditer(text):
        yield match.start(), _of_async(match, text[match.end() : match.end() + _REACH])


def _error(wanted: str | None, backend: str, rest: str) -> ErrorText:
    """An error of PyTorch, or of stalloc in its place, from what follows the size that it asked for."""
    size = 1 << 60 if (wanted or "").startswith("more") else _bytes(wanted, ANY_BYTES)
    if ours := _STALLOC.search(rest):
        names = "limit_bytes", "allocated_bytes", "reserved_bytes", "free_bytes"
        figures: dict[str, Any] = dict(zip(names, map(_bytes, ours.groups()[1:]), strict=True))
        return ErrorText(library="stalloc", wanted_bytes=size, device=int(ours[1]), **figures)
    variable, setting = _VARIABLE.search(rest), _SETTING.search(rest)
    told: dict[str, Any] = {"variable": variable[0] if variable else None, "setting": setting[0] if setting else ""}
    told |= {"library": "PyTorch", "backend": backend, "wanted_bytes": size}
    old = _OLD.search(rest)
    return ErrorText(**told, **(_old_figures(old) if old else _new_figures(rest)))


def _old_figures(old: re.Match[str]) -> dict[str, Any]:
    """The figures that releases until 2.0 give in brackets."""
    inside = old[3] or ""
    allocated, reserved = _named("already allocated", inside), _named("reserved in total by PyTorch", inside)
    cached = _named("cached", inside)  # until 1.3, which called so what is reserved and not allocated
    if allocated is not None and cached is not None:
        reserved = allocated + cached
    return {
        "device": int(old[1]),
        "total_bytes": _bytes(old[2]),
        "free_bytes": _named("free", inside),
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "limit_bytes": _named("allowed", inside),
        "release": "until 1.3" if cached is not None else "1.4 to 2.0",
    }


def _new_figures(rest: str) -> dict[str, Any]:
    """The figures that releases from 2.1 on give in sentences."""
    new = _NEW.search(rest)
    allocated = _named(r"(?:is )?allocated by PyTorch", rest)
    inside = _named(r"is reserved by PyTorch but unallocated", rest)
    process = re.search(rf"this process has\s+{_SIZE} memory", rest)
    return {
        "device": int(new[1]) if new else None,
        "total_bytes": _bytes(new[2]) if new else None,
        "free_bytes": _bytes(new[3]) if new else None,
        "allocated_bytes": allocated,
        "reserved_bytes": allocated + inside if allocated is not None and inside is not None else None,
        "process_bytes": _bytes(process[1]) if process else None,
        "limit_bytes": _named("allowed", rest),
        "private_bytes": _named("allocated in private pools", rest),
        "release": "from 2.1" if new else "",
    }


def _of_async(match: re.Match[str], rest: str) -> ErrorText:
    """An error under backend:cudaMallocAsync, whose pool is the driver's."""
    figures: dict[str, Any] = {}
    for name, words in _ASYNC_FIGURES.items():
        found = re.search(rf"{words}\s*{_SIZE}", rest)
        figures[name] = _bytes(found[1]) if found else None
    if figures["limit_bytes"] is not None and figures["limit_bytes"] >= (figures["total_bytes"] or 0):
        figures["limit_bytes"] = None
    return ErrorText(library="PyTorch", device=int(match[1]) if match[1] else None, **figures)


def _named(words: str, text: str) -> int | None:
    """The size before these words."""
    match = re.search(rf"{_SIZE}\s+{words}", text)
    return _bytes(match[1]) if match else None


def _bytes(text: str | None, most_bytes: int = MOST_BYTES) -> int | None:
    """One size; None where it is cut off before its unit, without which PyTorch writes none."""
    return size_bytes(text, most_bytes) if text and text[-1].isalpha() else None
