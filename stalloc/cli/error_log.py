"""`stalloc explain` of a log that holds the text of an out-of-memory error: what can be said from it, and how to get
more.

Contract: a file that looks like any kind of trace is no such log; a log is read as text, whatever else is in it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from stalloc.analysis.error_search import find_errors
from stalloc.analysis.error_text import DEVICE, ErrorText, sentences
from stalloc.cli.output import file_label
from stalloc.cli.tables import print_items, print_prose
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.inputs import shown_name
from stalloc.trace.load import read_log

_DERIVED = ("contradiction", "unallocated_bytes", "outside_bytes", "others_bytes", "obtainable_bytes", "verdict")
_RECORDED = ("PyTorch", "CuPy", "CUDA", "stalloc")  # whose programs `stalloc record` and `stalloc dryrun` run


def errors_of(file: str) -> list[ErrorText] | None:
    """The out-of-memory errors of a log; None if the file is something else."""
    text = read_log(file)
    return None if text is None else find_errors(text)


def no_trace_but_errors(file: str) -> str:
    """The sentence for a verb that was given a log with an error instead of a trace; empty for another file."""
    try:
        if not errors_of(file):
            return ""
    except BadInputError:
        return ""
    name = shown_name(file)
    return f"{name}: the text of an out-of-memory error, and not a trace: stalloc explain {name} reads it."


def no_errors(file: str) -> str:
    """The sentence for a log without any."""
    return (
        f"{shown_name(file)}: a log without an out-of-memory error, or a server's start, that stalloc knows: give the "
        "log of the process that ran out of memory, or a trace (`stalloc stats --help` names the kinds)."
    )


def error_entry(file: str, error: ErrorText) -> dict[str, Any]:
    """What JSON says of one error."""
    derived = {name: getattr(error, name) for name in _DERIVED}
    return {"file": file, **dataclasses.asdict(error), **derived}


def print_error(console: Console, file: str, error: ErrorText) -> None:
    """Print what one out-of-memory error says, and what to do."""
    device = "" if error.device is None else f", device {error.device}"
    times = f", {error.times:,} times" if error.times > 1 else ""
    wanted = "" if error.wanted_bytes is None else f", {human_bytes(error.wanted_bytes)} wanted"
    place = "" if error.place == DEVICE else f" ({error.place})"
    title = f"{device}: out of memory in {error.library}{place}{wanted}{times}"
    print_prose(console, Text.assemble((file_label(file), "bold"), title))
    rows = [[name, human_bytes(amount), meaning] for name, amount, meaning in _parts(error) if amount is not None]
    if not error.contradiction:
        print_items(console, rows)
    for sentence in sentences(error):
        print_prose(console, sentence)
    console.print()


def print_next(console: Console, errors: list[ErrorText]) -> None:
    """Print what to type to learn more than the text of an error tells, where stalloc can run such a program."""
    if not any(error.library in _RECORDED and error.place == DEVICE for error in errors):
        return
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
    inside = error.unallocated_bytes
    yield "device", error.total_bytes, "in all"
    bounded = "pool may hold" if inside is None and error.reserved_bytes is not None else "process may use"
    yield "limit", error.limit_bytes, _LIMITS.get(error.place, f"that this {bounded}")
    yield "allocated", error.allocated_bytes, f"by {error.library}, in live blocks"
    yield "unallocated", inside, "reserved, but free inside the allocator"
    yield "private pools", error.private_bytes, "part of what is allocated, such as those of CUDA graphs"
    if inside is None:
        yield "held", error.reserved_bytes, f"by the pool of {error.library}, what is free in it included"
    yield "outside", error.outside_bytes, "used by this process outside the allocator: the CUDA context, libraries"
    known = error.known_process_bytes is not None
    anyone = "by anything else on the device: other processes, and this one outside the allocator"
    yield "others", error.others_bytes, "by other processes, a desktop, or the driver" if known else anyone
    yield "rest", error.rest_bytes, "at most, free or used outside the allocator: the text does not say which"
    yield (
        "free",
        error.free_bytes,
        "of the limit"
        if error.limit_bytes is None and error.told == "limit"
        else _FREE.get(error.place, "on the device"),
    )


_LIMITS = {"on chip": "that the hardware has"}
_FREE = {"KV cache": "for the KV cache", "host": "on the host"}
