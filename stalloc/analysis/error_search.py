"""The out-of-memory errors in a log, of whatever library wrote them.

Contract: a place in the text counts once, under the first wording that fits it. Errors without figures count only if
the text has none with figures: first those of a library, then those of the driver, then lines in words of their own.
`wordings.toml` has the wordings of all but PyTorch. The named groups of a pattern are the figures that it has, and
`device`, `shape` with `type`, `sum`, and `used`; a space in it is any space, as a log may be wrapped. A text may be cut
off anywhere: what is missing is None.
"""

import dataclasses
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stalloc.analysis.error_text import ANY_BYTES, DEVICE, HOST, MOST_BYTES, SIZE, ErrorText, size_bytes
from stalloc.figures import human_bytes
from stalloc.printable import printable

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
    "allocated_bytes": rf"Currently allocated\s*:\s*{_SIZE}",
    "wanted_bytes": rf"Requested\s*:\s*{_SIZE}",
    "total_bytes": rf"Device limit\s*:\s*{_SIZE}",
    "free_bytes": rf"Free \(according to CUDA\)\s*:\s*{_SIZE}",
    "limit_bytes": rf"PyTorch limit \(set by user-supplied memory fraction\)[\s\S]{{0,120}}?:\s*{_SIZE}",
}
_OLD_FIGURES = {
    "free_bytes": rf"{_SIZE}\s+free",
    "allocated_bytes": rf"{_SIZE}\s+already allocated",
    "reserved_bytes": rf"{_SIZE}\s+reserved in total by PyTorch",
    "cached": rf"{_SIZE}\s+cached",
    "limit_bytes": rf"{_SIZE}\s+allowed",
}
_NEW_FIGURES = {
    "allocated_bytes": rf"{_SIZE}\s+(?:is )?allocated by PyTorch",
    "inside": rf"{_SIZE}\s+is reserved by PyTorch but unallocated",
    "process_bytes": rf"this process has\s+{_SIZE} memory",
    "limit_bytes": rf"{_SIZE}\s+allowed",
    "private_bytes": rf"{_SIZE}\s+allocated in private pools",
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
    told = _figures_of(_OLD_FIGURES, old[3] or "")
    cached = told.pop("cached")  # until 1.3, which called so what is reserved and not allocated
    if told["allocated_bytes"] is not None and cached is not None:
        told["reserved_bytes"] = told["allocated_bytes"] + cached
    release = "until 1.3" if cached is not None else "1.4 to 2.0"
    return told | {"device": int(old[1]), "total_bytes": _bytes(old[2]), "release": release}


def _new_figures(rest: str) -> dict[str, Any]:
    """The figures that releases from 2.1 on give in sentences."""
    told = _figures_of(_NEW_FIGURES, rest)
    allocated, inside = told["allocated_bytes"], told.pop("inside")
    told["reserved_bytes"] = allocated + inside if allocated is not None and inside is not None else None
    if (new := _NEW.search(rest)) is None:
        return told
    total, free = _bytes(new[2]), _bytes(new[3])
    return told | {"device": int(new[1]), "total_bytes": total, "free_bytes": free, "release": "from 2.1"}


def _of_async(match: re.Match[str], rest: str) -> ErrorText:
    """An error under backend:cudaMallocAsync, whose pool is the driver's."""
    told = _figures_of(_ASYNC_FIGURES, rest)
    if told["limit_bytes"] is not None and told["limit_bytes"] >= (told["total_bytes"] or 0):
        told["limit_bytes"] = None
    return ErrorText(library="PyTorch", device=int(match[1]) if match[1] else None, **told)


def _figures_of(patterns: dict[str, str], text: str) -> dict[str, Any]:
    """The first size that each pattern finds in a text; None where it finds none."""
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {name: _bytes(match[1]) if match else None for name, match in found.items()}


def _bytes(text: str | None, most_bytes: int = MOST_BYTES) -> int | None:
    """One size; None where it is cut off before its unit, without which PyTorch writes none."""
    return size_bytes(text, most_bytes) if text and text[-1].isalpha() else None


FIGURES = ("wanted", "total", "free", "allocated", "reserved", "limit")
_FILE = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text(encoding="utf-8"))
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
    told: str = ""  #: the verdict that the words themselves give
    at_start: bool = False  #: whether it is said before the process holds anything


def _made(*, pattern: str | list[str], advice: str = "", **row: Any) -> Wording:
    spaced = re.sub(
        r"\[[^\]]*\]| (?![?*+{])", lambda part: r"\s{1,80}" if part[0] == " " else part[0], "".join(pattern)
    )
    sized = re.sub(rf"<({'|'.join(FIGURES)})>", lambda name: f"(?P<{name[1]}>{SIZE})", spaced)
    text = advice.replace("<nvidia-smi>", ADVICE["nvidia-smi"])
    return Wording(pattern=re.compile(sized), advice=ADVICE.get(advice, text), **row)


WITH_FIGURES, OF_LIBRARIES, OF_DRIVERS, OF_LAUNCHERS = (
    tuple(_made(**row) for row in _FILE[kind])
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
    "native mem", "memory profiling", "posix_memalign", "system memory", "isn't enough", "memory budget", "sigkill",
    "exitcode", "exit code", "tactic device", "outof", "attempting", "smaller than", "cannot malloc", "out of gpu",
)  # fmt: skip
_ALL_FIGURES = (*FIGURES, "process")
_MOST_COMPARED = 100  #: errors; if there are more, each is shown without comparing them
_MOST_WRAPPED = 1 << 18  #: what people copy from a terminal
_ITEM_BYTES = {"half": 2, "bfloat16": 2, "double": 8, "int64": 8, "complex64": 8, "bool": 1, "int8": 1, "uint8": 1}
_ONE_ALLOCATOR = {"JAX", "TensorFlow"}  #: whose errors come with those of the allocator that they share
_WINDOWS = re.compile(r"\b[A-Za-z]:\\[\w.]")  #: a name of a file there
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class _Found(NamedTuple):
    position: int
    error: ErrorText
    wording: Wording | None = None  #: None: one of those of PyTorch, or none that is known


def find_errors(text: str) -> list[ErrorText]:
    """The out-of-memory errors of a log in order, each different one once."""
    platform = "Windows" if _WINDOWS.search(text) else ""
    text = text.replace("\xa0", " ").replace("\u202f", " ")  # spaces that do not break
    text = _near_signs(_ESCAPES.sub("", text) if "\x1b" in text else text)
    found: dict[ErrorText, Counter[Wording | None]] = {}
    for one in _errors(text):
        found.setdefault(one.error, Counter())[one.wording] += 1
        if len(found) >= _MAX_ERRORS:
            break
    # a library that logs an error before it raises it tells the same one in two ways
    times = {error: max(told.values()) for error, told in found.items()}
    return [dataclasses.replace(error, times=count, platform=platform) for error, count in _told_once(times).items()]


def _told_once(times: dict[ErrorText, int]) -> dict[ErrorText, int]:
    """The errors without those that say no more than another does: cut off, or from a lower layer of the library."""
    if len(times) > _MOST_COMPARED:
        return times
    # to the two decimals that most of them are written with
    written = {error: [human_bytes(size) if size is not None else None for size in _figures(error)] for error in times}
    kept: dict[ErrorText, int] = {}
    for error, count in times.items():
        fuller = next((one for one in kept if _says_all_of(one, error, written)), None)
        if fuller is not None:
            kept[fuller] = max(kept[fuller], count)
            continue
        for one in [one for one in kept if _says_all_of(error, one, written)]:
            count = max(count, kept.pop(one))
        kept[error] = count
    return kept


def _says_all_of(fuller: ErrorText, error: ErrorText, written: dict[ErrorText, list[str | None]]) -> bool:
    """Whether a fuller error has every figure of this one too."""
    if any(less not in (None, more) for more, less in zip(written[fuller], written[error], strict=True)):
        return False
    libraries = {fuller.library, error.library}
    if (len(libraries) > 1 and libraries != _ONE_ALLOCATOR) or fuller.library == "TensorFlow" != error.library:
        return False
    if (fuller.place, fuller.backend, fuller.line) != (error.place, error.backend, error.line):
        return False
    return error.device in (None, fuller.device)


def _near_signs(text: str) -> str:
    """The text near words that every error has one of: a long log is read at the speed of a search for words."""
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
    """The errors in a text, in order: only those of the first kind of wording that occurs."""
    placed, of_torch = _with_figures(text)
    if len(text) <= _MOST_WRAPPED and (not placed or any(one.error.verdict == "unknown" for one in placed)):
        # a terminal's lines, which end wherever it does, as often within a word
        joined, _ = _with_figures(re.sub(r"(?<=\S)\r?\n(?=\S)", "", text))
        placed = max(
            placed, joined, key=lambda found: sum(size is not None for one in found for size in _figures(one.error))
        )
    without = (_worded(text, wordings) for wordings in (OF_LIBRARIES, OF_DRIVERS, OF_LAUNCHERS))
    for found in (placed, of_torch, *without):
        if ordered := sorted(found, key=lambda one: one.position):
            return ordered
    return [_Found(0, error) for error in _in_other_words(text)]


def _figures(error: ErrorText) -> list[int | None]:
    return [getattr(error, f"{name}_bytes") for name in _ALL_FIGURES]


def _with_figures(text: str) -> tuple[list[_Found], list[_Found]]:
    """The errors that say how much memory was wanted, and as a second list all errors of PyTorch."""
    of_torch = [_Found(position, error) for position, error in torch_errors(text)]
    placed = [one for one in of_torch if one.error.wanted_bytes is not None]
    return placed + list(_worded(text, WITH_FIGURES)), of_torch


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
    told["wanted_bytes"] = size_bytes(groups.get("wanted"), ANY_BYTES)
    if groups.get("shape") is not None and groups["type"] is not None:
        items = math.prod(int(number) for number in groups["shape"].split(",") if number)
        told["wanted_bytes"] = size_bytes(str(items * _ITEM_BYTES.get(groups["type"], 4)))
    if groups.get("sum") is not None:  # CuPy before 7: what was asked for and what the pool holds, together
        told["reserved_bytes"] = max(0, (size_bytes(groups["sum"]) or 0) - (told["wanted_bytes"] or 0))
    if groups.get("used") is not None and told["total_bytes"] is not None:
        told["free_bytes"] = max(0, told["total_bytes"] - (size_bytes(groups["used"]) or 0))
    if wording.at_start:
        told |= {"allocated_bytes": 0, "reserved_bytes": 0}
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


def _in_other_words(text: str) -> Iterator[ErrorText]:
    end = -1
    for match in IN_OTHER_WORDS.finditer(text):
        if match.start() < end:
            continue  # in the same line
        begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
        end = len(text) if end < 0 else end
        line = text[max(begin, match.start() - 200) : min(end, match.end() + 200)].strip()
        wanted, of_gpu = WANTED.search(line), OF_GPU.search(line)
        place = HOST if OF_HOST.search(line) and not of_gpu else DEVICE
        kind = "driver" if of_gpu else "host-memory" if place == HOST and "bad_alloc" not in line else "unknown"
        yield ErrorText(
            library="a library that stalloc does not know",
            place=place,
            wanted_bytes=size_bytes(wanted[1]) if wanted else None,
            advice=ADVICE[kind],
            line=printable(line, 200),
        )
