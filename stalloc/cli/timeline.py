"""Say where the time goes between device and host: computing, copies, overlap, idle, by phase, link and size of copy.

FILE is a trace of torch.profiler (Kineto JSON) with CUDA activities, with or without memory events; a `.trace.npz` with
a table of activity; a CSV `start_us,end_us,link,bytes,phase` (docs/timeline.md); a log of DeepSpeed with its breakdown
of wall clock time; or any trace with times, of which only the memory by phase is known. The last step of a recording by
`stalloc record --ops` is scheduled, with estimated times, on the GPU that --gpu names, by default the one that the
virtual GPU presented. Times of the virtual GPU itself are not shown.

A phase lasts from the first thing that the device computes for it to the first for the next; at each moment of it the
device computes, copies, does both or neither. Copies within the device count as computing. The measured peak of a link
is the highest rate of one of its copies of 1 MiB or more; its use is shown as a share of that. At best, copies that ran
alone could run while the device only computes: an upper bound. If operations are recorded, the report also says how
much of that the data dependencies permit. A line names what the file lacks.

JSON: for each of `devices` `phases`, `stretches` (phase, begin, end), `links`, `sizes`, `parts` (subgroups of an
update), `blocking`, `missed_overlap_seconds` (within phases), `missed_across_seconds`, `as_ready` (what data permits),
`findings` in words, `missing`, and `series` over time with a value for each `stretch_seconds`: `memory_bytes`,
`link_bytes_per_second` and `computing_share` (0 to 1). All in bytes and seconds. What is not known is null.
"""

import argparse
from dataclasses import asdict

from rich.console import Console

from stalloc.analysis.offload_study import Series, study, study_series
from stalloc.analysis.study_findings import bytes_text, findings
from stalloc.analysis.study_record import Study, as_json
from stalloc.cli.output import (
    add_json_argument,
    command_text,
    file_label,
    present,
)
from stalloc.cli.progress import working
from stalloc.cli.tables import print_lines, print_notes, print_table, print_title
from stalloc.cli.trace_options import add_gpu_argument, as_on_gpu, of_device
from stalloc.figures import human_bytes, human_seconds
from stalloc.printable import printable
from stalloc.trace import load_devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="profile, trace or table to look at")
    parser.add_argument("--device", type=int, metavar="N", help="this device only (default: all)")
    add_gpu_argument(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    found: list[tuple[str, Study, Series | None]] = []
    for file in args.files:
        with working(f"reading {file_label(file)}"):
            for one in of_device(file, load_devices(file), args.device):
                made = study(record := as_on_gpu(args, one))
                found.append((file, made, study_series(record) if made.has_times and args.json else None))
    devices = [
        {"file": file, **as_json(made), "findings": findings(made), "series": series and asdict(series)}
        for file, made, series in found
    ]
    present(args, {"devices": devices}, _print, args.files, found)
    return 0


def _print(console: Console, files: list[str], found: list[tuple[str, Study, Series | None]]) -> None:
    for file, made, _ in found:
        name = f" ({printable(made.device_name)})" if made.device_name else ""
        memory = f", {human_bytes(made.total_bytes)} of memory" if made.total_bytes is not None else ""
        seconds = f": {human_seconds(made.seconds)}" if made.has_times else ""
        print_title(console, file, f", device {made.device}{name}{memory}{seconds}")
        print_lines(console, findings(made))
        _print_phases(console, made)
        _print_links(console, made)
        _print_parts(console, made)
        print_notes(console, made.missing)
        console.print()
    console.print(f"Next: stalloc report {command_text(*files)}")


def _print_phases(console: Console, made: Study) -> None:
    names = ("by phase", "runs", "time", "computes", "copies", "both", "idle", "on the host", "allocated", "reserved")
    rows = []
    for phase in made.phases:
        parts = (phase.compute_seconds, phase.copy_seconds, phase.overlap_seconds, phase.idle_seconds)
        host = human_seconds(phase.host_compute_seconds) if phase.host_compute_seconds else ""
        split = [*map(human_seconds, parts), host] if made.knows_computing else [""] * 5
        held = (phase.allocated_bytes, phase.reserved_bytes, phase.headroom_bytes, phase.host_bytes)
        shown = ("" if size is None else human_bytes(size) for size in held)
        rows.append([phase.name, f"{phase.runs:,}", *_timed(made, human_seconds(phase.seconds)), *split, *shown])
    print_table(console, (*names, "headroom", "host memory"), rows)


def _print_links(console: Console, made: Study) -> None:
    rows = []
    for link in made.links:
        peak = "" if link.peak_rate is None else _rate(link.peak_rate)
        times = _timed(made, human_seconds(link.busy_seconds), _rate(link.rate), peak, _percent(link.used))
        rows.append([link.link, f"{link.copies:,}", bytes_text(link.num_bytes), *times])
    if not rows:
        return
    print_table(console, ("by link", "copies", "moved", "busy", "rate", "peak", "used"), rows)
    rows = [
        [phase.name, link, human_bytes(size), *_timed(made, _percent(phase.link_used.get(link)))]
        for phase in made.phases
        for link, size in phase.moved_bytes.items()
    ]
    print_table(console, ("by phase and link", "", "moved", "used"), rows, text_columns=2)
    rows = [
        [one.link, one.size, f"{one.copies:,}", bytes_text(one.num_bytes), *_timed(made, _rate(one.rate))]
        for one in made.sizes
    ]
    print_table(console, ("by size of copy", "", "copies", "moved", "rate"), rows, text_columns=2)


def _print_parts(console: Console, made: Study) -> None:
    parts = [
        [
            f"{part.phase}/{part.name}",
            f"{part.runs:,}",
            *_timed(made, *map(human_seconds, (part.start_seconds, part.seconds, part.compute_seconds))),
            ", ".join(f"{human_bytes(size)} {link}" for link, size in part.moved_bytes.items()),
        ]
        for part in made.parts
    ]
    if parts:
        print_table(console, ("by part", "runs", "begins", "time", "computes", "moved"), parts)


def _timed(made: Study, *cells: str) -> tuple[str, ...]:
    """Cells that say how long something took; empty where that is not known."""
    return cells if made.has_times else ("",) * len(cells)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _rate(rate: float | None) -> str:
    return "unknown" if rate is None else f"{human_bytes(round(rate))}/s"
