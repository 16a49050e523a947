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
from typing import Any

from rich.console import Console
from rich.text import Text

from stalloc.analysis import Change, Comparison, compare
from stalloc.cli.convert import of_device
from stalloc.cli.limit_check import OPTIONS, add_check_arguments, check
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
from stalloc.cli.shared_options import refuse_typed
from stalloc.cli.tables import print_prose, print_table
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.guard.growth_limit import GrowthLimit, growth_limit
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces
from stalloc.version import other_release


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc diff`."""
    parser.add_argument(
        "files", nargs="+", metavar="TRACE", help="the trace to compare with, and the one that may have grown"
    )
    parser.add_argument("--device", type=int, metavar="N", help="compare this device only (default: all)")
    add_top_argument(parser, 10)
    parser.add_argument("--fail-over", metavar="GROWTH", help="exit code 1 if allocated grew by more: 5%% or 200MiB")
    add_check_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compare two files, or judge each; 1 if too much was allocated."""
    if args.check:
        refuse_typed(args, "does not go with --check", "device", "top", "fail_over")
        return check(args)
    refuse_typed(args, "is of --check: give that too", *OPTIONS)
    if len(args.files) != 2:
        raise BadInputError(f"two traces are compared, and {len(args.files)} given: with --check each is judged alone.")
    args.first, args.second = args.files
    limit = None if args.fail_over is None else growth_limit("--fail-over", args.fail_over)
    with working(f"comparing {file_label(args.first)} and {file_label(args.second)}"):
        pairs, notes = _pairs(args)
        devices = [compare(first, second) for first, second in pairs]
    failed = any(_grew_too_much(made, limit) for made in devices)
    result = {"first": args.first, "second": args.second, "fail_over": args.fail_over, "notes": notes}
    write_json(args, result | {"devices": [_entry(made, limit) for made in devices], "grew_too_much": failed})
    if wants_text(args):
        _print(args, devices, limit, notes)
    return 1 if failed else 0


def _grew_too_much(made: Comparison, limit: GrowthLimit | None) -> bool:
    before, now = made.first.allocated_peak_bytes, made.second.allocated_peak_bytes
    return limit is not None and limit.is_exceeded(before, now)


def _pairs(args: argparse.Namespace) -> tuple[list[tuple[Trace, Trace]], list[str]]:
    """The pairs of traces to compare, and notes about them."""
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
    """What JSON says of one device."""

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


def _print(args: argparse.Namespace, devices: list[Comparison], limit: GrowthLimit | None, notes: list[str]) -> None:
    console = table_console()
    for made in devices:
        numbers = " and ".join(map(str, dict.fromkeys((made.first.device, made.second.device))))
        files = f": A is {printable(args.first)}, B is {printable(args.second)}"
        print_prose(console, Text.assemble((f"device {numbers}", "bold"), files))
        _print_peaks(console, made)
        for name, changes in (("class", made.by_class), ("site", made.by_site), ("size", made.by_size)):
            _print_list(console, name, changes, args.top)
        if limit and _grew_too_much(made, limit):
            console.print(
                Text.assemble(
                    (f"allocated grew by {human_bytes(made.allocated_change_bytes)}", "bold red"),
                    f", more than the {human_bytes(limit.allowed_bytes(made.first.allocated_peak_bytes))} that "
                    f"--fail-over {printable(args.fail_over)} allows",
                )
            )
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
        rows.append(
            [name, *("not recorded" if value is None else human_bytes(value) for value in (before, after)), shown]
        )
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
    rows = [
        [
            row.name,
            human_bytes(row.first_bytes),
            human_bytes(row.second_bytes),
            _signed(row.change_bytes),
            f"{row.first_requests:,} → {row.second_requests:,}",
        ]
        for row in shown
    ]
    print_table(console, (f"by {name}", "A", "B", "change", "requests"), rows)
    if len(shown) < len(changed):
        rest = sum(row.change_bytes for row in changed) - sum(row.change_bytes for row in shown)
        console.print(f"  {len(changed) - len(shown):,} more, {_signed(rest)} together")


def _signed(num_bytes: int) -> str:
    return "0 B" if not num_bytes else f"{'+' if num_bytes > 0 else '-'}{human_bytes(abs(num_bytes))}"
