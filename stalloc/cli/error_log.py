"""`stalloc explain` of a log that holds the text of an out-of-memory error: what can be said from it, and how to get
more.

Contract: what looks like any kind of trace is none of these; a log is read as text, whatever else is in it.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from stalloc.allocator_conf import variables_read
from stalloc.analysis.error_text import ErrorText, find_errors
from stalloc.cli.output import file_label
from stalloc.cli.tables import print_items, print_prose
from stalloc.figures import human_bytes
from stalloc.inputs import open_input, read_input
from stalloc.torch_release import release_installed

_NO_LOG = re.compile(rb'\x80|PK|\x1f\x8b|<|\s*(\{|\[\s*[\[{"])')  # pickles, archives, pages, JSON
_SIGNS = (b"ut of memory", b"OUT_OF_MEMORY", b"MemoryAllocation", b"ALLOC_FAILED")  # so that large CSV is not searched
_DERIVED = ("unallocated_bytes", "outside_bytes", "others_bytes", "obtainable_bytes", "verdict")


def errors_of(file: str) -> list[ErrorText]:
    """The out-of-memory errors of a log; none if the file is something else."""
    with open_input(file, "a trace file, or a log") as opened:
        head = opened.read(64)
    if _NO_LOG.match(head):
        return []
    data = read_input(file, "a trace file, or a log")
    return find_errors(data.decode("utf-8", "replace")) if any(sign in data for sign in _SIGNS) else []


def error_entry(file: str, error: ErrorText) -> dict[str, Any]:
    """What JSON says of one error."""
    derived = {name: getattr(error, name) for name in _DERIVED}
    return {"file": file, **dataclasses.asdict(error), **derived}


def print_error(console: Console, file: str, error: ErrorText) -> None:
    """One error."""
    device = "" if error.device is None else f", device {error.device}"
    times = f", {error.times:,} times" if error.times > 1 else ""
    wanted = "" if error.wanted_bytes is None else f", {human_bytes(error.wanted_bytes)} wanted"
    title = f"{device}: out of memory in {error.library}{wanted}{times}"
    print_prose(console, Text.assemble((file_label(file), "bold"), title))
    rows = [[name, human_bytes(amount), meaning] for name, amount, meaning in _parts(error) if amount is not None]
    print_items(console, rows)
    for sentence in _verdict(error):
        print_prose(console, sentence)
    console.print()


def print_next(console: Console) -> None:
    """What tells more than the text of an error."""
    print_prose(console, "The text does not say who holds the memory, or where the free memory is. To find out:")
    for command, meaning in (
        ("stalloc dryrun SCRIPT", "what the program needs, on a virtual GPU"),
        ("stalloc record --stacks -o run.trace.npz SCRIPT", "records every allocation with its call site; then:"),
        ("stalloc top run.trace.npz", "who holds memory"),
        ("stalloc explain run.trace.npz", "where the reserved but unallocated memory is"),
    ):
        console.print(f"  {command}")
        print_prose(console, meaning, indent="      ")


def _parts(error: ErrorText) -> Iterator[tuple[str, int | None, str]]:
    """The device, divided; what the text does not say is None."""
    yield "device", error.total_bytes, "in all"
    yield "limit", error.limit_bytes, "that this process may use"
    yield "allocated", error.allocated_bytes, f"by {error.library}, in live blocks"
    yield "unallocated", error.unallocated_bytes, "reserved, but free inside the allocator"
    yield "private pools", error.private_bytes, "part of what is allocated, such as those of CUDA graphs"
    yield "outside", error.outside_bytes, "used by this process outside the allocator: the CUDA context, libraries"
    others = "by other processes" if error.process_bytes is not None else "by anything else on the device"
    yield "others", error.others_bytes, others
    yield "free", error.free_bytes, "on the device"


def _verdict(error: ErrorText) -> Iterator[str]:
    wanted, obtainable = error.wanted_bytes, error.obtainable_bytes
    if wanted is None:
        yield (
            "CUDA itself found no memory, and gives no figures: not for a tensor, but for a context, a kernel or a "
            "library's workspace, which lie outside PyTorch's and CuPy's allocators. Either those hold nearly all of "
            "the device, or other processes do: `nvidia-smi` names them."
        )
        return
    if obtainable is None:
        yield "It does not say how much was free, so the reason cannot be told from it."
        return
    inside = error.unallocated_bytes or 0
    if error.verdict == "fragmentation" and error.library == "stalloc":
        yield (
            f"{human_bytes(obtainable)} was free in total, {human_bytes(inside)} of it inside reserved memory, but not "
            f"in one piece of {human_bytes(wanted)}: parts of pages, which stay while anything lives in the rest. "
            "The program has to hold a little less, or get a little more memory."
        )
        return
    if error.verdict == "fragmentation":
        variable = error.variable or variables_read(release_installed())[0]
        yield (
            f"The cause is fragmentation: {human_bytes(obtainable)} was free in total, {human_bytes(inside)} of it "
            f"inside reserved memory, but not in one piece of {human_bytes(wanted)}. Try {variable}="
            "expandable_segments:True, which costs nothing, or `stalloc run SCRIPT`, which plans where blocks live."
        )
        return
    missing = wanted - obtainable
    yield (
        f"The cause is capacity: {human_bytes(obtainable)} was free in total, {human_bytes(missing)} too little, so no "
        "allocator could help. The program has to hold less (smaller batch, checkpointing, no leak) or get more memory."
    )
    others = error.others_bytes or 0
    if others >= missing and others > (error.total_bytes or 0) // 50:
        who = "Other processes" if error.process_bytes is not None else "Other processes and the CUDA context"
        yield f"{who} use {human_bytes(others)} of that device: `nvidia-smi` names them."
