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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from stalloc.analysis import Summary, summarize
from stalloc.cli.input_names import expand_patterns
from stalloc.cli.output import (
    add_json_argument,
    command_text,
    file_label,
    note_texts,
    table_console,
    wants_text,
    write_json,
)
from stalloc.cli.progress import working
from stalloc.cli.stats_ranks import MOST_APART, run_ranks
from stalloc.cli.tables import print_items, print_prose
from stalloc.cost.gpu_rates import rates_of
from stalloc.cost.step_seconds import StepEstimate
from stalloc.device import find_gpu
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.lifespans import Reordered, find_steady_step, last_repetition, reorder
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces
from stalloc.trace.operations import read_operations
from stalloc.writers.lifespan_graph import Relations, relations, write_relations

_MAX_CUTS_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc stats`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to describe, or a quoted pattern")
    parser.add_argument(
        "--ranks", action="store_true", help="compare the files as ranks of one job (default from 9 files)"
    )
    parser.add_argument(
        "--align", type=int, default=512, metavar="BYTES", help="sizes are rounded up to this (default: 512)"
    )
    parser.add_argument("--gpu", metavar="NAME", help="estimate what the last recorded step takes on this GPU")
    parser.add_argument(
        "--order", action="store_true", help="look for an order of the last step's operations that needs less memory"
    )
    parser.add_argument("--graph", metavar="FILE", help="write the graph of lifespans (.graphml or JSON) to FILE")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Describe each device of each file."""
    if args.align < 1:
        raise BadInputError(f"--align is {args.align}: give a number of bytes from 1, such as 512.")
    args.files = expand_patterns(args.files)
    if args.graph and len(args.files) > 1:
        raise BadInputError(f"--graph is for one file, {len(args.files)} were given: describe them one by one.")
    of_each = next((name for name in ("graph", "order", "gpu") if getattr(args, name)), None)
    if args.ranks and of_each:
        raise BadInputError(f"--{of_each} describes each file by itself: leave --ranks out.")
    if args.ranks or (len(args.files) > MOST_APART and not of_each):
        return run_ranks(args)
    with working(f"describing {plural(len(args.files), 'file')}"):
        traces = [(file, trace) for file in args.files for trace in load_traces(file, history=False)]
        devices = [(file, summarize(trace, args.align)) for file, trace in traces]
        steps = [_step(args, trace) for _, trace in traces]
        orders = [_order(args, trace) for _, trace in traces]
        graphs = [relations(trace) for _, trace in traces] if args.graph else []
    if args.graph:
        write_relations(Path(args.graph), graphs)
    told = [
        {"file": file}
        | asdict(summary)
        | ({"step_estimate": _step_entry(step)} if args.gpu else {})
        | ({"operation_order": _order_entry(order)} if args.order else {})
        | ({"pinned_host": trace.info["pinned_host"]} if "pinned_host" in trace.info else {})
        for (file, summary), (_, trace), step, order in zip(devices, traces, steps, orders, strict=True)
    ]
    write_json(args, {"files": list(args.files), "devices": told})
    if wants_text(args):
        more = [
            ([_step_line(args, step)] if args.gpu else []) + ([_order_line(order)] if args.order else [])
            for step, order in zip(steps, orders, strict=True)
        ]
        _print(devices, more)
        _print_graphs(args, graphs)
        _print_next(args, [summary for _, summary in devices])
    return 0


def _step(args: argparse.Namespace, trace: Trace) -> StepEstimate | None:
    """How long a step takes, if a GPU was named and the record has operations."""
    if not args.gpu:
        return None
    from stalloc.cost.step_seconds import estimate_step

    return estimate_step(trace, rates_of(find_gpu(args.gpu).name))


def _step_entry(step: StepEstimate | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "seconds": step.seconds,
        "error": step.error,
        "measured": step.measured,
        "by_class": step.by_class,
        "is_estimate": True,
    }


def _step_line(args: argparse.Namespace, step: StepEstimate | None) -> tuple[str, str]:
    gpu = find_gpu(args.gpu).name
    if step is None:
        return ("est. step", f"not known on {gpu}: the file has no whole step with operations (stalloc record --ops)")
    shares = ", ".join(f"{kind} {seconds / step.seconds:.0%}" for kind, seconds in list(step.by_class.items())[:4])
    measured = f", {step.measured:.0%} measured" if step.measured else ""
    return ("est. step", f"{1e3 * step.seconds:.1f} ms ± {step.error:.0%} on {gpu}{measured}: {shares}")


@dataclass(frozen=True)
class _Order:
    """Another order of a step's operations, and the memory that a plan of each order takes."""

    found: Reordered
    planned_bytes: int
    program_planned_bytes: int


def _order(args: argparse.Namespace, trace: Trace) -> _Order | None:
    """Another order of the last step's operations, if that was asked for and the record has operations."""
    operations = read_operations(trace) if args.order else None
    if operations is None:
        return None
    step = find_steady_step(trace, operations) or last_repetition(trace, operations)
    if step is None:
        return None
    from stalloc.planner import plan

    found = reorder(trace, operations, step)
    planned = [plan((one.start, one.end, one.size)) for one in (found.lifespans, found.program_lifespans)]
    return _Order(found, *(one.peak_bytes for one in planned))


def _order_entry(order: _Order | None) -> dict[str, int] | None:
    if order is None:
        return None
    return {
        "peak_bytes": order.found.peak_bytes,
        "early_peak_bytes": order.found.early_peak_bytes,
        "program_peak_bytes": order.found.program_peak_bytes,
        "planned_bytes": order.planned_bytes,
        "program_planned_bytes": order.program_planned_bytes,
        "num_moved": order.found.num_moved,
        "num_operations": len(order.found.order),
    }


def _order_line(order: _Order | None) -> tuple[str, str]:
    if order is None:
        return ("order", "not known: the file has no whole step with operations (stalloc record --ops)")
    found = order.found
    told, early, least = map(human_bytes, (found.program_peak_bytes, found.early_peak_bytes, found.peak_bytes))
    line = f"{told} allocated in the last step"
    if early != told:
        line += f", {early} if all were freed after their last use"
    if least == early or order.planned_bytes >= order.program_planned_bytes:
        return ("order", f"{line}; no order was found that needs less")
    moved = f"{found.num_moved:,} of {len(found.order):,} operations follow another one"
    laid_out = f"a plan of {human_bytes(order.planned_bytes)} in place of {human_bytes(order.program_planned_bytes)}"
    return ("order", f"{line}; {least} in another order that keeps every dependency ({moved}), {laid_out}")


def _print(devices: list[tuple[str, Summary]], more: list[list[tuple[str, str]]]) -> None:
    console = table_console()
    for (file, summary), lines in zip(devices, more, strict=True):
        name, source = file_label(file), printable(summary.source)
        print_prose(console, Text.assemble((name, "bold"), f", device {summary.device}, {source}"))
        print_items(console, _lines(summary) + lines)
        console.print()


def _print_graphs(args: argparse.Namespace, graphs: list[Relations]) -> None:
    console = table_console()
    for told in graphs:
        cuts = ", ".join(f"{event:,}" for event in told.cut_events[:_MAX_CUTS_SHOWN])
        more = f" and {len(told.cut_events) - _MAX_CUTS_SHOWN:,} more" if told.cut_events[_MAX_CUTS_SHOWN:] else ""
        console.print(
            f"device {told.device}: {len(told.graph):,} groups, {told.graph.number_of_edges():,} overlaps; "
            f"can be split before event {cuts}{more}"
            if cuts
            else f"device {told.device}: cannot be split"
        )
    if graphs:
        console.print(f"\nWritten: {printable(args.graph)}")


def _print_next(args: argparse.Namespace, summaries: list[Summary]) -> None:
    """Print the next question: why it failed, why so much is reserved at one moment, or else how it could be placed."""
    asks_why = any(summary.out_of_memory_event is not None or not summary.has_history for summary in summaries)
    table_console().print(f"Next: stalloc {'explain' if asks_why else 'plan'} {command_text(args.files[0])}")


def _lines(summary: Summary) -> list[tuple[str, str]]:
    if not summary.has_history:
        return _state_lines(summary)
    before = f", {summary.baseline_requests:,} live before recording" if summary.baseline_requests else ""
    lines = [
        ("requests", f"{summary.requests:,} in {summary.events:,} events{before}"),
        ("distinct sizes", f"{summary.distinct_sizes:,}"),
        ("lower bound", human_bytes(summary.lower_bound_bytes)),
        (
            "allocated peak",
            f"{human_bytes(summary.allocated_peak_bytes)} at event {summary.allocated_peak_event:,}, "
            f"{human_bytes(summary.allocated_peak_requested_bytes)} as requested",
        ),
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
    for name in names:
        total = summary.classes[name]
        lines.append((name, f"{total.requests:,}, {human_bytes(total.bytes)} in all"))
    if summary.operations is not None:
        blocks = "".join(f", {plural(count, 'block')} of class {kind}" for kind, count in summary.blocks.items())
        lines.append(
            ("operations", f"{summary.operations:,} in {plural(summary.modules or 0, 'module')}{printable(blocks)}")
        )
    for name, total in summary.roles.items():
        lines.append((name, f"{total.requests:,}, {human_bytes(total.bytes)} in all"))
    return lines + [("note", note) for note in note_texts(summary.notes)]


def _state_lines(summary: Summary) -> list[tuple[str, str]]:
    """The lines about a snapshot of one moment, each as label and text."""
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
