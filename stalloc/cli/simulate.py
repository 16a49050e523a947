"""Say what every other allocator or setting would have done with a program: reserved, fragmentation, device calls.

FILE is a trace of any kind that stalloc reads; `stalloc stats --help` names them. The requests of each device are
replayed from an empty device, beginning with what was live before the recording; the row "recorded" is what the file
itself says. The default is torch's caching allocator with its defaults and with expandable segments, and stalloc; --all
replays every model, --sweep the common settings of torch's allocator, and names the best.

"stalloc" watches the program from its first request on and plans what repeats, as `stalloc run` does with a new
program; "stalloc mode:plan" is planned in hindsight, from the whole recording.

An allocator is NAME or NAME:key:value,key:value. --conf takes what PYTORCH_ALLOC_CONF takes. --capacity limits the
memory of the device, and the report says where each allocator runs out; a recording that ran out of memory is then
replayed up to its last error, including the request that was refused. For a snapshot of torch, the model with the
settings of the file is checked against the segments that the file records: it is exact, or the first event that
differs is named.

--advise ranks the common settings of PyTorch's allocator for one file, and prints the line to export. They are replayed
by an exact model of that allocator, on a device of the recorded size if the file ends with an out-of-memory error. The
best settings complete on all devices of the file and reserve least on the fullest; those of the file win if nothing is
better by one per cent. The line has the variable that the recorded release of PyTorch reads, or the release that
--torch names: PYTORCH_ALLOC_CONF from 2.9 on, PYTORCH_CUDA_ALLOC_CONF before and if the release is unknown.
expandable_segments exists from 2.1 on. If most of what is held at the peak was there before the recording began, the
recording is too short to rank settings: then no order and no line are given.

Allocated is what `stalloc stats` says: sizes rounded up to 512 bytes, from alloc to free_completed. Fragmentation is
1 - allocated peak / reserved peak.

JSON of --advise: `variable`, `recorded_settings`, `recorded_reserved_peak_bytes` (what the file says was reserved),
`too_short`, `best_settings`, `export` (the line, null where nothing is better), and `ranking` (empty where the history
is too short): `settings`, `fits`, `reserved_peak_bytes`, `device_calls`.
"""

import argparse
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from stalloc.allocator_conf import variable_to_set
from stalloc.analysis import Recorded, count_events, recorded
from stalloc.cli.allocator_options import add_candidate_arguments, named_candidates
from stalloc.cli.output import (
    add_json_argument,
    add_top_argument,
    command_text,
    file_label,
    note_texts,
    table_console,
    wants_text,
    write_json,
)
from stalloc.cli.progress import working
from stalloc.cli.settings_advice import advise
from stalloc.cli.shared_options import refuse_typed
from stalloc.cli.tables import print_prose, print_table
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.printable import MAX_SENTENCE, printable
from stalloc.replay.model_events import recorded_conf
from stalloc.replay.registry import ALLOCATORS
from stalloc.replay.simulation import (
    SWEEP,
    SWEEP_UNDER_PRESSURE,
    Candidate,
    Simulated,
    simulate_all,
)
from stalloc.trace import Trace, load_traces

_HINDSIGHT = Candidate("stalloc", "mode:plan")
_USUAL = (Candidate("torch"), Candidate("torch", "expandable_segments:True"), Candidate("stalloc"), _HINDSIGHT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc simulate`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to replay")
    add_candidate_arguments(parser)
    parser.add_argument("--capacity", metavar="SIZE", help="memory of the device, such as 40GiB (default: no limit)")
    parser.add_argument("--all", action="store_true", help="every model with its usual settings")
    parser.add_argument("--sweep", action="store_true", help="the common settings of torch's allocator")
    parser.add_argument("--advise", action="store_true", help="rank these settings, and print the line to export")
    parser.add_argument("--torch", metavar="RELEASE", help="with --advise, the release that will run it, such as 2.8")
    add_top_argument(parser, 5, "settings shown with --advise")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Replay each device of each file; 0 also when something does not fit, which is a finding."""
    if args.advise:
        if len(args.files) > 1:
            raise BadInputError(f"--advise takes one file: {len(args.files)} were given.")
        refuse_typed(args, "does not go with --advise", "allocator", "conf", "all", "sweep")
        return advise(args)
    refuse_typed(args, "is of --advise: give that too", "torch", "top")
    capacity = memory_option("--capacity", args.capacity) if args.capacity else 0
    candidates = _candidates(args, capacity)
    with working(f"reading {plural(len(args.files), 'file')}"):
        loaded = [(file, trace) for file in args.files for trace in load_traces(file)]
    jobs = [(trace, _with_recorded(trace, candidates)) for _, trace in loaded]
    with Progress(transient=True, disable=not Console(stderr=True).is_terminal, console=Console(stderr=True)) as bar:
        task = bar.add_task("replaying", total=sum(len(wanted) for _, wanted in jobs))
        results = simulate_all(
            jobs, capacity, told=lambda: bar.advance(task), num_threads=min(len(jobs) * 2, os.cpu_count() or 1)
        )
    devices = [(file, trace, found) for (file, trace), found in zip(loaded, results, strict=True)]
    entries = [_entry(*device, args.sweep) for device in devices]
    write_json(args, {"files": list(args.files), "capacity_bytes": capacity or None, "devices": entries})
    if wants_text(args):
        _print(args, devices, capacity)
    return 0


def _candidates(args: argparse.Namespace, capacity: int) -> list[Candidate]:
    chosen = named_candidates(args, capacity)
    if args.all:
        chosen += [*(Candidate(name) for name in ALLOCATORS), _HINDSIGHT]
    if args.sweep:
        chosen += [Candidate("torch", conf) for conf in SWEEP + (SWEEP_UNDER_PRESSURE if capacity else ())]
    return list(dict.fromkeys(chosen or _USUAL))


def _with_recorded(trace: Trace, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates, and torch with the settings of the record if torch is among them."""
    of_record = Candidate("torch", recorded_conf(trace))
    if of_record in candidates or not any(candidate.allocator == "torch" for candidate in candidates):
        return candidates
    return [of_record, *candidates]


def _entry(file: str, trace: Trace, found: list[Simulated], sweep: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "file": file,
        "device": trace.device,
        "events": count_events(trace),
        "requests": trace.num_requests,
        "recorded_settings": recorded_conf(trace),
        "recorded": dataclasses.asdict(recorded(trace)),
        "notes": list(trace.info.get("notes", [])),
        "results": [dataclasses.asdict(result) for result in found],
    }
    if sweep:
        best = _best_of_torch(found)
        entry["best"] = {"allocator": best.allocator, "settings": best.settings}
    return entry


def _best_of_torch(found: list[Simulated]) -> Simulated:
    return next(result for result in found if result.allocator == "torch")


def _print(args: argparse.Namespace, devices: list[tuple[str, Trace, list[Simulated]]], capacity: int) -> None:
    console = table_console()
    for file, trace, found in devices:
        told = recorded(trace)
        memory = f", {human_bytes(capacity)} of memory" if capacity else ""
        count = f"{plural(trace.num_requests, 'request')} in {count_events(trace):,} events"
        story = f", device {trace.device}: {count}{memory}"
        print_prose(console, Text.assemble((file_label(file), "bold"), story))
        for note in note_texts(trace.info.get("notes", [])):
            print_prose(console, f"note: {note}", indent="  ")
        print_table(console, _COLUMNS, [*_recorded_row(trace, told), *map(_row, found)], text_columns=2)
        for remark in _remarks(trace, told, found, capacity):
            print_prose(console, remark, indent="  ")
        if args.sweep:
            settings = _best_of_torch(found).settings
            variable = variable_to_set(str(trace.info.get("torch", "")))
            console.print(
                f"Best of torch's settings: {variable}={command_text(settings)}"
                if settings
                else "Best of torch's settings: the defaults."
            )
        console.print()
    console.print(f"Next: stalloc explain {command_text(args.files[0])}")


_COLUMNS = ("allocator", "settings", "reserved", "allocated", "fragmentation", "device allocs", "frees", "retries")


def _recorded_row(trace: Trace, told: Recorded) -> list[list[str]]:
    """The row of what the file itself records; none where it does not say what was reserved."""
    if told.reserved_peak_bytes is None:
        return []
    figures = human_bytes(told.reserved_peak_bytes), human_bytes(told.allocated_peak_bytes)
    return [["recorded", printable(recorded_conf(trace)) or "-", *figures, f"{told.fragmentation:.2%}", "", "", ""]]


def _row(result: Simulated) -> list[str]:
    return [
        result.allocator,
        printable(result.settings) or "-",
        human_bytes(result.peak_reserved_bytes),
        human_bytes(result.peak_allocated_bytes),
        f"{result.fragmentation:.2%}",
        f"{result.device_allocs:,}",
        f"{result.device_frees:,}",
        f"{result.retries:,}",
    ]


def _remarks(trace: Trace, told: Recorded, found: list[Simulated], capacity: int) -> Iterator[str]:
    """Remarks on the rows, a sentence each."""
    if told.out_of_memory_event is not None:
        wanted = f"{human_bytes(told.out_of_memory_bytes or 0)} wanted at event {told.out_of_memory_event:,}"
        how = (
            "; the replay ends with that request" if capacity else "; with --capacity the replay includes that request"
        )
        yield f"recorded: ran out of memory, {wanted}{how}"
    if told.unseen_bytes:
        yield f"recorded: {human_bytes(told.unseen_bytes)} were live throughout the recording and are not replayed"
    if trace.num_baseline_requests and told.reserved_peak_bytes is not None:
        before = plural(trace.num_baseline_requests, "block")
        yield f"recorded: {before} live when recording began; the models start from an empty device"
    for result in found:
        name = " ".join(filter(None, (result.allocator, printable(result.settings))))
        for remark in filter(None, (_fitting(result, told, capacity), _agreement(result), _work(result))):
            yield f"{name}: {remark}"


def _fitting(result: Simulated, told: Recorded, capacity: int) -> str:
    if result.fits:
        ran_out = capacity and result.exact is not None and told.out_of_memory_event is not None
        return "fits when started from an empty device, though the recorded run ran out of memory" if ran_out else ""
    return f"does not fit: {human_bytes(result.failed_bytes or 0)} wanted at event {result.failed_event:,}"


def _agreement(result: Simulated) -> str:
    """Whether the model, starting from the blocks that were there when recording began, does what the file records."""
    if result.exact:
        return "started from the recorded state, the model reproduces the recording exactly"
    if result.exact is False:
        where = f" from event {result.first_difference:,} on" if result.first_difference is not None else ""
        return f"differs from the recording{where}: {printable(result.reason, MAX_SENTENCE)}"
    return ""


def _work(result: Simulated) -> str:
    counts = result.counts
    if counts.get("compactions"):
        return f"{counts['compactions']:,} compactions, {human_bytes(counts['moved_bytes'])} moved"
    if (result.allocator, result.settings) == (_HINDSIGHT.allocator, _HINDSIGHT.settings):
        return "planned in hindsight, from the whole recording; a real run cannot"
    if result.allocator == "stalloc":
        return "found a repeating step and planned it" if counts["plans"] else "found no repeating step"
    return ""
