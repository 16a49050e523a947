"""Say why more is reserved than allocated: every byte of the gap is assigned to a cause, and to what keeps it there.

FILE is a trace of any kind that stalloc reads, or a log with the text of an out-of-memory error, of PyTorch, CuPy or
another GPU library, plain, compressed, or in the JSON of a container's runtime. For the text of an error the report
says what follows from its figures, and how to learn more. For the log of a server (vLLM, SGLang) it shows the memory
since its last start, and lines that do not follow from its settings, with the reason: another process, the estimate of
the CUDA graphs, the warm-up of the sampler. A memory snapshot of torch is explained from what it records; other traces
are replayed with a model of torch's caching allocator, starting from an empty device, and the report says so. --at
chooses the moment: the most reserved (peak, the default), the last out-of-memory error (oom, the default if there is
one), or an event index.

Allocated counts bytes that were requested and not freed. The causes add up to reserved - allocated, to the byte:
rounding (blocks larger than the request), hard fragmentation (free space between live blocks), soft fragmentation
(free space at the ends of segments, and in segments that will be used again; it would merge if segments were one
range), other streams (cached for another stream than the one of the last request), private pools, waiting frees
(freed, but another stream may still use them), cache never returned (whole segments that are not used again in the
recording).

For an out-of-memory error the verdict is "capacity" if the request is larger than all free memory together, on the
device and in the allocator, else "fragmentation", and "unknown" if the file does not say what was free on the device,
as in traces of profilers and logs of RMM. Then the report lists settings and allocators that would have served the
request, each replayed from an empty device of the same size.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from stalloc.allocator_conf import variable_to_set
from stalloc.analysis import CAUSES, Explanation, OutOfMemory, explain
from stalloc.analysis.error_search import find_errors
from stalloc.analysis.error_text import ErrorText
from stalloc.analysis.holders import find_growth
from stalloc.analysis.moments import last_oom, moment_text
from stalloc.analysis.server_log import ServerLog, read_server_log
from stalloc.cli.error_log import error_entry, no_errors, print_error, print_next
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
from stalloc.cli.server_report import print_server, server_entry
from stalloc.cli.tables import print_items, print_prose
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.notices import say
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces
from stalloc.trace.load import read_log
from stalloc.trace.sources.torch_snapshot import has_history

_RETURNABLE = "whole segments without a live block: torch.cuda.empty_cache() returns them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc explain`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to explain")
    parser.add_argument("--at", metavar="EVENT", help="an event index, peak or oom")
    parser.add_argument("--device", type=int, metavar="N", help="this device only")
    add_top_argument(parser, 5, "segments and call sites shown")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Explain each device of each file."""
    devices: list[tuple[str, Trace, Explanation]] = []
    errors: list[tuple[str, ErrorText]] = []
    servers: list[tuple[str, ServerLog]] = []
    failed: dict[str, tuple[str, bool]] = {}  # what cannot be explained: why, and whether it is but a log without error
    for file in args.files:
        with working(f"explaining {file_label(file)}"):
            try:
                text = read_log(file)
                if text is None:
                    devices += [(file, trace, made) for trace, made in _explained(args, file)]
                    continue
                found, server = find_errors(text), read_server_log(text)
                errors += [(file, error) for error in found]
                servers += [(file, server)] if server is not None else []
                if not found and server is None:
                    failed[file] = no_errors(file), True
            except BadInputError as problem:
                failed[file] = str(problem), False
    if not devices and not errors and not servers:
        raise BadInputError(next(iter(failed.values()))[0])
    result = {"files": list(args.files), "devices": [_entry(*device) for device in devices]}
    result |= {"errors": [error_entry(file, error) for file, error in errors]}
    result |= {"servers": [server_entry(file, server) for file, server in servers]}
    write_json(args, result | {"not_explained": {file: sentence for file, (sentence, _) in failed.items()}})
    for sentence, _ in failed.values():
        say(sentence)
    if wants_text(args):
        console = table_console()
        for file, server in servers:
            print_server(console, file, server)
        for file, error in errors[-max(args.top, 1) :]:
            print_error(console, file, error)
        if errors:
            print_next(console, [error for _, error in errors])
        if devices:
            _print(args, devices)
    return 0 if all(is_log for _, is_log in failed.values()) else 2


def _explained(args: argparse.Namespace, file: str) -> Iterator[tuple[Trace, Explanation]]:
    """The devices of a file that are asked for, each at the moment that is asked for."""
    traces = [trace for trace in load_traces(file, history=False) if args.device in (None, trace.device)]
    if not traces:
        raise BadInputError(f"{file} has no events of device {args.device}: leave --device out to see all.")
    chosen = [trace for trace in traces if args.at != "oom" or last_oom(trace) is not None]
    if not chosen:
        raise BadInputError(f"{file} has no out-of-memory event: use --at peak or the index of an event.")
    for trace in chosen:
        yield trace, explain(trace, args.at or ("oom" if last_oom(trace) is not None else "peak"), top=args.top)


def _entry(file: str, trace: Trace, made: Explanation) -> dict[str, Any]:
    entry = {"file": file, **dataclasses.asdict(made), "notes": list(trace.info.get("notes", []))}
    memory = entry.pop("out_of_memory")
    return entry | (memory or {})


def _print(args: argparse.Namespace, devices: list[tuple[str, Trace, Explanation]]) -> None:
    console = table_console()
    for file, trace, made in devices:
        _print_device(console, file_label(file), trace, made)
    first, trace, _ = devices[0]
    verb = "simulate --sweep" if has_history(trace) and not find_growth(trace) else "top"
    console.print(f"Next: stalloc {verb} {command_text(first)}")


def _print_device(console: Console, name: str, trace: Trace, made: Explanation) -> None:
    history, notes = has_history(trace), trace.info.get("notes", [])
    reserved, allocated = made.reserved_bytes, made.allocated_bytes
    in_a_model = " in a model" if made.source_text else ""
    moment = moment_text(made.event) if history else "when the snapshot was taken"
    print_prose(
        console,
        Text.assemble(
            (name, "bold"),
            f", device {made.device}, {moment}: "
            f"reserved {human_bytes(reserved)}{in_a_model}, allocated {human_bytes(allocated)}, "
            f"{human_bytes(reserved - allocated)} reserved but not allocated",
        ),
    )
    if history:
        _print_peaks(console, made)
    if made.source_text:
        print_prose(console, printable(made.source_text, 300), indent="  ")
    for note in note_texts(notes):
        print_prose(console, f"note: {note}", indent="  ")
    causes = sorted(made.causes.items(), key=lambda item: -item[1])
    meanings = CAUSES if history else CAUSES | {"cache_never_returned": _RETURNABLE}
    print_items(console, [(name.replace("_", " "), human_bytes(size), meanings[name]) for name, size in causes if size])
    if made.roles:
        held = ", ".join(f"{role} {human_bytes(size)}" for role, size in made.roles.items())
        print_prose(console, f"allocated: {held}", indent="  ")
    if made.out_of_memory:
        _print_verdict(console, made.out_of_memory, variable_to_set(str(trace.info.get("torch", ""))))
    for segment in made.segments:
        blocks = f"{plural(segment.num_blocks, 'live block')} ({human_bytes(segment.live_bytes)})"
        print_prose(
            console,
            f"{human_bytes(segment.free_bytes)} of a {human_bytes(segment.size_bytes)} segment is pinned by {blocks} "
            f"from {', '.join(map(printable, segment.sites))}",
            indent="  ",
        )
    console.print()


def _print_peaks(console: Console, made: Explanation) -> None:
    in_a_model = " in a model" if made.source_text and not made.is_reserved_told else ""
    unseen = f" and {human_bytes(made.record_unseen_bytes)} live throughout" if made.record_unseen_bytes else ""
    print_prose(
        console,
        f"over the whole {'recording' if made.source == 'record' else 'program'}: reserved peak "
        f"{human_bytes(made.record_reserved_peak_bytes)}{in_a_model}, allocated peak "
        f"{human_bytes(made.record_allocated_peak_bytes)}{unseen}, fragmentation {made.record_fragmentation:.2%}",
        indent="  ",
    )


def _print_verdict(console: Console, memory: OutOfMemory, variable: str) -> None:
    whole = memory.whole_segments_bytes
    if memory.device_free_bytes is None:
        print_prose(
            console,
            f"Out of memory: {printable(memory.asked_by)} requested {human_bytes(memory.wanted_bytes)}. The file does "
            "not say how much was free on the device, so the reason cannot be told from it.",
        )
        return
    story = (
        f": {printable(memory.asked_by)} requested {human_bytes(memory.wanted_bytes)}. "
        f"Free: {human_bytes(memory.device_free_bytes)} on the device, "
        f"{human_bytes(memory.partly_used_bytes)} in partly used segments"
        + (f", {human_bytes(whole)} in whole segments" if whole else "")
        + f"; the largest free piece for that stream is {human_bytes(memory.largest_free_bytes)}."
    )
    print_prose(console, Text.assemble("Out of memory because of ", (memory.verdict, "bold"), story))
    if not memory.avoided_by:
        print_prose(console, "None of the settings and allocators that were tried would have avoided it.")
        return
    again = (
        "the recorded settings run out of memory again"
        if memory.fails_again
        else "even the recorded settings do not run out: what was there before recording began matters"
    )
    print_prose(
        console,
        f"Replayed from an empty device of the same size, {again}. "
        "Up to that request, where the recording ends, these do not:",
    )
    for result in memory.avoided_by[:5]:
        conf = result.settings
        how = f"{variable}={command_text(conf)}" if conf else printable(result.allocator)
        console.print(f"  {how}: reserves {human_bytes(result.peak_reserved_bytes)}")
