"""Describe traces: requests, peaks, fragmentation, the lower bound of every plan, streams, steps and classes.

FILE is a trace of any kind that stalloc reads: a recording of `stalloc record` (.trace.npz), a memory snapshot of torch
(a pickle or its HTML page), a trace or raw memory timeline of torch.profiler (JSON), a log of RMM or of the DTR
simulator, a planning CSV; all but the first may be gzipped. The name - is standard input.

Allocated counts every request from alloc to free_completed, with sizes rounded up to the alignment; its peak is the
lower bound of every plan. Fragmentation is 1 - allocated/reserved when the most is reserved; for it allocated includes
what a profiler trace gives only as a total. The period is that of the sequence of all requests at the end of the
record, if it repeats exactly; a step is what the runtime would plan: a repetition of the requests over 512 bytes that
fills the record and after which memory is back at its level.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from stalloc.cli.output import (
    add_json_argument,
    command_text,
    human_bytes,
    note_texts,
    table_console,
    wants_text,
    write_json,
)
from stalloc.errors import BadInputError
from stalloc.lifespans import (
    classify,
    find_period,
    find_step_period,
    fold,
    load_curve,
    sequence_keys,
    sequence_rows,
)
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces

_MIN_REPEATS, _MIN_PERIOD = 3, 32  # of a period worth the name: runs of equal layers are shorter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc stats`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to describe")
    parser.add_argument(
        "--align", type=int, default=512, metavar="BYTES", help="sizes are rounded up to this (default: 512)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Describe each device of each file."""
    if args.align < 1:
        raise BadInputError(f"--align is {args.align}: give a number of bytes from 1, such as 512.")
    devices = [describe(file, trace, args.align) for file in args.files for trace in load_traces(file)]
    write_json(args, {"files": list(args.files), "devices": devices})
    if wants_text(args):
        _print(args, devices)
    return 0


def describe(file: str, trace: Trace, alignment: int) -> dict[str, Any]:
    """What JSON and the table say of one device; bytes are integers, what the source does not tell is None."""
    size = trace.aligned_size(alignment)
    start = np.maximum(trace.start, 0)
    events, live = load_curve(start, trace.end, size)
    at_peak = int(np.argmax(live)) if len(live) else 0
    peak = int(live.max(initial=0))
    everything = sequence_keys(trace, sequence_rows(trace, 0))
    period = find_period(everything, _MIN_REPEATS, _MIN_PERIOD, at_end=True)
    step = find_step_period(trace)
    tape = fold(trace, period=step) if step else None
    return {
        "file": file,
        "device": trace.device,
        "source": trace.info.get("source", ""),
        "complete": bool(trace.info.get("complete", False)),
        "events": len(trace.action) or 2 * trace.num_requests,
        "requests": trace.num_requests,
        "baseline_requests": trace.num_baseline_requests,
        "distinct_sizes": len(np.unique(trace.size)),
        "lower_bound_bytes": peak,
        "allocated_peak_bytes": peak,
        "allocated_peak_event": int(events[at_peak]) if len(events) else None,
        "allocated_peak_requested_bytes": int(load_curve(start, trace.end, trace.size)[1].max(initial=0)),
        **_reserved(trace, size),
        "streams": len(trace.streams),
        "period_requests": period.length if period else None,
        "period_repeats": period.repeats if period else None,
        "step_requests": step.length if step else None,
        "step_repeats": step.repeats if step else None,
        "classes": classify(trace, tape).totals(trace.size),
        "notes": list(trace.info.get("notes", [])),
    }


def _reserved(trace: Trace, size: np.ndarray) -> dict[str, Any]:
    """The reserved peak, its event (-1: before the first), and the fragmentation there.

    When the peak lasts, its event with the most allocated counts, so that fragmentation is not overstated.
    """
    nothing = {"reserved_peak_bytes": None, "reserved_peak_event": None, "fragmentation": None}
    if not len(trace.action):
        return nothing
    reserved = np.concatenate([[trace.reserved_start_bytes], trace.reserved_bytes()])
    change = np.zeros(trace.num_events + 2, np.int64)  # entry i: after event i - 1
    np.add.at(change, trace.start + 1, size)
    np.subtract.at(change, trace.end + 1, size)
    allocated = np.cumsum(change[:-1])
    unseen = trace.info.get("unseen_bytes", 0)  # live throughout, and no request stands for it
    if isinstance(unseen, int) and 0 <= unseen < 1 << 62:
        allocated += unseen
    peak = int(reserved.max())
    if peak == 0:
        return nothing
    at = int(np.argmax(np.where(reserved == peak, allocated, -1)))
    return {
        "reserved_peak_bytes": peak,
        "reserved_peak_event": at - 1,
        "fragmentation": round(1 - int(allocated[at]) / peak, 6),
    }


def _print(args: argparse.Namespace, devices: list[dict[str, Any]]) -> None:
    console = table_console()
    for entry in devices:
        name, source = printable(Path(entry["file"]).name), printable(str(entry["source"]))
        console.print(Text.assemble((name, "bold"), f", device {entry['device']}, {source}"))
        for label, text in _lines(entry):
            console.print(Text.assemble("  ", (f"{label:<14}", "dim"), f"  {text}"))
        console.print()
    console.print(f"Next: stalloc plan {command_text(args.files[0])}")


def _lines(entry: dict[str, Any]) -> list[tuple[str, str]]:
    before = f", {entry['baseline_requests']:,} live before recording" if entry["baseline_requests"] else ""
    lines = [
        ("requests", f"{entry['requests']:,} in {entry['events']:,} events{before}"),
        ("distinct sizes", f"{entry['distinct_sizes']:,}"),
        ("lower bound", human_bytes(entry["lower_bound_bytes"])),
        (
            "allocated peak",
            f"{human_bytes(entry['allocated_peak_bytes'])} at event {entry['allocated_peak_event']}, "
            f"{human_bytes(entry['allocated_peak_requested_bytes'])} as requested",
        ),
    ]
    if entry["reserved_peak_bytes"] is not None:
        event = entry["reserved_peak_event"]
        when = f"at event {event}" if event >= 0 else "before the first event"
        lines += [
            ("reserved peak", f"{human_bytes(entry['reserved_peak_bytes'])} {when}"),
            ("fragmentation", f"{entry['fragmentation']:.2%} at the reserved peak"),
        ]
    lines.append(("streams", str(entry["streams"])))
    for name, nothing in (("period", "none: the sequence does not repeat exactly"), ("step", "none confirmed")):
        found = entry[f"{name}_requests"]
        lines.append((name, f"{found:,} requests, {entry[f'{name}_repeats']} times" if found else nothing))
    classes = entry["classes"]
    names = ["persistent", "scoped", "transient"]
    if entry["step_requests"]:
        names += ["static", "dynamic"]
    lines += [(name, f"{classes[name]['requests']:,}, {human_bytes(classes[name]['bytes'])} in all") for name in names]
    lines += [("note", note) for note in note_texts(entry["notes"])]
    return lines
