"""Say what grew from one trace to another, by class, call site and size; or fail if one outgrows a limit or baseline.

  stalloc diff before.trace.npz after.trace.npz
  stalloc diff --check step.trace.npz --max 20GiB --baseline memory.json

A TRACE is of any kind that stalloc reads; `stalloc stats --help` names them. Devices are compared by number; two files
of one device each are compared whatever their numbers.

Allocated counts every request from alloc to free_completed, with sizes rounded up to 512 bytes, as `stalloc stats`
does. Files are compared at their allocated peaks; the changes of every list add up to the change of the peak.
Persistent requests live across steps, transient ones end in the phase in which they began, scoped ones are all others.
A call site is the innermost line outside PyTorch; a function with one changed line in each file is one site.

--fail-over makes it a guard for CI: the exit code is 1 if the allocated peak of any device grew by more. Reserved is
only shown, since it depends on what the pool did before.

--check is a guard for CI without a second trace: it judges the allocated peak of each device, and names the call sites
and classes that grew. The baseline is a JSON file to commit, the same kind as of the pytest plugin (docs/guard.md);
--update writes what was measured to it. An entry is named after its file, with the device if the file has several, or
by --name. --junit writes a report that CI systems show; on GitHub, failures are annotations at the lines that grew. The
exit code is 1 if a check failed.

JSON: `first`, `second`, `fail_over`, `notes`, `grew_too_much`, and for each of `devices`: `first` and `second`
(`device`, `source`, `allocated_peak_bytes`, `allocated_peak_event`, `allocated_peak_requests`, `reserved_peak_bytes`),
`allocated_change_bytes`, `reserved_change_bytes`, `allowed_change_bytes`, `grew_too_much`, and the lists `by_class`,
`by_site` and `by_size`, whole and what grew most first, of `name`, `first_bytes`, `second_bytes`, `first_requests`,
`second_requests`, `change_bytes`. With --check, for each of `entries` the `name`, `device`, `allocated_peak_bytes`,
`reserved_peak_bytes`, `limit_bytes`, `baseline_bytes`, and `failure`. What is not known, or not there, is null.
"""

import argparse
import dataclasses
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from stalloc.analysis import Change, Comparison, compare
from stalloc.cli.output import add_json_argument, add_top_argument, command_text, file_label, note_texts, present
from stalloc.cli.progress import working
from stalloc.cli.shared_options import refuse_typed
from stalloc.cli.tables import print_prose, print_table
from stalloc.cli.trace_options import of_device
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.files import write_whole
from stalloc.guard import judgement
from stalloc.guard.judgement import Baseline, Finding, GrowthLimit, Measured, measure, size_text
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces
from stalloc.trace.sites import Frame, read_sites, site_name, user_frames
from stalloc.version import other_release

_Judged = tuple[Trace, Measured, Finding | None]
_OF_CHECK = ("max", "baseline", "update", "tolerance", "name", "junit", "github")  #: that are of --check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="TRACE", help="the trace to compare with, and the one that may have grown")
    add("--device", type=int, metavar="N", help="compare this device only (default: all)")
    add_top_argument(parser, 10)
    add("--fail-over", metavar="GROWTH", help="exit code 1 if allocated grew by more: 5%% or 200MiB")
    _add_check_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compare two files, or judge each; 1 if too much was allocated."""
    if args.check:
        refuse_typed(args, "does not go with --check", "device", "top", "fail_over")
        return _check(args)
    refuse_typed(args, "is of --check: give that too", *_OF_CHECK)
    if len(args.files) != 2:
        raise BadInputError(f"two traces are compared, and {len(args.files)} given: with --check each is judged alone.")
    args.first, args.second = args.files
    limit = None if args.fail_over is None else judgement.growth_limit("--fail-over", args.fail_over)
    with working(f"comparing {file_label(args.first)} and {file_label(args.second)}"):
        pairs, notes = _pairs(args)
        devices = [compare(first, second) for first, second in pairs]
    failed = any(_grew_too_much(made, limit) for made in devices)
    result = {"first": args.first, "second": args.second, "fail_over": args.fail_over, "notes": notes}
    result |= {"devices": [_entry(made, limit) for made in devices], "grew_too_much": failed}
    present(args, result, _print, args, devices, limit, notes)
    return 1 if failed else 0


def _grew_too_much(made: Comparison, limit: GrowthLimit | None) -> bool:
    return limit is not None and limit.is_exceeded(made.first.allocated_peak_bytes, made.second.allocated_peak_bytes)


def _pairs(args: argparse.Namespace) -> tuple[list[tuple[Trace, Trace]], list[str]]:
    first, second = (of_device(file, load_traces(file), args.device) for file in (args.first, args.second))
    notes = []
    for file, traces in ((args.first, first), (args.second, second)):
        told = dict.fromkeys(str(note) for trace in traces for note in trace.info.get("notes", []))
        notes += [f"{file_label(file)}: {note}" for note in told]
    releases = [next((t.info["torch"] for t in traces if "torch" in t.info), None) for traces in (first, second)]
    warning = other_release(f"{file_label(args.first)} was recorded with", releases[0], releases[1])
    if warning:
        notes.append(f"{warning}: {file_label(args.second)} is of that one")
    if len(first) == len(second) == 1:
        return [(first[0], second[0])], notes
    of_first, of_second = ({trace.device: trace for trace in traces} for traces in (first, second))
    for file, only in ((args.first, of_first.keys() - of_second), (args.second, of_second.keys() - of_first)):
        if only:
            notes.append(f"only {file_label(file)} has device {', '.join(map(str, sorted(only)))}")
    both = sorted(of_first.keys() & of_second)
    if not both:
        raise BadInputError(f"{args.first} and {args.second} have no device in common: give files of the same devices.")
    return [(of_first[device], of_second[device]) for device in both], notes


def _entry(made: Comparison, limit: GrowthLimit | None) -> dict[str, Any]:
    def rows(changes: list[Change]) -> list[dict[str, Any]]:
        return [dataclasses.asdict(change) | {"change_bytes": change.change_bytes} for change in changes]

    return {
        "first": dataclasses.asdict(made.first),
        "second": dataclasses.asdict(made.second),
        "allocated_change_bytes": made.allocated_change_bytes,
        "reserved_change_bytes": made.reserved_change_bytes,
        "allowed_change_bytes": limit.allowed_bytes(made.first.allocated_peak_bytes) if limit else None,
        "grew_too_much": _grew_too_much(made, limit),
        "by_class": rows(made.by_class),
        "by_site": rows(made.by_site),
        "by_size": rows(made.by_size),
    }


def _print(
    console: Console,
    args: argparse.Namespace,
    devices: list[Comparison],
    limit: GrowthLimit | None,
    notes: list[str],
) -> None:
    for made in devices:
        numbers = " and ".join(map(str, dict.fromkeys((made.first.device, made.second.device))))
        files = f": A is {printable(args.first)}, B is {printable(args.second)}"
        print_prose(console, Text.assemble((f"device {numbers}", "bold"), files))
        _print_peaks(console, made)
        for name, changes in (("class", made.by_class), ("site", made.by_site), ("size", made.by_size)):
            _print_list(console, name, changes, args.top)
        if limit and _grew_too_much(made, limit):
            grew = f"allocated grew by {human_bytes(made.allocated_change_bytes)}"
            allowed = human_bytes(limit.allowed_bytes(made.first.allocated_peak_bytes))
            rest = f", more than the {allowed} that --fail-over {printable(args.fail_over)} allows"
            console.print(Text.assemble((grew, "bold red"), rest))
        console.print()
    for note in note_texts(notes):
        print_prose(console, note, lead=Text("note  ", "dim"))
    console.print(f"Next: stalloc explain {command_text(args.second)}")


def _print_peaks(console: Console, made: Comparison) -> None:
    rows = []
    first, second = made.first, made.second
    for name, before, after, change in (
        ("allocated", first.allocated_peak_bytes, second.allocated_peak_bytes, made.allocated_change_bytes),
        ("reserved", first.reserved_peak_bytes, second.reserved_peak_bytes, made.reserved_change_bytes),
    ):
        shown = "" if change is None else _signed(change)
        if change and before:
            shown += f" ({change / before:+.2%})"
        values = ("not recorded" if value is None else human_bytes(value) for value in (before, after))
        rows.append([name, *values, shown])
    print_table(console, ("peak", "A", "B", "change"), rows)


def _print_list(console: Console, name: str, changes: list[Change], top: int) -> None:
    """The lines that changed, what grew most first; what shrank most has its place at the end."""
    changed = [row for row in changes if row.change_bytes or row.first_requests != row.second_requests]
    if not top or not changes:
        return
    if not changed:
        console.print(f"by {name}: no change")
        return
    grown = [row for row in changed if row.change_bytes >= 0][:top]
    shrunk = [row for row in changed if row.change_bytes < 0]
    shown = grown + (shrunk[-(top - len(grown)) :] if len(grown) < top else [])
    rows = []
    for row in shown:
        sizes = human_bytes(row.first_bytes), human_bytes(row.second_bytes), _signed(row.change_bytes)
        rows.append([row.name, *sizes, f"{row.first_requests:,} → {row.second_requests:,}"])
    print_table(console, (f"by {name}", "A", "B", "change", "requests"), rows)
    if len(shown) < len(changed):
        rest = sum(row.change_bytes for row in changed) - sum(row.change_bytes for row in shown)
        console.print(f"  {len(changed) - len(shown):,} more, {_signed(rest)} together")


def _signed(num_bytes: int) -> str:
    return "0 B" if not num_bytes else f"{'+' if num_bytes > 0 else '-'}{human_bytes(abs(num_bytes))}"


def _add_check_arguments(whole: argparse.ArgumentParser) -> None:
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


def _check(args: argparse.Namespace) -> int:
    """Judge each device of each file; 1 if one needs too much."""
    if not args.max and not args.baseline:
        raise BadInputError("nothing to check against: give --max 20GiB, --baseline FILE or both.")
    for option in ("update", "tolerance"):
        if getattr(args, option) and not args.baseline:
            raise BadInputError(f"--{option} needs a baseline: give --baseline FILE too.")
    limit, baseline = memory_option("--max", args.max) if args.max else None, None
    if args.baseline:
        baseline = judgement.load_baseline(args.baseline, args.tolerance, must_exist=not args.update)
    if args.name and len(args.files) > 1:
        raise BadInputError(f"--name takes one file: {len(args.files)} were given.")
    judged: list[_Judged] = []
    for trace, measured in _measured(args):
        finding = None if limit is None or args.update else judgement.over_limit(measured, limit, f"--max {args.max}")
        before = _entry_of(baseline, measured)
        if finding is None and before is not None and baseline is not None and not args.update:
            finding = judgement.over_baseline(measured, before, baseline.tolerance)
        judged.append((trace, measured, finding))
    if args.update and baseline is not None:
        judgement.save_baseline(args.baseline, baseline.updated(measured for _, measured, _ in judged))
    if args.junit:
        _write_junit(args.junit, judged)
    result = {"entries": [_check_entry(measured, finding, limit, baseline) for _, measured, finding in judged]}
    present(args, result, _print_judged, args, judged, baseline)
    return int(any(finding is not None for _, _, finding in judged))


def _measured(args: argparse.Namespace) -> Iterator[tuple[Trace, Measured]]:
    names: set[str] = set()
    for file in args.files:
        traces = load_traces(file)
        for trace in traces:
            name = (args.name or file_label(file)) + (f", device {trace.device}" if len(traces) > 1 else "")
            if name in names:
                raise BadInputError(f"two of the files are called {name}: check them one by one, with --name.")
            names.add(name)
            yield trace, measure(name, [trace], trace_file=file if os.path.isfile(file) else "")


def _entry_of(baseline: Baseline | None, measured: Measured) -> Any:
    return baseline.entries.get(measured.name) if baseline is not None else None


def _check_entry(
    measured: Measured, finding: Finding | None, limit: int | None, baseline: Baseline | None
) -> dict[str, Any]:
    before = _entry_of(baseline, measured)
    return {
        "name": measured.name,
        "device": measured.use.device,
        "allocated_peak_bytes": measured.use.allocated_peak_bytes,
        "reserved_peak_bytes": measured.use.reserved_peak_bytes,
        "limit_bytes": limit,
        "baseline_bytes": before.allocated_peak_bytes if before is not None else None,
        "failure": finding.text(measured) if finding is not None else None,
    }


def _print_judged(console: Console, args: argparse.Namespace, judged: list[_Judged], baseline: Baseline | None) -> None:
    rows = []
    for _, measured, finding in judged:
        before = _entry_of(baseline, measured)
        accepted = "not in it" if before is None else size_text(before.allocated_peak_bytes)
        sizes = size_text(measured.use.allocated_peak_bytes), accepted, size_text(measured.use.reserved_peak_bytes)
        rows.append([measured.name, *sizes, "fails" if finding is not None else "written" if args.update else "fine"])
    columns = ["entry", "allocated", "baseline", "reserved", "result"]
    if baseline is None:
        for row in (columns, *rows):
            del row[2]
    print_table(console, columns, rows)
    for trace, measured, finding in judged:
        if finding is not None:
            console.print(finding.text(measured))
            if args.github:
                console.print(_annotation(trace, measured, finding))
    if args.update:
        console.print(f"wrote {plural(len(judged), 'device')} to {command_text(args.baseline)}; commit it")
    elif baseline is not None and any(measured.name not in baseline.entries for _, measured, _ in judged):
        console.print("what is not in the baseline is not judged by it: --update writes it")


def _write_junit(file: str, judged: Sequence[_Judged]) -> None:
    """Write one test case an entry. Raises BadInputError if it cannot be written."""
    failures = sum(finding is not None for _, _, finding in judged)
    suites = ET.Element("testsuites")
    counts = {"name": "stalloc", "tests": str(len(judged)), "failures": str(failures), "errors": "0"}
    suite = ET.SubElement(suites, "testsuite", counts)
    for _, measured, finding in judged:
        case = ET.SubElement(suite, "testcase", classname="stalloc.check", name=printable(measured.name), time="0")
        properties = ET.SubElement(case, "properties")
        for name in ("allocated_peak_bytes", "reserved_peak_bytes"):
            if (value := getattr(measured.use, name)) is not None:
                ET.SubElement(properties, "property", name=name, value=str(value))
        if finding is not None:
            ET.SubElement(case, "failure", message=finding.headline).text = finding.text(measured)
    ET.indent(suites)
    write_whole(file, ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n", "name another for --junit")


def _annotation(trace: Trace, measured: Measured, finding: Finding) -> str:
    place = _place(trace, finding.sites)
    where = "" if place is None else f"file={_property(place[0])},line={place[1]},"
    title = _property(f"GPU memory of {measured.name}")
    return f"::error {where}title={title}::{_escaped(finding.text(measured))}"


def _place(trace: Trace, names: Sequence[str]) -> tuple[str, int] | None:
    """The file, as seen from here, and the line of the first call site that is known by more than its name."""
    sites = read_sites(trace)
    if sites is None:
        return None
    frames: dict[str, Frame] = {}
    for number in range(sites.num_stacks):
        for frame in user_frames(sites.stack(number))[:1]:
            frames.setdefault(site_name([frame]), frame)
    found = next((frames[name] for name in names if name in frames), None)
    if found is None or not found.line:
        return None
    return found.filename.removeprefix(os.getcwd() + os.sep), found.line


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(printable(text, 200)).replace(":", "%3A").replace(",", "%2C")
