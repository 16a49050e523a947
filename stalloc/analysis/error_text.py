"""The text of an out-of-memory error, as a log holds it: what it says, and what can be said from it.

Contract: figures are those of the text, which rounds them to two decimals of its unit; what it does not say is None.
PyTorch's wordings since 1.0, for CUDA and HIP, CuPy's and stalloc's are known, and the names that CUDA and its
libraries give the error, which come without figures and count only where no other is in the text; anything else is not
taken for one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_UNITS = {"bytes": 1, "byte": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = r"([\d.,]+ ?(?:[KMGT]iB|bytes|B))"
_BEGIN = re.compile(r"out of memory\. Tried to allocate (more than 1EB memory|[\d.,]+ ?(?:[KMGT]iB|bytes|B))")
_OLD = re.compile(rf"\(GPU (\d+); {_SIZE} total capacity; ([^)]*)\)")
_NEW = re.compile(rf"GPU\s+(\d+) has a total capac(?:i)?ty of\s+{_SIZE}\s+of which\s+{_SIZE}\s+is free")
_CUPY = re.compile(
    r"Out of memory allocating ([\d,]+) bytes \(allocated so far: ([\d,]+) bytes(?:, limit set to: ([\d,]+) bytes)?\)"
)
_STALLOC = re.compile(
    rf"stalloc: out of memory on device (\d+) \(.*?(?:, limited to {_SIZE})?\)\. "
    rf"Allocated {_SIZE}, reserved {_SIZE}.*?\. Free: {_SIZE} on the device"
)
_WITHOUT_FIGURES = re.compile(
    r"(?:CUDA|HIP) error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
)
_VARIABLE = re.compile(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF")
_REACH = 2000  # characters that one error takes at most
_MAX_ERRORS = 1000


@dataclass(frozen=True, kw_only=True)
class ErrorText:
    """One out-of-memory error."""

    library: str
    """PyTorch, CuPy, stalloc or CUDA."""
    device: int | None
    wanted_bytes: int | None
    """None: the text has no figures."""
    total_bytes: int | None
    free_bytes: int | None
    """On the device."""
    allocated_bytes: int | None
    reserved_bytes: int | None
    process_bytes: int | None
    """In use by this process, what is not the allocator's included."""
    limit_bytes: int | None
    """What the process may have, where that is less than the device has."""
    private_bytes: int | None
    """Allocated in private pools, such as those of CUDA graphs."""
    variable: str | None = None
    """Of those that hold settings of PyTorch's allocator, the one that the text names: what that release reads."""
    times: int = 1
    """How often the log has it."""

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved but not allocated: free inside of what the allocator holds."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def outside_bytes(self) -> int | None:
        """In use by this process and not the allocator's: the CUDA context, libraries."""
        if self.process_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.process_bytes - self.reserved_bytes)

    @property
    def others_bytes(self) -> int | None:
        """In use on the device and not by this process; of older texts, by whomever but the allocator."""
        if self.total_bytes is None or self.free_bytes is None:
            return None
        own = self.process_bytes if self.process_bytes is not None else self.reserved_bytes
        return None if own is None else max(0, self.total_bytes - self.free_bytes - own)

    @property
    def obtainable_bytes(self) -> int | None:
        """All that an allocator without losses could have handed out."""
        free, inside = self.free_bytes, self.unallocated_bytes
        if free is None or inside is None:
            return None
        if self.limit_bytes is not None and self.reserved_bytes is not None:
            free = min(free, max(0, self.limit_bytes - self.reserved_bytes))
        return free + inside

    @property
    def verdict(self) -> str:
        """ "fragmentation" if so much was free together, "capacity" if not, "unknown" if the text does not say."""
        obtainable = self.obtainable_bytes
        if obtainable is None or self.wanted_bytes is None:
            return "unknown"
        return "fragmentation" if obtainable >= self.wanted_bytes else "capacity"


def find_errors(text: str) -> list[ErrorText]:
    """The out-of-memory errors of a log, each that differs once, in order."""
    found: dict[ErrorText, int] = {}
    for error in _errors(text):
        found[error] = found.get(error, 0) + 1
        if len(found) >= _MAX_ERRORS:
            break
    return [ErrorText(**{**vars(error), "times": times}) for error, times in found.items()]


def _errors(text: str) -> Iterator[ErrorText]:
    matches = list(_BEGIN.finditer(text))
    ends = [match.start() for match in matches[1:]] + [len(text)] * bool(matches)
    for match, end in zip(matches, ends, strict=True):
        yield _torch(match[1], " ".join(text[match.end() : min(end, match.end() + _REACH)].split()))
    for cupy in _CUPY.finditer(text):
        wanted, allocated, limit = (int(group.replace(",", "")) if group else None for group in cupy.groups())
        yield _error("CuPy", wanted or 0, allocated_bytes=allocated, limit_bytes=limit)
    if not matches and not _CUPY.search(text):
        for _ in _WITHOUT_FIGURES.finditer(text):
            yield _error("CUDA", None)


def _torch(wanted: str, rest: str) -> ErrorText:
    """An error of PyTorch, or of stalloc in its place, from what follows the size that it asked for."""
    size = 1 << 60 if wanted.startswith("more") else _bytes(wanted)
    if ours := _STALLOC.search(rest):
        names = "limit_bytes", "allocated_bytes", "reserved_bytes", "free_bytes"
        figures = [_bytes(group) if group else None for group in ours.groups()[1:]]
        return _error("stalloc", size, None, device=int(ours[1]), **dict(zip(names, figures, strict=True)))
    named = _VARIABLE.search(rest)
    variable = named[0] if named else None
    if old := _OLD.search(rest):
        allocated, reserved = _named("already allocated", old[3]), _named("reserved in total by PyTorch", old[3])
        cached = _named("cached", old[3])  # until 1.3, which called so what is reserved and not allocated
        if allocated is not None and cached is not None:
            reserved = allocated + cached
        told = {"allocated_bytes": allocated, "reserved_bytes": reserved}
        told |= {"device": int(old[1]), "total_bytes": _bytes(old[2]), "free_bytes": _named("free", old[3])}
        return _error("PyTorch", size, variable, **told)
    new = _NEW.search(rest)
    allocated = _named(r"(?:is )?allocated by PyTorch", rest)
    inside = _named(r"is reserved by PyTorch but unallocated", rest)
    return _error(
        "PyTorch",
        size,
        variable,
        device=int(new[1]) if new else None,
        total_bytes=_bytes(new[2]) if new else None,
        free_bytes=_bytes(new[3]) if new else None,
        allocated_bytes=allocated,
        reserved_bytes=allocated + inside if allocated is not None and inside is not None else None,
        process_bytes=_after(r"this process has", rest),
        limit_bytes=_named("allowed", rest),
        private_bytes=_named("allocated in private pools", rest),
    )


def _error(library: str, wanted: int | None, variable: str | None = None, **told: int | None) -> ErrorText:
    return ErrorText(
        library=library,
        wanted_bytes=wanted,
        variable=variable,
        device=told.get("device"),
        total_bytes=told.get("total_bytes"),
        free_bytes=told.get("free_bytes"),
        allocated_bytes=told.get("allocated_bytes"),
        reserved_bytes=told.get("reserved_bytes"),
        process_bytes=told.get("process_bytes"),
        limit_bytes=told.get("limit_bytes"),
        private_bytes=told.get("private_bytes"),
    )


def _named(words: str, text: str) -> int | None:
    """The size before these words."""
    match = re.search(rf"{_SIZE}\s+{words}", text)
    return _bytes(match[1]) if match else None


def _after(words: str, text: str) -> int | None:
    match = re.search(rf"{words}\s+{_SIZE}", text)
    return _bytes(match[1]) if match else None


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([\d.,]+) ?(\w+)", text)
    digits = match[1].replace(",", "").strip(".") if match else ""
    if match is None or not re.fullmatch(r"\d{1,20}(\.\d{1,10})?", digits):
        return 0
    return round(float(digits) * _UNITS[match[2].lower()])
