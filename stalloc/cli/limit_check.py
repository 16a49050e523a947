"""`stalloc diff --check`: traces judged by a limit and by a committed baseline, without a second trace."""

import argparse
import os
from collections.abc import Iterator
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.check_outputs import annotation, write_junit
from stalloc.cli.output import command_text, file_label, table_console, wants_text, write_json
from stalloc.cli.tables import print_table
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError
from stalloc.figures import plural
from stalloc.guard.baseline import Baseline, load_baseline, save_baseline
from stalloc.guard.judgement import Finding, over_baseline, over_limit
from stalloc.guard.measured import Measured, measure, size_text
from stalloc.trace import Trace, load_traces

Judged = tuple[Trace, Measured, Finding | None]


OPTIONS = ("max", "baseline", "update", "tolerance", "name", "junit", "github")  #: that are of --check


def add_check_arguments(whole: argparse.ArgumentParser) -> None:
    """Declare --check and the options that go with it."""
    parser = whole.add_argument_group("guard by a limit or a baseline")
    parser.add_argument("--check", action="store_true", help="judge each TRACE by --max, --baseline or both")
    parser.add_argument("--max", metavar="SIZE", help="the most that may be allocated at once, such as 20GiB")
    parser.add_argument("--baseline", metavar="FILE", help="the JSON file with the accepted figures")
    parser.add_argument("--update", action="store_true", help="write what is measured to the baseline instead")
    parser.add_argument("--tolerance", metavar="GROWTH", help="allowed growth over the baseline: 5%% or 200MiB")
    parser.add_argument("--name", metavar="NAME", help="the name of the entry (default: that of the file)")
    parser.add_argument("--junit", metavar="FILE", help="write a JUnit report")
    parser.add_argument(
        "--github",
        action="store_true",
        default=os.environ.get("GITHUB_ACTIONS") == "true",
        help="print annotations for GitHub (the default where GITHUB_ACTIONS is true)",
    )


def check(args: argparse.Namespace) -> int:
    """Judge each device of each file."""
    limit, baseline = _allowed(args)
    if args.name and len(args.files) > 1:
        raise BadInputError(f"--name takes one file: {len(args.files)} were given.")
    judged = [
        (trace, measured, None if args.update else _judge(measured, limit, baseline, args.max))
        for trace, measured in _measured(args)
    ]
    if args.update and baseline is not None:
        save_baseline(args.baseline, baseline.updated(measured for _, measured, _ in judged))
    write_json(args, {"entries": [_entry(measured, finding, limit, baseline) for _, measured, finding in judged]})
    if args.junit:
        write_junit(args.junit, [(measured, finding) for _, measured, finding in judged])
    if wants_text(args):
        _print(args, judged, baseline)
    return EXIT_CHECK_FAILED if any(finding is not None for _, _, finding in judged) else EXIT_DONE


def _allowed(args: argparse.Namespace) -> tuple[int | None, Baseline | None]:
    if not args.max and not args.baseline:
        raise BadInputError("nothing to check against: give --max 20GiB, --baseline FILE or both.")
    for option in ("update", "tolerance"):
        if getattr(args, option) and not args.baseline:
            raise BadInputError(f"--{option} needs a baseline: give --baseline FILE too.")
    limit = memory_option("--max", args.max) if args.max else None
    if not args.baseline:
        return limit, None
    return limit, load_baseline(args.baseline, args.tolerance, must_exist=not args.update)


def _measured(args: argparse.Namespace) -> Iterator[tuple[Trace, Measured]]:
    names: set[str] = set()
    for file in args.files:
        traces = load_traces(file)
        for trace in traces:
            name = (args.name or file_label(file)) + (f", device {trace.device}" if len(traces) > 1 else "")
            if name in names:
                raise BadInputError(f"two of the files are called {name}: check them one by one, with --name.")
            names.add(name)
            trace_file = file if os.path.isfile(file) else ""
            yield trace, measure(name, [trace], trace_file=trace_file)


def _judge(measured: Measured, limit: int | None, baseline: Baseline | None, limit_text: str) -> Finding | None:
    finding = None if limit is None else over_limit(measured, limit, f"--max {limit_text}")
    before = baseline.entries.get(measured.name) if baseline is not None else None
    if finding is None and baseline is not None and before is not None:
        finding = over_baseline(measured, before, baseline.tolerance)
    return finding


def _entry(measured: Measured, finding: Finding | None, limit: int | None, baseline: Baseline | None) -> dict[str, Any]:
    before = baseline.entries.get(measured.name) if baseline is not None else None
    return {
        "name": measured.name,
        "device": measured.use.device,
        "allocated_peak_bytes": measured.use.allocated_peak_bytes,
        "reserved_peak_bytes": measured.use.reserved_peak_bytes,
        "limit_bytes": limit,
        "baseline_bytes": before.allocated_peak_bytes if before is not None else None,
        "failure": finding.text(measured) if finding is not None else None,
    }


def _print(args: argparse.Namespace, judged: list[Judged], baseline: Baseline | None) -> None:
    console = table_console()
    rows = []
    for _, measured, finding in judged:
        before = baseline.entries.get(measured.name) if baseline is not None else None
        rows.append(
            [
                measured.name,
                size_text(measured.use.allocated_peak_bytes),
                "not in it" if before is None else size_text(before.allocated_peak_bytes),
                size_text(measured.use.reserved_peak_bytes),
                "fails" if finding is not None else "written" if args.update else "fine",
            ]
        )
    columns = ["entry", "allocated", "baseline", "reserved", "result"]
    if baseline is None:
        columns.pop(2)
        for row in rows:
            row.pop(2)
    print_table(console, columns, rows)
    for trace, measured, finding in judged:
        if finding is not None:
            console.print(finding.text(measured))
            if args.github:
                console.print(annotation(trace, measured, finding))
    if args.update:
        console.print(f"wrote {plural(len(judged), 'device')} to {command_text(args.baseline)}; commit it")
    elif baseline is not None and any(measured.name not in baseline.entries for _, measured, _ in judged):
        console.print("what is not in the baseline is not judged by it: --update writes it")
