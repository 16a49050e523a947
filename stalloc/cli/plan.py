"""Decide where every request of a trace lives, and say how close that is to the lower bound.

FILE is a trace of any kind that stalloc reads; `stalloc stats --help` names them. Each device gets a plan of its own.
With -o the plans are written to one file, after the naive validator has passed them; the same trace with the same
options gives the same bytes.

The lower bound is the most bytes that are live at one time, with sizes rounded up to the alignment: a plan whose peak
equals it is optimal.
"""

import argparse
import dataclasses
import hashlib
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stalloc.cli.output import add_json_argument, human_bytes, wants_text, write_json
from stalloc.errors import BadInputError
from stalloc.planner import Plan, plan, save_plans, validate
from stalloc.trace import load_traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc plan`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to plan")
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plans of the one FILE to PLAN (.plan.npz)")
    parser.add_argument(
        "--align", type=int, default=512, metavar="BYTES", help="every offset is a multiple of this (default: 512)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Plan each file; 1 if the validator refuses a plan, which is an error of stalloc."""
    _check_arguments(args)
    devices: list[dict[str, Any]] = []
    refused = False
    for file in args.files:
        plans: list[Plan] = []
        for trace in load_traces(file):
            began = time.perf_counter()
            made = plan(trace, alignment=args.align)
            seconds = time.perf_counter() - began
            verdict = validate(made, trace)
            if not verdict.ok:
                refused = True
                print(
                    f"stalloc: the plan of {file} device {made.device} fails its own validation ({verdict.reason}: "
                    f"{verdict.detail}): nothing is written; please report this with the file.",
                    file=sys.stderr,
                )
            plans.append(made)
            devices.append(_entry(file, made, seconds))
        if args.output and not refused:
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            save_plans(
                args.output,
                [dataclasses.replace(made, provenance={**made.provenance, "sha256": digest}) for made in plans],
            )
            for entry in devices:
                entry["output"] = args.output
    write_json(args, {"files": list(args.files), "devices": devices})
    if wants_text(args):
        _print(args, devices, refused)
    return 1 if refused else 0


def _check_arguments(args: argparse.Namespace) -> None:
    if args.output is None:
        return
    if len(args.files) > 1:
        raise BadInputError(f"-o takes the plans of one file, {len(args.files)} were given: plan them one by one.")
    output = Path(args.output)
    if output.is_dir():
        raise BadInputError(f"{output} is a folder: name the plan file to write, such as {output / 'step.plan.npz'}.")
    if not output.parent.is_dir():
        raise BadInputError(f"the folder {output.parent} of {output} does not exist: make it first.")
    if output.exists() and output.resolve() == Path(args.files[0]).resolve():
        raise BadInputError(f"{output} is the trace itself: name another file for the plan.")


def _entry(file: str, made: Plan, seconds: float) -> dict[str, Any]:
    """What JSON and the table say of one plan."""
    return {
        "file": file,
        "device": made.device,
        "requests": made.num_requests,
        "planned_requests": made.num_planned,
        "lower_bound_bytes": made.lower_bound_bytes,
        "peak_bytes": made.peak_bytes,
        "optimal": made.optimal,
        "gap_bytes": made.gap_bytes,
        "seconds": round(seconds, 6),
        "method": made.method,
        "kind": made.kind,
        "prologue_requests": made.num_prologue,
        "period_requests": len(made.tape_row) - made.num_prologue,
    }


def _print(args: argparse.Namespace, devices: list[dict[str, Any]], refused: bool) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("file", "device", "requests", "planned", "lower bound", "peak", "gap", "seconds", "kind"):
        table.add_column(name, justify="left" if name in ("file", "gap", "kind") else "right", no_wrap=True)
    for entry in devices:
        kind = str(entry["kind"])
        if kind == "program":
            kind += f": {entry['prologue_requests']:,} once, {entry['period_requests']:,} a period"
        gap = "none"
        if not entry["optimal"]:
            share = entry["gap_bytes"] / max(entry["lower_bound_bytes"], 1)
            gap = f"{human_bytes(entry['gap_bytes'])} ({share:.2%})"
        table.add_row(
            escape(Path(entry["file"]).name),
            str(entry["device"]),
            f"{entry['requests']:,}",
            f"{entry['planned_requests']:,}",
            human_bytes(entry["lower_bound_bytes"]),
            human_bytes(entry["peak_bytes"]),
            gap,
            f"{entry['seconds']:.3f}",
            kind,
        )
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no edge
    console.print(table)
    if refused:
        return
    if not args.output:
        console.print(f"\nTo keep the plan: stalloc plan {escape(shlex.quote(args.files[0]))} -o step.plan.npz")
        return
    console.print(f"\nWritten: {escape(args.output)}")
    if all(entry["kind"] == "program" for entry in devices):
        console.print(f"Next: stalloc run --plan {escape(shlex.quote(args.output))} SCRIPT")
    else:
        console.print(f"Next: stalloc validate {escape(shlex.join([args.output, args.files[0]]))}")
