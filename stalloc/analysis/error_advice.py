"""What follows from one out-of-memory error, in sentences: the cause as far as its figures tell it, and what to do.

Contract: a setting is named only for releases that have it, under a variable that they read. What the figures do not
say is said to be missing, and no cause is named for it.
"""

from collections.abc import Iterator

from stalloc.analysis.error_text import DEVICE, ErrorText
from stalloc.figures import human_bytes

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
        yield f"{_the(error)} found no memory, and the text gives no figures that tell why."
    else:
        yield from _CAUSES[error.verdict](error)
    if error.advice:
        yield error.advice


def _the(error: ErrorText) -> str:
    return "CUDA itself" if error.library == "CUDA" else "PyTorch" if error.library == "PyTorch" else error.library


def _unknown(error: ErrorText) -> Iterator[str]:
    left, wanted = error.limit_left_bytes, error.wanted_bytes or 0
    if left is not None and left >= wanted:
        yield (
            f"The limit is not the cause, {human_bytes(left)} of it is left: the device itself had no room, and the "
            "text does not say who holds it."
        )
        return
    named = {
        "how much was free": error.free_bytes is None,
        "how much the allocator holds": error.reserved_bytes is None,
        "how much of what it holds is allocated": error.allocated_bytes is None,
    }
    missing = " and ".join([name for name, is_missing in named.items() if is_missing][:2])
    yield f"It does not say {missing}, so the reason cannot be told from it."


def _contradiction(error: ErrorText) -> Iterator[str]:
    yield (
        f"Its figures contradict each other: {error.contradiction}. Drivers that lend memory of the host (integrated "
        "GPUs, Windows) report such figures, and so do other processes that come and go meanwhile: the reason cannot "
        "be told from them."
    )


def _outside(error: ErrorText) -> Iterator[str]:
    yield (
        f"{human_bytes(error.free_bytes or 0)} was free on the device, more than the "
        f"{human_bytes(error.wanted_bytes or 0)} that were wanted, so the cause lies outside of the allocator: a limit "
        "(of the process, the container, or the driver, as on mappings or open files), the driver itself, or another "
        "process that held it at that moment."
    )


def _size(error: ErrorText) -> Iterator[str]:
    yield (
        f"No device has {human_bytes(error.wanted_bytes or 0)}, so the size itself is wrong: an overflow, a length "
        "that was never set, or one that came damaged from a file or another rank."
    )


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


_CAUSES = {
    "unknown": _unknown,
    "contradiction": _contradiction,
    "outside": _outside,
    "size": _size,
    "limit": _limit,
    "capacity": _capacity,
    "fragmentation": _fragmentation,
}
