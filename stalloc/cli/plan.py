"""Decide where every request of a trace lives, and say how close that is to the lower bound.

FILE is a trace of any kind that stalloc reads; `stalloc stats --help` names them. Each device gets a plan of its own.
With -o the plans are written to one file, once the naive validator has passed them; the same trace with the same
options gives the same bytes.

The lower bound is the most bytes that are live at one time, with sizes rounded up to the alignment: a plan whose peak
equals it is optimal. Planning ends when no lower peak is possible, after a fixed effort, or when --time-budget is up.
Ctrl-C ends it at once with the best plan so far, which says so. A request of zero bytes takes no space.
"""

import argparse
import dataclasses
import hashlib
import threading
import time
from pathlib import Path
from typing import Any

from stalloc.cli.csv_places import check_ids, read_fixed, write_csv
from stalloc.cli.interrupt import stop_on_interrupt
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
from stalloc.cli.tables import print_prose, print_table
from stalloc.compiled import compile_time
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.inputs import read_input
from stalloc.notices import say
from stalloc.planner import METHODS, Plan, plan, save_plans, validate
from stalloc.printable import printable
from stalloc.trace import load_traces


@dataclasses.dataclass(frozen=True)
class _Made:
    """The plan of one device of a file."""

    file: str
    plan: Plan
    seconds: float
    notes: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc plan`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to plan")
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plans of the one FILE to PLAN (.plan.npz)")
    parser.add_argument(
        "--align", type=int, default=512, metavar="BYTES", help="every offset is a multiple of this (default: 512)"
    )
    parser.add_argument(
        "--time-budget",
        type=float,
        metavar="SECONDS",
        help="search for up to this long if the plan is not optimal before",
    )
    parser.add_argument(
        "--method", default="auto", metavar="NAME", help=f"how to plan: {', '.join(METHODS)} (default: auto)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (default: 0)")
    parser.add_argument(
        "--fixed", metavar="CSV", help="leave requests of the one FILE where they are: a CSV with the columns id,offset"
    )
    parser.add_argument(
        "--csv", metavar="CSV", help="write the plan of the one FILE as id,lower,upper,size,offset (as minimalloc does)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Plan each file; 1 if the validator refuses a plan, which is an error of stalloc."""
    _check_arguments(args)
    with stop_on_interrupt() as stop:
        return _run(args, stop)


def _run(args: argparse.Namespace, stop: threading.Event) -> int:
    devices: list[_Made] = []
    refused = False
    compiled_before = compile_time().wall_seconds
    for file in args.files:
        with working(f"planning {file_label(file)}"):
            refused |= _plan_file(args, file, stop, devices)
    compiled_here = compile_time().wall_seconds - compiled_before
    if compiled_here > _WORTH_SAYING:
        say(f"compiling for this machine took {compiled_here:.1f} s; the planning times do not include it.")
    written = {name: file for name, file in (("output", args.output), ("csv", args.csv)) if file and not refused}
    write_json(args, {"files": list(args.files), "devices": [_entry(made) | written for made in devices]})
    if wants_text(args):
        _print(args, devices, refused)
    return 1 if refused else 0


def _plan_file(args: argparse.Namespace, file: str, stop: threading.Event, devices: list[_Made]) -> bool:
    """Plan the devices of a file, add them to `devices`, and write what was asked for; True if a plan is refused."""
    plans: list[Plan] = []
    traces, ok = load_traces(file), True
    for trace in traces:
        check_ids(file, trace)
    if (args.csv or args.fixed) and len(traces) > 1:
        raise BadInputError(f"{file} has {len(traces)} devices, --csv and --fixed take one: plan them from Python.")
    for trace in traces:
        fixed = read_fixed(args.fixed, trace) if args.fixed else None
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
        devices.append(_Made(file, made, seconds, list(trace.info.get("notes", []))))
    if args.output and ok:
        digest = hashlib.sha256(read_input(file, "a trace file")).hexdigest()
        save_plans(
            args.output,
            [dataclasses.replace(made, provenance={**made.provenance, "sha256": digest}) for made in plans],
        )
    if args.csv and ok:
        write_csv(args.csv, traces[0], plans[0])
    return not ok


def _check_arguments(args: argparse.Namespace) -> None:
    for option, name in (("-o", args.output), ("--csv", args.csv), ("--fixed", args.fixed)):
        if name is not None and len(args.files) > 1:
            raise BadInputError(f"{option} is for one file, {len(args.files)} were given: plan them one by one.")
    for name, example in ((args.output, "step.plan.npz"), (args.csv, "step.csv")):
        if name is None:
            continue
        output = Path(name)
        if output.is_dir():
            raise BadInputError(f"{output} is a folder: name the file to write, such as {output / example}.")
        if not output.parent.is_dir():
            raise BadInputError(f"the folder {output.parent} of {output} does not exist: make it first.")
        for given in (args.files[0], args.fixed):
            if given is not None and output.exists() and output.resolve() == Path(given).resolve():
                raise BadInputError(f"{output} is the input: name another file to write to.")


def _entry(made: _Made) -> dict[str, Any]:
    """What JSON says of one plan."""
    plan = made.plan
    return {
        "file": made.file,
        "device": plan.device,
        "requests": plan.num_requests,
        "planned_requests": plan.num_planned,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "proven_bound_bytes": max(plan.lower_bound_bytes, plan.proven_bound_bytes),
        "peak_bytes": plan.peak_bytes,
        "optimal": plan.optimal,
        "gap_bytes": plan.gap_bytes,
        "seconds": round(made.seconds, 6),
        "method": plan.method,
        "interrupted": plan.interrupted,
        "kind": plan.kind,
        "prologue_requests": plan.num_prologue,
        "period_requests": len(plan.schedule_row) - plan.num_prologue,
        "notes": made.notes,
    }


_COLUMNS = ("file", "device", "requests", "planned", "lower bound", "peak", "gap", "seconds", "kind")
_WORTH_SAYING = 1.0  # seconds


def _print(args: argparse.Namespace, devices: list[_Made], refused: bool) -> None:
    rows = []
    for made in devices:
        plan, kind, gap = made.plan, made.plan.kind, "none"
        if kind == "program":
            kind += f": {plan.num_prologue:,} once, {len(plan.schedule_row) - plan.num_prologue:,} a period"
        if not plan.optimal:
            gap = f"{human_bytes(plan.gap_bytes)} ({plan.gap_bytes / max(plan.lower_bound_bytes, 1):.2%})"
            if plan.interrupted:
                gap += f", best until {plan.interrupted}"
        figures = human_bytes(plan.lower_bound_bytes), human_bytes(plan.peak_bytes), gap, f"{made.seconds:.3f}"
        counts = str(plan.device), f"{plan.num_requests:,}", f"{plan.num_planned:,}"
        rows.append([file_label(made.file), *counts, *figures, kind])
    console = table_console()
    print_table(console, _COLUMNS, rows)
    for made in devices:
        for note in note_texts(made.notes):
            print_prose(console, f"note: {file_label(made.file)}: {note}", indent="  ")
    if refused:
        return
    if args.csv:
        console.print(f"\nWritten: {printable(args.csv)}")
    if not args.output:
        console.print(f"\nTo keep the plan: stalloc plan {command_text(args.files[0])} -o step.plan.npz")
        return
    console.print(f"\nWritten: {printable(args.output)}")
    if all(made.plan.kind == "program" for made in devices):
        console.print(f"Next: stalloc run --plan {command_text(args.output)} SCRIPT")
    else:
        console.print(f"Next: stalloc validate {command_text(args.output, args.files[0])}")
