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
from stalloc.analysis.error_text import DEVICE, ErrorText, sentences
from stalloc.analysis.holders import find_growth
from stalloc.analysis.moments import last_oom, moment_text
from stalloc.analysis.server_log import ServerLog, findings, read_server_log
from stalloc.cli.output import add_json_argument, add_top_argument, command_text, file_label, present
from stalloc.cli.progress import working
from stalloc.cli.tables import print_items, print_lines, print_notes, print_prose, print_title
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.inputs import shown_name
from stalloc.notices import say
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces
from stalloc.trace.load import read_log
from stalloc.trace.sources.torch_snapshot import has_history

_Server = tuple[str, ServerLog]  # with its file, as the others
_Error = tuple[str, ErrorText]
_Device = tuple[str, Trace, Explanation]
_RETURNABLE = "whole segments without a live block: torch.cuda.empty_cache() returns them"
_DERIVED = ("contradiction", "unallocated_bytes", "outside_bytes", "others_bytes", "obtainable_bytes", "verdict")
_RECORDED = ("PyTorch", "CuPy", "CUDA", "stalloc")  # whose programs `stalloc record` and `stalloc dryrun` run
_SHOWN_OF_LINE = 200
_SHARES = {"vLLM": "gpu_memory_utilization", "SGLang": "mem_fraction_static"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to explain")
    parser.add_argument("--at", metavar="EVENT", help="an event index, peak or oom")
    parser.add_argument("--device", type=int, metavar="N", help="this device only")
    add_top_argument(parser, 5, "segments and call sites shown")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    devices: list[_Device] = []
    errors: list[_Error] = []
    servers: list[_Server] = []
    failed: dict[str, tuple[str, bool]] = {}  # what cannot be explained: why, and whether it is but a log without error
    for file in args.files:
        with working(f"explaining {file_label(file)}"):
            try:
                text = read_log(file)
                if text is None:
                    devices += list(_explained(args, file))
                    continue
                found, server = find_errors(text), read_server_log(text)
                wanted = [error for error in found if args.device is None or error.device in (None, args.device)]
                errors += [(file, error) for error in wanted]
                servers += [(file, server)] if server is not None else []
                if not found and server is None:
                    failed[file] = _no_errors(file), True
                elif not wanted and server is None:
                    no_error = f"{shown_name(file)} has no out-of-memory error of device {args.device}"
                    failed[file] = f"{no_error}: leave --device out to see all.", True
            except BadInputError as problem:
                failed[file] = str(problem), False
    if not devices and not errors and not servers:
        raise BadInputError(next(iter(failed.values()))[0])
    result: dict[str, Any] = {"files": list(args.files), "devices": [_entry(*device) for device in devices]}
    result |= {"errors": [_error_entry(file, error) for file, error in errors]}
    result |= {"servers": [_server_entry(file, server) for file, server in servers]}
    result["not_explained"] = {file: sentence for file, (sentence, _) in failed.items()}
    for sentence, _ in failed.values():
        say(sentence)
    present(args, result, _print, args.top, servers, errors, devices)
    return 0 if all(is_log for _, is_log in failed.values()) else 2


def _explained(args: argparse.Namespace, file: str) -> Iterator[_Device]:
    traces = [trace for trace in load_traces(file, history=False) if args.device in (None, trace.device)]
    if not traces:
        raise BadInputError(f"{file} has no events of device {args.device}: leave --device out to see all.")
    chosen = [trace for trace in traces if args.at != "oom" or last_oom(trace) is not None]
    if not chosen:
        raise BadInputError(f"{file} has no out-of-memory event: use --at peak or the index of an event.")
    for trace in chosen:
        yield file, trace, explain(trace, args.at or ("oom" if last_oom(trace) is not None else "peak"), top=args.top)


def _entry(file: str, trace: Trace, made: Explanation) -> dict[str, Any]:
    entry = {"file": file, **dataclasses.asdict(made), "notes": list(trace.info.get("notes", []))}
    memory = entry.pop("out_of_memory")
    return entry | (memory or {})


def _print(console: Console, top: int, servers: list[_Server], errors: list[_Error], devices: list[_Device]) -> None:
    for file, server in servers:
        _print_server(console, file, server)
    shown = max(top, 1)
    if len(errors) > shown:
        earlier = plural(len(errors) - shown, "earlier error")
        console.print(f"{earlier} not shown; --top {len(errors)} shows all.\n")
    for file, error in errors[-shown:]:
        _print_error(console, file, error)
    if errors:
        _print_next(console, [error for _, error in errors])
    for device in devices:
        _print_device(console, *device)
    if devices:
        first, trace, _ = devices[0]
        verb = "simulate --sweep" if has_history(trace) and not find_growth(trace) else "top"
        console.print(f"Next: stalloc {verb} {command_text(first)}")


def _print_device(console: Console, file: str, trace: Trace, made: Explanation) -> None:
    history, reserved, allocated = has_history(trace), made.reserved_bytes, made.allocated_bytes
    in_a_model = " in a model" if made.source_text else ""
    moment = moment_text(made.event) if history else "when the snapshot was taken"
    figures = f"reserved {human_bytes(reserved)}{in_a_model}, allocated {human_bytes(allocated)}"
    gap = f"{human_bytes(reserved - allocated)} reserved but not allocated"
    print_title(console, file, f", device {made.device}, {moment}: {figures}, {gap}")
    if history:
        in_a_model = " in a model" if made.source_text and not made.is_reserved_told else ""
        unseen = f" and {human_bytes(made.record_unseen_bytes)} live throughout" if made.record_unseen_bytes else ""
        whole = "recording" if made.source == "record" else "program"
        peak, most = map(human_bytes, (made.record_reserved_peak_bytes, made.record_allocated_peak_bytes))
        peaks = f"reserved peak {peak}{in_a_model}, allocated peak {most}{unseen}"
        print_lines(console, [f"over the whole {whole}: {peaks}, fragmentation {made.record_fragmentation:.2%}"])
    if made.source_text:
        print_prose(console, printable(made.source_text, 300), indent="  ")
    print_notes(console, trace.info.get("notes", []))
    causes = sorted(made.causes.items(), key=lambda item: -item[1])
    meanings = CAUSES if history else CAUSES | {"cache_never_returned": _RETURNABLE}
    print_items(console, [(name.replace("_", " "), human_bytes(size), meanings[name]) for name, size in causes if size])
    if made.roles:
        held = ", ".join(f"{role} {human_bytes(size)}" for role, size in made.roles.items())
        print_prose(console, f"allocated: {held}", indent="  ")
    if made.out_of_memory:
        _print_verdict(console, made.out_of_memory, variable_to_set(str(trace.info.get("torch", ""))))
    for segment in made.segments:
        free, size, live = map(human_bytes, (segment.free_bytes, segment.size_bytes, segment.live_bytes))
        by = f"{plural(segment.num_blocks, 'live block')} ({live}) from {', '.join(map(printable, segment.sites))}"
        print_prose(console, f"{free} of a {size} segment is pinned by {by}", indent="  ")
    console.print()


def _print_verdict(console: Console, memory: OutOfMemory, variable: str) -> None:
    asked = f": {printable(memory.asked_by)} requested {human_bytes(memory.wanted_bytes)}. "
    if memory.device_free_bytes is None:
        unknown = "The file does not say how much was free on the device, so the reason cannot be told from it."
        print_prose(console, f"Out of memory{asked}{unknown}")
        return
    free = f"Free: {human_bytes(memory.device_free_bytes)} on the device, "
    free += f"{human_bytes(memory.partly_used_bytes)} in partly used segments"
    if memory.whole_segments_bytes:
        free += f", {human_bytes(memory.whole_segments_bytes)} in whole segments"
    free += f"; the largest free piece for that stream is {human_bytes(memory.largest_free_bytes)}."
    print_prose(console, Text.assemble("Out of memory because of ", (memory.verdict, "bold"), asked + free))
    if not memory.avoided_by:
        print_prose(console, "None of the settings and allocators that were tried would have avoided it.")
        return
    again = "even the recorded settings do not run out: what was there before recording began matters"
    if memory.fails_again:
        again = "the recorded settings run out of memory again"
    print_prose(
        console,
        f"Replayed from an empty device of the same size, {again}. "
        "Up to that request, where the recording ends, these do not:",
    )
    for result in memory.avoided_by[:5]:
        conf = result.settings
        how = f"{variable}={command_text(conf)}" if conf else printable(result.allocator)
        console.print(f"  {how}: reserves {human_bytes(result.peak_reserved_bytes)}")


def no_trace_but_errors(file: str) -> str:
    """The sentence for a verb that was given a log with an error instead of a trace; empty for another file."""
    try:
        text = read_log(file)
        if text is None or not find_errors(text):
            return ""
    except BadInputError:
        return ""
    name = shown_name(file)
    return f"{name}: the text of an out-of-memory error, and not a trace: stalloc explain {name} reads it."


def _no_errors(file: str) -> str:
    return (
        f"{shown_name(file)}: a log without an out-of-memory error, or a server's start, that stalloc knows: give the "
        "log of the process that ran out of memory, or a trace (`stalloc stats --help` names the kinds)."
    )


def _error_entry(file: str, error: ErrorText) -> dict[str, Any]:
    return {"file": file, **dataclasses.asdict(error), **{name: getattr(error, name) for name in _DERIVED}}


def _print_error(console: Console, file: str, error: ErrorText) -> None:
    device = "" if error.device is None else f", device {error.device}"
    times = f", {error.times:,} times" if error.times > 1 else ""
    wanted = "" if error.wanted_bytes is None else f", {human_bytes(error.wanted_bytes)} wanted"
    place = "" if error.place == DEVICE else f" ({error.place})"
    print_title(console, file, f"{device}: out of memory in {error.library}{place}{wanted}{times}")
    rows = [[name, human_bytes(amount), meaning] for name, amount, meaning in _parts(error) if amount is not None]
    if not error.contradiction:
        print_items(console, rows)
    for sentence in sentences(error):
        print_prose(console, sentence)
    console.print()


def _print_next(console: Console, errors: list[ErrorText]) -> None:
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
    inside = error.unallocated_bytes
    yield "device", error.total_bytes, "in all"
    bounded = "pool may hold" if inside is None and error.reserved_bytes is not None else "process may use"
    yield "limit", error.limit_bytes, "that the hardware has" if error.place == "on chip" else f"that this {bounded}"
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
    where = {"KV cache": "for the KV cache", "host": "on the host"}.get(error.place, "on the device")
    yield "free", error.free_bytes, "of the limit" if error.limit_bytes is None and error.told == "limit" else where


def _server_entry(file: str, log: ServerLog) -> dict[str, Any]:
    told = {name: value for name, value in dataclasses.asdict(log).items() if name != "lines"}
    return {"file": file, **told, "findings": [dataclasses.asdict(one) for one in findings(log)]}


def _print_server(console: Console, file: str, log: ServerLog) -> None:
    parts = [f"{log.engine} {log.release}".rstrip()]
    if log.num_ranks > 1:
        parts.append(f"one of {log.num_ranks} ranks")
    if log.share is not None:
        card = f" of {human_bytes(log.total_bytes)}" if log.total_bytes is not None else ""
        parts.append(f"{_SHARES[log.engine]} {log.share:g}{card}")
    print_title(console, file, ": " + ", ".join(parts))
    cache = ""
    if log.tokens is not None:
        cache = f"{log.tokens:,} tokens" + (f", {log.token_bytes / 1024:.1f} KiB each" if log.token_bytes else "")
        if log.concurrency is not None and log.length:
            cache += f"; {log.concurrency:g} requests of {log.length:,} tokens"
    meanwhile = "what came to be used meanwhile: the driver, NCCL, other processes"
    rows = [
        ("weights", log.weights_bytes, ""),
        ("activation peak", log.activation_bytes, "of the measurement, above the weights"),
        ("outside of PyTorch", log.non_torch_bytes, meanwhile),
        ("CUDA graphs, estimated", log.graphs_estimated_bytes, "taken from the cache" if log.reckons_graphs else ""),
        ("cache", log.cache_bytes, cache),
        ("CUDA graphs", log.graphs_bytes, "with what the driver takes for them"),
        ("free at the end", log.free_at_end_bytes, ""),
    ]
    print_items(console, [(name, human_bytes(size), meaning) for name, size, meaning in rows if size is not None])
    found = findings(log)
    if not found:
        print_prose(console, "No line of it differs from what its settings and its other lines predict.", indent="  ")
    for one in found:
        print_prose(console, Text.assemble((one.cause, "bold"), f": {one.text}"), indent="  ")
        if one.line:
            print_prose(console, printable(one.line, _SHOWN_OF_LINE), indent="    ")
    console.print()
    console.print("Next: stalloc dryrun --serve SCRIPT    (the same without a GPU, with other settings)")
