"""The out-of-memory errors in a log, of whatever library wrote them.

Contract: a place in the text counts once, under the first wording that fits it. What has figures says more than what
has none: the latter count only where no error with figures is, first those of a library, then those of the driver,
then lines that say so in words of their own.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from stalloc.analysis.error_text import DEVICE, HOST, ErrorText
from stalloc.analysis.error_wording import FIGURES, Wording
from stalloc.analysis.figure_wordings import WITH_FIGURES
from stalloc.analysis.library_wordings import IN_OTHER_WORDS, OF_DRIVERS, OF_LIBRARIES, UNKNOWN_ADVICE, WANTED
from stalloc.analysis.size_text import size_bytes
from stalloc.analysis.torch_wordings import torch_errors
from stalloc.printable import printable

_MAX_ERRORS = 1000
_BEFORE, _AFTER, _MOST = 1024, 3072, 2 << 20  # characters that are read around a sign, and at each end of all of them
#: in lower case; each error that is known has one of them
_SIGNS = (
    "out of mem", "out_of_", "out of resource", "oom", "exhausted", "to allocate", "alloc_fail", "alloc fail",
    "allocation_fail", "allocation failed", "memory allocation", "memoryallocation", "memory_error", "memoryerror",
    "memory error", "bad_alloc", "pool size", "memory limit", "room to grow", "of memory", "to alloc", "not alloc",
    "allocation of", "not be allocated", "allocation on device", "allocation failure", "on host", "pinned",
    "pin_memory", "hostalloc", "mallochost", "hostregister", "hostmalloc", "cudamalloc", "cumemalloc", "not enough",
    "insufficient", "memory for", "kv cache", "memory on device", "mem-fraction", "mem_fraction", "allocating",
    "buffer size", "requested size", "you tried", "shared memory", "shm", "/torch_", "no space left", "to cuda",
    "cuda failure", "resources requested", "shared data", "pt_devmem", "dst tensor", "runtime error (2)", "error=2",
    "not_initialized", "resource allocation", "video memory", "bytes on device", "running low", "oom_kill",
    "killed", "el0004", "aclrt", "rtmalloc", "207001", "207018", "allocation error", "can't alloc", "retryoom",
    "native mem", "outof", "attempting", "smaller than", "cannot malloc", "out of gpu",
)  # fmt: skip
_ITEM_BYTES = {"half": 2, "bfloat16": 2, "double": 8, "int64": 8, "complex64": 8, "bool": 1, "int8": 1, "uint8": 1}
_OF_HOST = re.compile(r"\b(?:host|CPU|RAM|numpy|MemoryError|bad_alloc)\b")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class _Found(NamedTuple):
    position: int
    error: ErrorText
    wording: Wording | None = None  #: None: one of those of PyTorch, or none that is known


def find_errors(text: str) -> list[ErrorText]:
    """The out-of-memory errors of a log, each that differs once, in order."""
    text = _near_signs(_ESCAPES.sub("", text) if "\x1b" in text else text)
    found: dict[ErrorText, Counter[Wording | None]] = {}
    for one in _errors(text):
        found.setdefault(one.error, Counter())[one.wording] += 1
        if len(found) >= _MAX_ERRORS:
            break
    # a library that logs an error before it raises it tells the same one in two ways
    return [dataclasses.replace(error, times=max(told.values())) for error, told in found.items()]


def _near_signs(text: str) -> str:
    """What is near a word that every error has one of: a long log is read at the speed of a search for words."""
    lowered = text.lower()
    if len(lowered) != len(text):
        lowered = text  # a letter of another alphabet that is longer in lower case: positions would be off
    hits: set[int] = set()
    for sign in _SIGNS:
        at = lowered.find(sign)
        while at >= 0:
            hits.add(at // _BEFORE)
            at = lowered.find(sign, (at // _BEFORE + 1) * _BEFORE)
    parts: list[tuple[int, int]] = []
    for hit in sorted(hits):
        begin, end = max(0, (hit - 1) * _BEFORE), (hit + 1) * _BEFORE + _AFTER
        if parts and begin <= parts[-1][1]:
            parts[-1] = parts[-1][0], end
        else:
            parts.append((begin, end))
    near = "\n".join(text[begin:end] for begin, end in parts)
    return near if len(near) <= 2 * _MOST else near[:_MOST] + "\n" + near[-_MOST:]


def _errors(text: str) -> Iterable[_Found]:
    """Those of the first kind that there are any of, in order."""
    of_torch = [_Found(position, error) for position, error in torch_errors(text)]
    placed = [one for one in of_torch if one.error.wanted_bytes is not None]
    placed += _worded(text, WITH_FIGURES)
    for found in (placed, of_torch, *(_worded(text, wordings) for wordings in (OF_LIBRARIES, OF_DRIVERS))):
        if ordered := sorted(found, key=lambda one: one.position):
            return ordered
    return [_Found(0, error) for error in _in_other_words(text)]


def _worded(text: str, wordings: Iterable[Wording]) -> Iterator[_Found]:
    taken: list[tuple[int, int]] = []
    for wording in wordings:
        for match in wording.pattern.finditer(text):
            begin, end = match.span()
            if len(taken) < _MAX_ERRORS and not any(low < end and begin < high for low, high in taken):
                taken.append((begin, end))
                yield _Found(begin, _of_wording(wording, match), wording)


def _of_wording(wording: Wording, match: re.Match[str]) -> ErrorText:
    groups = match.groupdict()
    told: dict[str, Any] = {f"{name}_bytes": size_bytes(groups.get(name)) for name in FIGURES}
    if groups.get("shape") is not None:
        told["wanted_bytes"] = _tensor_bytes(groups["shape"], groups["type"])
    if groups.get("sum") is not None:  # CuPy before 7: what was asked for and what the pool holds, together
        told["reserved_bytes"] = max(0, (size_bytes(groups["sum"]) or 0) - (told["wanted_bytes"] or 0))
    if groups.get("free") and groups.get("total") and not re.search("[A-Za-z]", groups["free"]):
        told["free_bytes"] = size_bytes(groups["free"] + re.sub(r"[\d.,]", "", groups["total"]))  # `5.01/23.6 GiB`
    device = groups.get("device")
    return ErrorText(
        library=wording.library,
        place=wording.place,
        device=int(device) if device else None,
        told=wording.told,
        advice=wording.advice,
        **told,
    )


def _tensor_bytes(shape: str, kind: str) -> int | None:
    numbers = [int(number) for number in shape.split(",") if number]
    size = math.prod(numbers) * _ITEM_BYTES.get(kind, 4)
    return size_bytes(str(size))


def _in_other_words(text: str) -> Iterator[ErrorText]:
    end = -1
    for match in IN_OTHER_WORDS.finditer(text):
        if match.start() < end:
            continue  # in the same line
        begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
        end = len(text) if end < 0 else end
        line = text[max(begin, match.start() - 200) : min(end, match.end() + 200)].strip()
        wanted = WANTED.search(line)
        yield ErrorText(
            library="a library that stalloc does not know",
            place=HOST if _OF_HOST.search(line) else DEVICE,
            wanted_bytes=size_bytes(wanted[1]) if wanted else None,
            advice=UNKNOWN_ADVICE,
            line=printable(line, 200),
        )
