"""Describe traces: requests, peaks, fragmentation, the lower bound of every plan, streams, steps and classes.

FILE is a trace of any kind that stalloc reads: a recording of `stalloc record` (.trace.npz), a memory snapshot of torch
(a pickle, JSON or its HTML page), a trace or raw memory timeline of torch.profiler (JSON), a log of RMM or of the DTR
simulator, a planning CSV; all but the first may be packed (gzip, bzip2, xz, a zip archive of one file). The name - is
standard input.

Allocated counts every request from alloc to free_completed, with sizes rounded up to the alignment; its peak is the
lower bound of every plan. Fragmentation is 1 - allocated peak / reserved peak; here allocated includes what a profiler
trace gives only as a total. The period is the length with which the sequence of requests repeats exactly at the end of
the recording. A step is what the runtime would plan: a repetition of the requests over 512 bytes that fills the
recording, and after which as much is allocated as before. For a recording by `stalloc record --ops` operations,
modules, repeated blocks and roles of requests are listed too. --gpu estimates the time of its last step on that GPU;
--order says how much less memory the step (or one repetition, without an optimizer) would need with its operations in
another order (replayed, not executed).

More than eight files are treated as the ranks of one job, as with --ranks: least, median and most of each figure, which
ranks stand out, and which one limits the batch. A quoted pattern ('run/*/snapshot.pickle') stands for all files that
match.

--graph writes the graph of lifespans of the one FILE, as GraphML (.graphml) or JSON: groups of requests that begin in
one phase, end in one phase and have one size, and which groups are live together. It also prints where the recording
can be split, because little but persistent memory is live.
"""

import argparse
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from stalloc.analysis import Summary, summarize
from stalloc.cli.output import add_json_argument, command_text, note_texts, present
from stalloc.cli.progress import working
from stalloc.cli.stats_ranks import MOST_APART, run_ranks
from stalloc.cli.tables import print_items, print_title
from stalloc.cost.gpu_rates import rates_of
from stalloc.cost.step_seconds import StepEstimate, estimate_step
from stalloc.device import find_gpu
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.inputs import is_remote, matching
from stalloc.lifespans import find_steady_step, last_repetition, reorder
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces
from stalloc.trace.operations import read_operations
from stalloc.writers.lifespan_graph import Relations, relations, write_relations

_MAX_CUTS_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="trace to describe, or a quoted pattern")
    add("--ranks", action="store_true", help="compare the files as ranks of one job (default from 9 files)")
    add("--align", type=int, default=512, metavar="BYTES", help="sizes are rounded up to this (default: 512)")
    add("--gpu", metavar="NAME", help="estimate what the last recorded step takes on this GPU")
    add("--order", action="store_true", help="look for an order of the last step's operations that needs less memory")
    add("--graph", metavar="FILE", help="write the graph of lifespans (.graphml or JSON) to FILE")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.align < 1:
        raise BadInputError(f"--align is {args.align}: give a number of bytes from 1, such as 512.")
    args.files = _expand_patterns(args.files)
    if args.graph and len(args.files) > 1:
        raise BadInputError(f"--graph is for one file, {len(args.files)} were given: describe them one by one.")
    of_each = next((name for name in ("graph", "order", "gpu") if getattr(args, name)), None)
    if args.ranks and of_each:
        raise BadInputError(f"--{of_each} describes each file by itself: leave --ranks out.")
    if args.ranks or (len(args.files) > MOST_APART and not of_each):
        return run_ranks(args)
    told: list[tuple[dict[str, Any], list[tuple[str, str]]]] = []
    graphs: list[Relations] = []
    with working(f"describing {plural(len(args.files), 'file')}"):
        for file in args.files:
            for trace in load_traces(file, history=False):
                told.append(_described(args, file, trace))
                graphs += [relations(trace)] if args.graph else []
    if args.graph:
        write_relations(Path(args.graph), graphs)
    present(args, {"files": list(args.files), "devices": [one for one, _ in told]}, _print, args, told, graphs)
    return 0


def _described(args: argparse.Namespace, file: str, trace: Trace) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What JSON says of one device, and the lines for people."""
    summary = summarize(trace, args.align)
    entry, lines = {"file": file} | asdict(summary), _lines(summary)
    if args.gpu:
        gpu = find_gpu(args.gpu).name
        step = estimate_step(trace, rates_of(gpu))
        names = ("seconds", "error", "measured", "by_class")
        told = {name: getattr(step, name) for name in names} if step is not None else None
        entry["step_estimate"] = told and told | {"is_estimate": True}
        lines.append(("est. step", _step_text(gpu, step)))
    if args.order:
        entry["operation_order"] = order = _order(trace)
        lines.append(("order", _order_text(order)))
    if "pinned_host" in trace.info:
        entry["pinned_host"] = trace.info["pinned_host"]
    return entry, lines


def _expand_patterns(names: Sequence[str]) -> list[str]:
    """All names, patterns (`*`, `?`, `[…]`, `**`) replaced by what matches, rank2 before rank10.

    A file whose own name looks like a pattern is itself. Raises BadInputError for a pattern that matches nothing.
    """
    found: list[str] = []
    for name in names:
        if not glob.has_magic(name) or os.path.lexists(name):
            found.append(name)
            continue
        matches = matching(name) if is_remote(name) else glob.glob(name, recursive=True)
        if not matches:
            raise BadInputError(f"no file matches {name}: check the pattern.")
        found += sorted(matches, key=_by_number)
    return found


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _step_text(gpu: str, step: StepEstimate | None) -> str:
    if step is None:
        return f"not known on {gpu}: the file has no whole step with operations (stalloc record --ops)"
    shares = ", ".join(f"{kind} {seconds / step.seconds:.0%}" for kind, seconds in list(step.by_class.items())[:4])
    measured = f", {step.measured:.0%} measured" if step.measured else ""
    return f"{1e3 * step.seconds:.1f} ms ± {step.error:.0%} on {gpu}{measured}: {shares}"


def _order(trace: Trace) -> dict[str, int] | None:
    """How much less the last step would need in another order, also as plans; None if it has no operations."""
    operations = read_operations(trace)
    if operations is None:
        return None
    step = find_steady_step(trace, operations) or last_repetition(trace, operations)
    if step is None:
        return None
    from stalloc.planner import plan

    found = reorder(trace, operations, step)
    planned = [plan((one.start, one.end, one.size)) for one in (found.lifespans, found.program_lifespans)]
    return {
        **{name: getattr(found, name) for name in ("peak_bytes", "early_peak_bytes", "program_peak_bytes")},
        "planned_bytes": planned[0].peak_bytes,
        "program_planned_bytes": planned[1].peak_bytes,
        "num_moved": found.num_moved,
        "num_operations": len(found.order),
    }


def _order_text(order: dict[str, int] | None) -> str:
    if order is None:
        return "not known: the file has no whole step with operations (stalloc record --ops)"
    told, early, least = (human_bytes(order[name]) for name in ("program_peak_bytes", "early_peak_bytes", "peak_bytes"))
    line = f"{told} allocated in the last step"
    if early != told:
        line += f", {early} if all were freed after their last use"
    if least == early or order["planned_bytes"] >= order["program_planned_bytes"]:
        return f"{line}; no order was found that needs less"
    moved = f"{order['num_moved']:,} of {order['num_operations']:,} operations follow another one"
    plans = [human_bytes(order[name]) for name in ("planned_bytes", "program_planned_bytes")]
    laid_out = f"a plan of {plans[0]} in place of {plans[1]}"
    return f"{line}; {least} in another order that keeps every dependency ({moved}), {laid_out}"


def _print(
    console: Console,
    args: argparse.Namespace,
    devices: list[tuple[dict[str, Any], list[tuple[str, str]]]],
    graphs: list[Relations],
) -> None:
    for entry, lines in devices:
        print_title(console, entry["file"], f", device {entry['device']}, {printable(entry['source'])}")
        print_items(console, lines)
        console.print()
    for told in graphs:
        cuts = ", ".join(f"{event:,}" for event in told.cut_events[:_MAX_CUTS_SHOWN])
        rest = f" and {len(told.cut_events) - _MAX_CUTS_SHOWN:,} more" if told.cut_events[_MAX_CUTS_SHOWN:] else ""
        counts = f"{len(told.graph):,} groups, {told.graph.number_of_edges():,} overlaps"
        split = f"{counts}; can be split before event {cuts}{rest}" if cuts else "cannot be split"
        console.print(f"device {told.device}: {split}")
    if graphs:
        console.print(f"\nWritten: {printable(args.graph)}")
    # why it failed, why so much is reserved at one moment, or else how it could be placed
    asks_why = any(entry["out_of_memory_event"] is not None or not entry["has_history"] for entry, _ in devices)
    console.print(f"Next: stalloc {'explain' if asks_why else 'plan'} {command_text(args.files[0])}")


def _lines(summary: Summary) -> list[tuple[str, str]]:
    if not summary.has_history:
        return _state_lines(summary)
    before = f", {summary.baseline_requests:,} live before recording" if summary.baseline_requests else ""
    peak = f"{human_bytes(summary.allocated_peak_bytes)} at event {summary.allocated_peak_event:,}"
    lines = [
        ("requests", f"{summary.requests:,} in {summary.events:,} events{before}"),
        ("distinct sizes", f"{summary.distinct_sizes:,}"),
        ("lower bound", human_bytes(summary.lower_bound_bytes)),
        ("allocated peak", f"{peak}, {human_bytes(summary.allocated_peak_requested_bytes)} as requested"),
    ]
    if summary.reserved_peak_bytes is not None:
        event = summary.reserved_peak_event
        unseen = f" and {human_bytes(summary.unseen_bytes)} live throughout" if summary.unseen_bytes else ""
        when = "before the first event" if event == -1 else f"at event {event:,}"
        lines += [
            ("reserved peak", f"{human_bytes(summary.reserved_peak_bytes)} {when}"),
            ("fragmentation", f"{summary.fragmentation:.2%} (1 - allocated peak{unseen} / reserved peak)"),
        ]
    if summary.out_of_memory_event is not None:
        wanted = f"{human_bytes(summary.out_of_memory_bytes or 0)} wanted at event {summary.out_of_memory_event:,}"
        lines.append(("out of memory", wanted))
    lines.append(("streams", str(summary.streams)))
    for name, found, repeats, nothing in (
        ("period", summary.period_requests, summary.period_repeats, "none: the sequence does not repeat exactly"),
        ("step", summary.step_requests, summary.step_repeats, "none confirmed"),
    ):
        lines.append((name, f"{found:,} requests, {repeats} times" if found else nothing))
    names = ["persistent", "scoped", "transient"] + (["static", "dynamic"] if summary.step_requests else [])
    lines += _totals({name: summary.classes[name] for name in names})
    if summary.operations is not None:
        blocks = "".join(f", {plural(count, 'block')} of class {kind}" for kind, count in summary.blocks.items())
        counts = f"{summary.operations:,} in {plural(summary.modules or 0, 'module')}"
        lines.append(("operations", counts + printable(blocks)))
    return [*lines, *_totals(summary.roles), *(("note", note) for note in note_texts(summary.notes))]


def _totals(totals: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, f"{one.requests:,}, {human_bytes(one.bytes)} in all") for name, one in totals.items()]


def _state_lines(summary: Summary) -> list[tuple[str, str]]:
    reserved = summary.reserved_peak_bytes or 0
    share = 1 - summary.allocated_peak_bytes / reserved if reserved else 0.0
    return [
        ("requests", f"{summary.requests:,} live when the snapshot was taken"),
        ("distinct sizes", f"{summary.distinct_sizes:,}"),
        ("allocated", f"{human_bytes(summary.allocated_peak_bytes)} at that moment"),
        ("reserved", f"{human_bytes(reserved)}, {share:.2%} of it not allocated"),
        ("streams", str(summary.streams)),
        *(("note", note) for note in note_texts(summary.notes)),
    ]
