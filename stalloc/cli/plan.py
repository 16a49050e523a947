"""Decide where every request of a trace lives, and say how close that is to the lower bound.

FILE is a trace of any kind that stalloc reads; `stalloc stats --help` names them. Each device gets a plan of its own.
With -o the plans are written to one file, once the naive validator has passed them; the same trace with the same
options gives the same bytes.

The lower bound is the most bytes that are live at one time, with sizes rounded up to the alignment: a plan whose peak
equals it is optimal. Planning ends when no lower peak is possible, after a fixed effort, or when --time-budget is up.
Ctrl-C ends it at once with the best plan so far, which says so. A request of zero bytes takes no space.
"""

import argparse
import contextlib
import csv
import dataclasses
import hashlib
import io
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console

from stalloc.cli.output import add_json_argument, command_text, file_label, note_texts, present
from stalloc.cli.progress import working
from stalloc.cli.tables import print_lines, print_table
from stalloc.cli.trace_options import check_output
from stalloc.compiled import compile_time
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.files import write_whole
from stalloc.inputs import read_input
from stalloc.notices import say
from stalloc.planner import METHODS, Plan, plan, save_plans, validate
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces

_COLUMNS = ("file", "device", "requests", "planned", "lower bound", "peak", "gap", "seconds", "kind")
_WORTH_SAYING = 1.0  # seconds
_MAX_DIGITS = 40  # zeros in front of a number do no harm, thousands of digits take time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="trace to plan")
    add("-o", "--output", metavar="PLAN", help="write the plans of the one FILE to PLAN (.plan.npz)")
    add("--align", type=int, default=512, metavar="BYTES", help="every offset is a multiple of this (default: 512)")
    add("--time-budget", type=float, metavar="SECONDS", help="search up to this long if the plan is not optimal before")
    add("--method", default="auto", metavar="NAME", help=f"how to plan: {', '.join(METHODS)} (default: auto)")
    add("--seed", type=int, default=0, metavar="N", help="of the search (default: 0)")
    add("--fixed", metavar="CSV", help="leave requests of the one FILE where they are: a CSV with columns id,offset")
    add("--csv", metavar="CSV", help="write the plan of the one FILE as id,lower,upper,size,offset (like minimalloc)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Plan each file; 1 if the validator refuses a plan, which is an error of stalloc."""
    for option, name in (("-o", args.output), ("--csv", args.csv), ("--fixed", args.fixed)):
        if name is not None and len(args.files) > 1:
            raise BadInputError(f"{option} is for one file, {len(args.files)} were given: plan them one by one.")
    for name, example in ((args.output, "step.plan.npz"), (args.csv, "step.csv")):
        if name is not None:
            check_output(Path(name), example, args.files[0], args.fixed)
    with _stop_on_interrupt() as stop:
        return _run(args, stop)


def _run(args: argparse.Namespace, stop: threading.Event) -> int:
    devices: list[dict[str, Any]] = []
    refused = False
    compiled_before = compile_time().wall_seconds
    for file in args.files:
        with working(f"planning {file_label(file)}"):
            refused |= _plan_file(args, file, stop, devices)
    compiled_here = compile_time().wall_seconds - compiled_before
    if compiled_here > _WORTH_SAYING:
        say(f"compiling for this machine took {compiled_here:.1f} s; the planning times do not include it.")
    written = {name: file for name, file in (("output", args.output), ("csv", args.csv)) if file and not refused}
    result = {"files": list(args.files), "devices": [entry | written for entry in devices]}
    present(args, result, _print, args, devices, refused)
    return 1 if refused else 0


def _plan_file(args: argparse.Namespace, file: str, stop: threading.Event, devices: list[dict[str, Any]]) -> bool:
    """Plan the devices of a file, add them to `devices`, and write what was asked for; True if a plan is refused."""
    plans: list[Plan] = []
    traces, ok = load_traces(file), True
    for trace in traces:
        _check_ids(file, trace)
    if (args.csv or args.fixed) and len(traces) > 1:
        raise BadInputError(f"{file} has {len(traces)} devices, --csv and --fixed take one: plan them from Python.")
    for trace in traces:
        fixed = _read_fixed(args.fixed, trace) if args.fixed else None
        began, compiled = time.perf_counter(), compile_time().wall_seconds
        made = plan(
            trace,
            alignment=args.align,
            fold="never" if args.csv else "auto",
            method=args.method,
            time_budget_seconds=args.time_budget,
            seed=args.seed,
            fixed=fixed,
            stop=stop,
        )
        seconds = max(0.0, time.perf_counter() - began - (compile_time().wall_seconds - compiled))
        verdict = validate(made, trace)
        if not verdict.ok:
            ok = False
            say(
                f"the plan of {file} device {made.device} fails its own validation ({verdict.reason}: "
                f"{verdict.detail}): nothing is written; please report this with the file."
            )
        plans.append(made)
        devices.append(_entry(file, made, seconds, trace.info.get("notes", [])))
    if args.output and ok:
        digest = hashlib.sha256(read_input(file, "a trace file")).hexdigest()
        sourced = [dataclasses.replace(made, provenance={**made.provenance, "sha256": digest}) for made in plans]
        save_plans(args.output, sourced)
    if args.csv and ok:
        _write_csv(args.csv, traces[0], plans[0])
    return not ok


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C in the block sets; the second ends the program. Only in the main thread."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stop.set()
        say("stopping with the best plan so far; Ctrl-C again gives up.")

    signal.signal(signal.SIGINT, first)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _entry(file: str, plan: Plan, seconds: float, notes: Sequence[object]) -> dict[str, Any]:
    return {
        "file": file,
        "device": plan.device,
        "requests": plan.num_requests,
        "planned_requests": plan.num_planned,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "proven_bound_bytes": max(plan.lower_bound_bytes, plan.proven_bound_bytes),
        **{name: getattr(plan, name) for name in ("peak_bytes", "optimal", "gap_bytes")},
        "seconds": round(seconds, 6),
        **{name: getattr(plan, name) for name in ("method", "interrupted", "kind")},
        "prologue_requests": plan.num_prologue,
        "period_requests": len(plan.schedule_row) - plan.num_prologue,
        "notes": list(notes),
    }


def _print(console: Console, args: argparse.Namespace, devices: list[dict[str, Any]], refused: bool) -> None:
    rows = []
    for one in devices:
        kind, gap, bound = one["kind"], "none", one["lower_bound_bytes"]
        if kind == "program":
            kind += f": {one['prologue_requests']:,} once, {one['period_requests']:,} a period"
        if not one["optimal"]:
            gap = f"{human_bytes(one['gap_bytes'])} ({one['gap_bytes'] / max(bound, 1):.2%})"
            gap += f", best until {one['interrupted']}" if one["interrupted"] else ""
        figures = human_bytes(bound), human_bytes(one["peak_bytes"]), gap, f"{one['seconds']:.3f}"
        counts = str(one["device"]), f"{one['requests']:,}", f"{one['planned_requests']:,}"
        rows.append([file_label(one["file"]), *counts, *figures, kind])
    print_table(console, _COLUMNS, rows)
    for one in devices:
        print_lines(console, (f"note: {file_label(one['file'])}: {note}" for note in note_texts(one["notes"])))
    if refused:
        return
    if args.csv:
        console.print(f"\nWritten: {printable(args.csv)}")
    if not args.output:
        console.print(f"\nTo keep the plan: stalloc plan {command_text(args.files[0])} -o step.plan.npz")
        return
    console.print(f"\nWritten: {printable(args.output)}")
    if all(one["kind"] == "program" for one in devices):
        console.print(f"Next: stalloc run --plan {command_text(args.output)} SCRIPT")
    else:
        console.print(f"Next: stalloc validate {command_text(args.output, args.files[0])}")


def _ids(trace: Trace) -> list[Any]:
    """What requests are called in planning CSV: their ids in the file where it has them, else their rows."""
    ids = trace.extra.get("id")
    return list(range(trace.num_requests)) if ids is None else ids.tolist()


def _check_ids(file: str, trace: Trace) -> None:
    seen = set()
    for name in _ids(trace):
        if name in seen:
            raise BadInputError(f"{file}: the id {str(name)[:40]} occurs twice: give every row an id of its own.")
        seen.add(name)


def _read_fixed(file: str, trace: Trace) -> dict[int, int]:
    """Offsets in bytes by row of the trace, from a CSV with the columns id and offset."""
    data = read_input(file, "a CSV with the columns id,offset")
    try:
        lines = list(csv.reader(data.decode("utf-8-sig").splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{file} is not readable as CSV ({error}): save it as plain UTF-8 text.") from error
    header = [name.strip().lower() for name in lines[0]] if lines else []
    if not {"id", "offset"} <= set(header):
        raise BadInputError(f"{file} has no columns id and offset: name them in its first line.")
    row_of = {str(name): row for row, name in enumerate(_ids(trace))}
    fixed: dict[int, int] = {}
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise BadInputError(f"{file}: line {number} has {len(cells)} cells, the header {len(header)}: correct it.")
        name, offset = cells[header.index("id")].strip(), cells[header.index("offset")].strip()
        if name not in row_of:
            raise BadInputError(f"{file}: line {number}: the trace has no id {name[:40]!r}: correct it.")
        if row_of[name] in fixed:
            raise BadInputError(f"{file}: line {number}: the id {name[:40]} occurs twice: keep one of them.")
        if not (offset.isascii() and offset.isdigit()) or len(offset) > _MAX_DIGITS:
            raise BadInputError(f"{file}: line {number}: offset is {offset[:40]!r}, expected a whole number from 0.")
        fixed[row_of[name]] = int(offset)
    return fixed


def _write_csv(file: str, trace: Trace, made: Plan) -> None:
    """Write the plan as id,lower,upper,size,offset, one line a request."""
    shift = -min(int(trace.start.min(initial=0)), 0)  # what was live before recording starts at -1
    columns = (trace.start + shift, trace.end + shift, trace.size, made.offset)
    rows = np.stack(columns, axis=1).tolist()
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", "lower", "upper", "size", "offset"])
    writer.writerows([name, *row] for name, row in zip(_ids(trace), rows, strict=True))
    write_whole(file, text.getvalue(), "choose another file for --csv")
