"""One out-of-memory error as its text tells it, and what follows from its figures.

Contract: figures are those of the text, which rounds them to two decimals of its unit; what it does not say is None,
and so is what its other figures rule out. Nothing is derived from figures that contradict each other. Units of sizes
are powers of 1,024, as every library of ours counts, and a comma before one or two last digits is that of a decimal; a
number that no device can hold, which is what an overflow prints, is not a size. Advice names a setting only for
releases that have it, under a variable that they read; for what the figures do not say no cause is named.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from stalloc.figures import human_bytes

#: one size; a bare number counts bytes
SIZE = r"\d[\d.,]*(?: ?(?:[KkMGT](?:i?B)?|[Bb]ytes?|B)\b)?"
MOST_BYTES = 1 << 44  #: no device holds more
ANY_BYTES = 1 << 64  #: what a size that was computed wrongly can be
_SHIFTS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def size_bytes(text: str | None, most_bytes: int = MOST_BYTES) -> int | None:
    """The bytes of a size as text; None if it is no size, or more than `most_bytes`."""
    match = re.fullmatch(r"(\d[\d.,]*) ?([A-Za-z]*)", text or "")
    digits = re.sub(r",(?=\d{1,2}$)", ".", match[1]) if match else ""
    digits = digits.replace(",", "").strip(".")
    if match is None or not re.fullmatch(r"\d{1,20}(\.\d{1,10})?", digits):
        return None
    found = round(float(digits) * (1 << _SHIFTS[match[2][:1].lower()]))
    return found if found <= most_bytes else None


#: how far figures may be apart that were rounded, each by up to half a hundredth of a GiB
_ROUNDED_BYTES = 24 << 20
#: requests up to here, and the heap that PyTorch takes for them on MPS
_MPS_HEAPS = ((1 << 20, 8 << 20), ((10 << 20) - 1, 32 << 20), ((512 << 20) - 1, 1 << 30))

DEVICE, HOST, SHARED, ON_CHIP, KV_CACHE = "device", "host", "shared memory of the host", "on chip", "KV cache"


@dataclass(frozen=True, kw_only=True)
class ErrorText:
    library: str  #: PyTorch, CuPy, stalloc, CUDA, RMM and so on
    place: str = DEVICE  #: which memory was short: device, host, shared memory of the host, on chip, KV cache
    backend: str = "CUDA"  #: what PyTorch calls the kind of device: CUDA, HIP, XPU, NPU, MPS and so on
    device: int | None = None
    wanted_bytes: int | None = None  #: None: the text has no figures
    total_bytes: int | None = None
    free_bytes: int | None = None  #: free memory on the device
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None  #: all that the allocator holds, free memory inside of it included
    process_bytes: int | None = None  #: in use by this process, including what is not the allocator's
    limit_bytes: int | None = None  #: the limit of the process or the pool, where that is less than the device has
    private_bytes: int | None = None  #: allocated in private pools, such as those of CUDA graphs
    release: str = ""
    """The releases of PyTorch that word an error so: `until 1.3`, `1.4 to 2.0`, `from 2.1`; empty if it is unknown."""
    variable: str | None = None
    """The environment variable for settings of PyTorch's allocator that the text names, which is the one it reads."""
    setting: str = ""  #: the setting that the text names
    told: str = ""  #: the verdict, where it is the wording that gives it and not the figures
    advice: str = ""  #: what to do about an error of this library
    platform: str = ""  #: `Windows` where names of files in the log say so
    line: str = ""  #: the line itself, where its wording is not known
    times: int = 1  #: how often the log has this error

    @property
    def contradiction(self) -> str:
        """Which figures cannot be true together; empty if all can."""
        total, free, reserved, allocated = self.total_bytes, self.free_bytes, self.reserved_bytes, self.allocated_bytes
        if reserved is not None and allocated is not None and allocated > reserved + _ROUNDED_BYTES:
            return f"{human_bytes(allocated)} allocated of {human_bytes(reserved)} reserved"
        held = reserved if reserved is not None else allocated
        if total is None:
            return ""
        room = total + _ROUNDED_BYTES
        if free is not None and free > room:
            return f"{human_bytes(free)} free on a device of {human_bytes(total)}"
        if held is not None and held > room:
            return f"{human_bytes(held)} held on a device of {human_bytes(total)}"
        if held is not None and free is not None and held + free > room:
            return f"{human_bytes(held)} held and {human_bytes(free)} free on a device of {human_bytes(total)}"
        return ""

    @property
    def known_process_bytes(self) -> int | None:
        """Bytes in use by this process; None if the figure cannot be true: inside a container the driver says 0."""
        process, total, free = self.process_bytes, self.total_bytes, self.free_bytes
        if not process or self.contradiction or process < (self.reserved_bytes or 0) - _ROUNDED_BYTES:
            return None
        if total is not None and process > total - (free or 0) + _ROUNDED_BYTES:
            return None
        return min(process, total - free) if total is not None and free is not None else process

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved but not allocated: free inside of what the allocator holds."""
        if self.reserved_bytes is None or self.allocated_bytes is None or self.contradiction:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def outside_bytes(self) -> int | None:
        """In use by this process and not the allocator's: the CUDA context, libraries."""
        process = self.known_process_bytes
        return None if process is None or self.reserved_bytes is None else max(0, process - self.reserved_bytes)

    @property
    def others_bytes(self) -> int | None:
        """In use on the device by other processes; where that is unknown, by everything but the allocator."""
        if self.total_bytes is None or self.free_bytes is None or self.contradiction:
            return None
        process = self.known_process_bytes
        own = process if process is not None else self.reserved_bytes
        return None if own is None else max(0, self.total_bytes - self.free_bytes - own)

    @property
    def rest_bytes(self) -> int | None:
        """What the allocator does not hold, free or in use, where the text does not say which."""
        if self.total_bytes is None or self.free_bytes is not None or self.contradiction:
            return None
        return None if self.reserved_bytes is None else max(0, self.total_bytes - self.reserved_bytes)

    @property
    def limit_left_bytes(self) -> int | None:
        """The most that the limit leaves to ask the device for; None without a limit."""
        held = next((one for one in (self.reserved_bytes, self.process_bytes, self.allocated_bytes) if one), None)
        if self.limit_bytes is None or held is None or self.contradiction:
            return None
        return max(0, self.limit_bytes - held)

    @property
    def _limit_rounding_bytes(self) -> int:
        """How far the limit may be from what is written, which has two decimals where it is in GiB."""
        rounded = self.library == "PyTorch" and (self.limit_bytes or 0) >= 1 << 30
        return (1 << 30) // 200 if rounded else 0

    @property
    def obtainable_bytes(self) -> int | None:
        """Bytes that an allocator without fragmentation could have handed out."""
        free, inside = self.free_bytes, self.unallocated_bytes
        if free is None or inside is None:
            return None
        left = self.limit_left_bytes
        return inside + (free if left is None else min(free, left))

    @property
    def at_most_bytes(self) -> int | None:
        """The most bytes that can have been obtainable, where the text tells only a part; None if nothing bounds it."""
        if self.contradiction:
            return None
        if self.obtainable_bytes is not None:
            return self.obtainable_bytes
        bounds = []
        taken = self.allocated_bytes or 0
        if self.total_bytes is not None:
            bounds.append(self.total_bytes - taken)
        if self.limit_bytes is not None and self.reserved_bytes is None:
            bounds.append(self.limit_bytes - max(taken, self.process_bytes or 0))
        return max(0, min(bounds)) if bounds else None

    @property
    def taken_bytes(self) -> int | None:
        """What the allocator takes from the device for the request: PyTorch names that, but for MPS."""
        wanted = self.wanted_bytes
        if self.backend != "MPS" or wanted is None:
            return wanted
        return next((heap for most, heap in _MPS_HEAPS if wanted <= most), wanted)

    @property
    def verdict(self) -> str:
        """What ran out.

        "outside": the device had room, so that the allocator is not the cause. "limit": what the process may have.
        "fragmentation" if so much was free together, "capacity" if not. "size": no device has what was asked for.
        "contradiction": of the figures. "unknown".
        """
        wanted, free, left = self.taken_bytes, self.free_bytes, self.limit_left_bytes
        if wanted is not None and wanted > MOST_BYTES and self.place == DEVICE:
            return "size"
        if self.told or self.contradiction or wanted is None:
            return self.told or ("contradiction" if self.contradiction else "unknown")
        obtainable, at_most = self.obtainable_bytes, self.at_most_bytes
        inside = self.unallocated_bytes or 0
        if free is not None and free >= wanted and (left is None or left >= wanted + self._limit_rounding_bytes):
            # the last pages of a device are in more pieces than one
            return "outside" if inside < wanted or free >= wanted + _ROUNDED_BYTES else "fragmentation"
        if obtainable is not None and obtainable >= wanted:
            return "fragmentation"
        has_room = free is None or free + inside >= wanted
        if left is not None and left < wanted + self._limit_rounding_bytes and has_room:
            return "limit"
        return "capacity" if at_most is not None and at_most < wanted else "unknown"


_WHO = {"HIP": "rocm-smi", "NPU": "npu-smi info", "XPU": "xpu-smi ps", "MLU": "cnmon", "MUSA": "mthreads-gmi"}
_PLAN = "`stalloc run SCRIPT`, which plans where blocks live"
_CAPACITY = "The program has to hold less (smaller batch, checkpointing, no leak) or get more memory."


def sentences(error: ErrorText) -> Iterator[str]:
    """The sentences of advice: the cause, then what to do."""
    if error.line:
        yield f"The line is in words that stalloc does not know: {error.line}"
    elif error.place != DEVICE:
        if error.told == "capacity" and error.free_bytes is not None and error.wanted_bytes is not None:
            missing = human_bytes(error.wanted_bytes - error.free_bytes)
            yield f"The cause is capacity: {human_bytes(error.free_bytes)} is there for it, {missing} too little."
    elif error.wanted_bytes is None and not error.told:
        who = "CUDA itself" if error.library == "CUDA" else error.library
        yield f"{who} found no memory, and the text gives no figures that tell why."
    else:
        yield from _cause(error)
    if error.advice:
        yield error.advice


def _cause(error: ErrorText) -> Iterator[str]:
    match error.verdict:
        case "contradiction":
            yield (
                f"Its figures contradict each other: {error.contradiction}. Drivers that lend memory of the host "
                "(integrated GPUs, Windows) report such figures, and so do other processes that come and go meanwhile: "
                "the reason cannot be told from them."
            )
        case "outside":
            yield (
                f"{human_bytes(error.free_bytes or 0)} was free on the device, more than the "
                f"{human_bytes(error.wanted_bytes or 0)} that were wanted, so the cause lies outside of the allocator: "
                "a limit (of the process, the container, or the driver, as on mappings or open files), the driver "
                "itself, or another process that held it at that moment."
            )
        case "size":
            yield (
                f"No device has {human_bytes(error.wanted_bytes or 0)}, so the size itself is wrong: an overflow, a "
                "length that was never set, or one that came damaged from a file or another rank."
            )
        case "limit":
            yield from _limit(error)
        case "capacity":
            yield from _capacity(error)
        case "fragmentation":
            yield from _fragmentation(error)
        case _:
            yield _unknown(error)


def _unknown(error: ErrorText) -> str:
    left, wanted = error.limit_left_bytes, error.wanted_bytes or 0
    if left is not None and left >= wanted:
        return (
            f"The limit is not the cause, {human_bytes(left)} of it is left: the device itself had no room, and the "
            "text does not say who holds it."
        )
    named = {
        "how much was free": error.free_bytes is None,
        "how much the allocator holds": error.reserved_bytes is None,
        "how much of what it holds is allocated": error.allocated_bytes is None,
    }
    missing = " and ".join([name for name, is_missing in named.items() if is_missing][:2])
    return f"It does not say {missing}, so the reason cannot be told from it."


def _limit(error: ErrorText) -> Iterator[str]:
    left, limit, wanted = error.limit_left_bytes, error.limit_bytes, error.wanted_bytes
    if limit is None or left is None:
        yield "The cause is a limit, that of the pool or of what one request may be, and not how much is free."
        return
    free = f", while {human_bytes(error.free_bytes)} was free on the device" if error.free_bytes else ""
    what = "" if wanted is None else f", and {human_bytes(wanted)} was wanted"
    if error.taken_bytes != wanted and wanted is not None:
        what += f", for which a heap of {human_bytes(error.taken_bytes or 0)} is taken"
    elif wanted is not None and left >= wanted:
        what += ", as far as the rounded figures tell"
    yield f"The cause is the limit of {human_bytes(limit)}: {human_bytes(left)} of it was left{what}{free}."
    if error.library == "PyTorch" and error.backend != "MPS":
        module = error.backend.lower() if error.backend in ("XPU", "NPU", "MLU", "MUSA") else "cuda"
        yield f"torch.{module}.set_per_process_memory_fraction() sets it: raise it, or hold less."


def _capacity(error: ErrorText) -> Iterator[str]:
    wanted = error.wanted_bytes or 0
    obtainable = error.obtainable_bytes if error.obtainable_bytes is not None else error.at_most_bytes or 0
    most = "" if error.obtainable_bytes is not None else "at most "
    missing = human_bytes(wanted - obtainable)
    todo = "" if error.advice else f" {_CAPACITY}"
    yield (
        f"The cause is capacity: {most}{human_bytes(obtainable)} was free in total, {missing} too little, so no "
        f"allocator could help.{todo}"
    )
    others = error.others_bytes or 0
    if others >= wanted - obtainable and others > (error.total_bytes or 0) // 50:
        known = error.known_process_bytes is not None
        who = (
            "Other processes, a desktop or the driver use"
            if known
            else "Other processes and what this one has outside of the allocator use"
        )
        yield f"{who} {human_bytes(others)} of that device: `{_WHO.get(error.backend, 'nvidia-smi')}` names them."


def _fragmentation(error: ErrorText) -> Iterator[str]:
    obtainable, inside = human_bytes(error.obtainable_bytes or 0), human_bytes(error.unallocated_bytes or 0)
    story = f"{obtainable} was free in total, {inside} of it inside reserved memory, but not in one piece of "
    story += human_bytes(error.wanted_bytes or 0)
    if error.library == "stalloc":
        yield (
            f"{story}: parts of pages, which stay while anything lives in the rest. The program has to hold a little "
            "less, or get a little more memory."
        )
        return
    yield f"The cause is fragmentation: {story}. {_against_fragmentation(error)}"
    if error.limit_bytes is not None and (error.free_bytes or 0) >= (error.wanted_bytes or 0):
        yield (
            f"That is within the limit of {human_bytes(error.limit_bytes)}: {human_bytes(error.free_bytes or 0)} was "
            "free on the device."
        )


def _against_fragmentation(error: ErrorText) -> str:
    """A setting against fragmentation that the release which wrote the text knows, in the variable that it reads."""
    if error.library != "PyTorch":
        return "Hold less at that moment, or let the allocator return what it caches before."
    own = "" if error.backend in ("CUDA", "XPU") else f"{error.backend}_"
    variable = error.variable or f"PYTORCH_{own or 'CUDA_'}ALLOC_CONF"
    split = f"{variable}=max_split_size_mb:128"
    if error.backend == "XPU" and error.setting != "expandable_segments":
        return "torch.xpu.empty_cache() before that moment returns what is cached and whole; else hold less."
    if error.backend not in ("CUDA", "HIP", "XPU"):
        newer = f", or {variable}=expandable_segments:True" if error.setting == "expandable_segments" else ""
        return f"Try {split}{newer}."
    newer = f"PyTorch 2.1 or later has expandable_segments, which costs nothing; or {_PLAN}"
    if error.release == "until 1.3":
        return f"This is the wording of PyTorch 1.3 or earlier, which has no setting against it: {newer}."
    if error.release == "1.4 to 2.0":
        since = "" if error.setting else " (it is there from 1.10 on)"
        return f"This is the wording of PyTorch 2.0 or earlier: try {split}{since}. {newer}."
    if error.platform:
        return f"Try {split}: on {error.platform} expandable_segments does nothing."
    if error.backend == "HIP":
        return f"Try {variable}=expandable_segments:True, or {split} where ROCm warns that it cannot; or {_PLAN}."
    return f"Try {variable}=expandable_segments:True, which costs nothing, or {_PLAN}."
