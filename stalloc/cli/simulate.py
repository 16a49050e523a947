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
from operator import itemgetter
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from stalloc.allocator_conf import has_expandable_segments, release_number, variable_to_set
from stalloc.analysis import Recorded, count_events, recorded
from stalloc.analysis.moments import device_free, last_oom
from stalloc.cli.output import add_json_argument, add_top_argument, command_text, file_label, present
from stalloc.cli.progress import working
from stalloc.cli.shared_options import refuse_typed
from stalloc.cli.tables import print_lines, print_notes, print_prose, print_table, print_title
from stalloc.cli.trace_options import add_candidate_arguments, named_candidates
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.printable import MAX_SENTENCE, printable
from stalloc.replay.model_events import recorded_conf
from stalloc.replay.registry import ALLOCATORS
from stalloc.replay.simulation import SWEEP, SWEEP_UNDER_PRESSURE, Candidate, Simulated, simulate, simulate_all
from stalloc.trace import Action, Trace, load_traces

_HINDSIGHT = Candidate("stalloc", "mode:plan")
_USUAL = (Candidate("torch"), Candidate("torch", "expandable_segments:True"), Candidate("stalloc"), _HINDSIGHT)
_WORTH_IT = 0.99  # of what the recorded settings reserve
_COLUMNS = ("allocator", "settings", "reserved", "allocated", "fragmentation", "device allocs", "frees", "retries")


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        if args.torch and release_number(args.torch) is None:
            raise BadInputError(f"--torch is {args.torch[:40]!r}: give a release of PyTorch, such as 2.8.")
    else:
        refuse_typed(args, "is of --advise: give that too", "torch", "top")
    capacity = memory_option("--capacity", args.capacity) if args.capacity else 0
    candidates = [] if args.advise else _candidates(args, capacity)
    with working(f"reading {plural(len(args.files), 'file')}"):
        loaded = [(file, trace) for file in args.files for trace in load_traces(file)]
    if args.advise:
        _advise(args, [trace for _, trace in loaded], capacity)
        return 0
    jobs = [(trace, _with_recorded(trace, candidates)) for _, trace in loaded]
    with Progress(transient=True, disable=not Console(stderr=True).is_terminal, console=Console(stderr=True)) as bar:
        task = bar.add_task("replaying", total=sum(len(wanted) for _, wanted in jobs))
        results = simulate_all(
            jobs, capacity, told=lambda: bar.advance(task), num_threads=min(len(jobs) * 2, os.cpu_count() or 1)
        )
    devices = [(file, trace, found) for (file, trace), found in zip(loaded, results, strict=True)]
    entries = [_entry(*device, args.sweep) for device in devices]
    result = {"files": list(args.files), "capacity_bytes": capacity or None, "devices": entries}
    present(args, result, _print, args, devices, capacity)
    return 0


def _candidates(args: argparse.Namespace, capacity: int) -> list[Candidate]:
    chosen = named_candidates(args, capacity)
    if args.all:
        chosen += [*map(Candidate, ALLOCATORS), _HINDSIGHT]
    if args.sweep:
        chosen += [Candidate("torch", conf) for conf in SWEEP + (SWEEP_UNDER_PRESSURE if capacity else ())]
    return list(dict.fromkeys(chosen or _USUAL))


def _with_recorded(trace: Trace, candidates: list[Candidate]) -> list[Candidate]:
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


def _print(
    console: Console, args: argparse.Namespace, devices: list[tuple[str, Trace, list[Simulated]]], capacity: int
) -> None:
    for file, trace, found in devices:
        told = recorded(trace)
        memory = f", {human_bytes(capacity)} of memory" if capacity else ""
        count = f"{plural(trace.num_requests, 'request')} in {count_events(trace):,} events"
        print_title(console, file, f", device {trace.device}: {count}{memory}")
        print_notes(console, trace.info.get("notes", []))
        rows = [_row(result) for result in found]
        if told.reserved_peak_bytes is not None:
            figures = human_bytes(told.reserved_peak_bytes), human_bytes(told.allocated_peak_bytes)
            settings = printable(recorded_conf(trace)) or "-"
            rows.insert(0, ["recorded", settings, *figures, f"{told.fragmentation:.2%}", "", "", ""])
        print_table(console, _COLUMNS, rows, text_columns=2)
        print_lines(console, _remarks(trace, told, found, capacity))
        if args.sweep:
            settings = _best_of_torch(found).settings
            line = f"{variable_to_set(str(trace.info.get('torch', '')))}={command_text(settings)}"
            console.print(f"Best of torch's settings: {line if settings else 'the defaults.'}")
        console.print()
    console.print(f"Next: stalloc explain {command_text(args.files[0])}")


def _row(result: Simulated) -> list[str]:
    return [
        result.allocator,
        printable(result.settings) or "-",
        human_bytes(result.peak_reserved_bytes),
        human_bytes(result.peak_allocated_bytes),
        f"{result.fragmentation:.2%}",
        *(f"{count:,}" for count in (result.device_allocs, result.device_frees, result.retries)),
    ]


def _remarks(trace: Trace, told: Recorded, found: list[Simulated], capacity: int) -> Iterator[str]:
    if told.out_of_memory_event is not None:
        wanted = f"{human_bytes(told.out_of_memory_bytes or 0)} wanted at event {told.out_of_memory_event:,}"
        how = "the replay ends with that request" if capacity else "with --capacity the replay includes that request"
        yield f"recorded: ran out of memory, {wanted}; {how}"
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


def _advise(args: argparse.Namespace, traces: list[Trace], capacity: int) -> None:
    """Rank the settings of PyTorch's allocator for all devices of the one file."""
    conf, release = recorded_conf(traces[0]), args.torch or str(traces[0].info.get("torch", ""))
    variable = variable_to_set(release)
    peaks = [peak for peak in (recorded(trace).reserved_peak_bytes for trace in traces) if peak is not None]
    recorded_bytes = max(peaks, default=None)
    too_short = next(filter(_is_too_short, traces), None)
    result: dict[str, Any] = {"file": args.files[0], "variable": variable, "recorded_settings": conf}
    result |= {"recorded_reserved_peak_bytes": recorded_bytes, "too_short": too_short is not None}
    if too_short is not None:
        result |= {"best_settings": None, "export": None, "ranking": []}
        present(args, result, _print_too_short, args.files[0], too_short, conf)
        return
    with working("replaying settings"):
        ranking = _rank(traces, capacity, release)
    best, usual = ranking[0], next(one for one in ranking if one["settings"] == conf)
    usual_bytes = usual["reserved_peak_bytes"]
    if recorded_bytes is not None:  # a program that returns its cache itself reserves less than a replay
        usual_bytes = min(usual_bytes, recorded_bytes)
    line = None
    if best["fits"] and (not usual["fits"] or best["reserved_peak_bytes"] < _WORTH_IT * usual_bytes):
        line = f"export {variable}={command_text(best['settings'])}" if best["settings"] else f"unset {variable}"
    result |= {"best_settings": best["settings"], "export": line, "ranking": ranking}
    frees = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
    returns_cache = any(np.isin(trace.action, frees).any() for trace in traces)
    present(args, result, _print_ranking, args, ranking, usual, line, recorded_bytes, returns_cache)


def _is_too_short(trace: Trace) -> bool:
    """Whether most of the memory at the peak was allocated before the history, so that its placement is not known."""
    allocated, held = _allocated_and_held(trace)
    return trace.info.get("complete") is not True and allocated < held


def _allocated_and_held(trace: Trace) -> tuple[int, int]:
    """The bytes that the history allocates, and those that are held at its peak."""
    return int(trace.size[trace.start >= 0].sum()), int(trace.live_bytes(trace.size).max(initial=0))


def _print_too_short(console: Console, file: str, trace: Trace, conf: str) -> None:
    allocated, held = map(human_bytes, _allocated_and_held(trace))
    reserved, shown = recorded(trace).reserved_peak_bytes, printable(conf) or "the defaults"
    said = f" The recorded settings ({shown}) reserved {human_bytes(reserved)}." if reserved else ""
    print_prose(
        console,
        f"The history of {file_label(file)} is too short to rank settings: it allocates {allocated}, and {held} is "
        f"held at its peak, most of it from before.{said} Record whole steps, best from the start of the program.",
    )
    console.print(f"Next: stalloc explain {command_text(file)}")


def _rank(traces: list[Trace], capacity: int, release: str) -> list[dict[str, Any]]:
    """Every text of settings that the release knows, on all devices, best first: what is reserved on the fullest."""
    by_settings: dict[str, list[Simulated]] = {}
    conf = recorded_conf(traces[0])
    for trace in traces:
        limit = capacity or _device_bytes(trace)
        texts = list(dict.fromkeys([conf, *SWEEP, *(SWEEP_UNDER_PRESSURE if limit else ())]))
        if not has_expandable_segments(release):  # what was recorded is compared with
            texts = [text for text in texts if "expandable_segments" not in text or text == conf]
        for result in simulate(trace, [Candidate("torch", text) for text in texts], limit):
            by_settings.setdefault(result.settings, []).append(result)
    ranking = [
        {
            "settings": text,
            "fits": all(one.fits for one in found),
            "reserved_peak_bytes": max(one.peak_reserved_bytes for one in found),
            "device_calls": sum(one.device_allocs + one.device_frees for one in found),
        }
        for text, found in by_settings.items()
        if len(found) == len(traces)
    ]
    order = itemgetter("reserved_peak_bytes", "device_calls", "settings")
    return sorted(ranking, key=lambda one: (not one["fits"], *order(one)))


def _device_bytes(trace: Trace) -> int:
    """What the process could have had when it ran out of memory; 0: it did not, or the file does not say."""
    error = last_oom(trace)
    free = device_free(trace, error) if error is not None else None
    return 0 if error is None or free is None else free + int(trace.reserved_bytes()[error])


def _print_ranking(
    console: Console,
    args: argparse.Namespace,
    ranking: list[dict[str, Any]],
    usual: dict[str, Any],
    line: str | None,
    reserved: int | None,
    returns_cache: bool,
) -> None:
    again, usual_bytes = "recorded", usual["reserved_peak_bytes"]
    if reserved is not None and reserved != usual_bytes:
        again = "recorded settings"
        returned = reserved < usual_bytes and returns_cache
        without = ", but without what the program returned by itself (empty_cache)" if returned else ""
        print_prose(
            console,
            f"The file records a reserved peak of {human_bytes(reserved)}; below its requests are replayed from an "
            f"empty device, with the recorded settings too{without}.",
        )
    rows = []
    for one in ranking[: args.top] + ([] if usual in ranking[: args.top] else [usual]):
        name = (printable(one["settings"]) or "the defaults") + (f" ({again})" if one is usual else "")
        change = (one["reserved_peak_bytes"] - usual_bytes) / max(usual_bytes, 1)
        shown = f"{change:+.1%}" if one["fits"] and usual["fits"] else ""
        ending = "fits" if one["fits"] else "runs out"
        rows.append([name, human_bytes(one["reserved_peak_bytes"]), shown, f"{one['device_calls']:,}", ending])
    print_table(console, ("settings", "reserved", "change", "device calls", "result"), rows)
    if line is None:
        found = "is better than what was recorded" if usual["fits"] else "fits"
        print_prose(console, f"nothing that was tried {found}; `stalloc run SCRIPT` plans where blocks live.")
    else:
        console.print(line)
    console.print(f"Next: stalloc explain {command_text(args.files[0])}")
