"""Say who holds memory at one moment, by call site, role, module, class and size, and what grows from step to step.

FILE is a trace of any kind that stalloc reads; `stalloc stats --help` names them. --at chooses the moment: the last
out-of-memory error (oom, the default where there is one), the most allocated (peak, the default elsewhere), the end of
the record, or an event index.

Sizes are rounded up to 512 bytes, and count from alloc to free_completed; each list adds up to what is allocated at
that moment. A call site is the innermost line outside PyTorch; the tree shows its callers. Persistent requests live
across steps, transient ones end in the phase in which they began, scoped ones are all others. Roles (parameter,
gradient, saved activation …) and modules are known for recordings by `stalloc record --ops`; repeated modules are one,
as in layers.*.attention, and include what the backward pass of their operations makes. A call site grows if it holds
more at the end of each later step; the program marks steps, or they are found where its requests repeat.

--tree shows only the tree, whole: callers above, what they called below, or modules and roles if there are no stacks.
Stacks that begin with the same frames share a branch until they part; a line shows what was allocated through its
frame, and its share. Branches below --min of what is held, and those deeper than --depth, are counted in a line `N
more`.

JSON: for each of `devices` the moment (`at`, `event`), `allocated_bytes`, `reserved_bytes`, the complete lists
`by_site`, `by_role`, `by_module`, `by_class` and `by_size` of `name`, `held_bytes`, `requests`, largest first, `tree`
(the same with `children`), and `growth`.
"""

import argparse
import dataclasses

from rich.console import Console
from rich.text import Text

from stalloc.analysis import Holder, Holders, holders
from stalloc.analysis.moments import last_oom, moment_text
from stalloc.cli.branches import Cut, print_branches
from stalloc.cli.convert import of_device
from stalloc.cli.output import (
    add_json_argument,
    add_moment_arguments,
    add_top_argument,
    command_text,
    file_label,
    note_texts,
    table_console,
    wants_text,
    write_json,
)
from stalloc.cli.progress import working
from stalloc.cli.tables import print_prose, print_table
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces

_MOMENT = {
    "peak": "when most is allocated",
    "oom": "at the out-of-memory error",
    "end": "at the end",
    "event": "",
    "snapshot": "",
}
_NO_SITES = (
    "the file has no call sites: `stalloc record` records them, and so does torch.cuda.memory._record_memory_history()"
)
_LEAST_BRANCH = {True: 1.0, False: 2.0}  # percent of what is held, with --tree and without


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc top`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to look at")
    add_moment_arguments(parser)
    add_top_argument(parser, 10)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--no-tree", action="store_true", help="the lists only")
    shown.add_argument("--tree", action="store_true", help="the tree only, with all children of each frame")
    parser.add_argument("--depth", type=int, metavar="N", help="levels of the tree (default: all)")
    parser.add_argument(
        "--min", type=float, metavar="PERCENT", help="least share of a branch of the tree (default: 2, with --tree 1)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Look at each device of each file."""
    cut = _cut(args)
    found = []
    for file in args.files:
        with working(f"reading {file_label(file)}"):
            found += [(file, trace, holders(trace, args.at)) for trace in _traces_at(args, file)]
    write_json(args, {"devices": [{"file": file, **dataclasses.asdict(made)} for file, _, made in found]})
    if wants_text(args):
        console = table_console()
        for file, trace, made in found:
            print_prose(console, Text.assemble((file_label(file), "bold"), _moment_sentence(made)))
            if not args.tree:
                _print_lists(console, args, trace, made)
            elif not made.has_sites and not made.by_role:
                print_prose(console, _NO_SITES, indent="  ")
            if made.tree.children and (args.tree or (made.has_sites and not args.no_tree and args.top)):
                if not args.tree:
                    console.print(Text("by stack", "bold"))
                print_branches(console, made.tree, cut)
            console.print()
        console.print(f"Next: stalloc explain {command_text(args.files[0])}")
    return 0


def _cut(args: argparse.Namespace) -> Cut:
    """How much of the tree is shown."""
    if args.depth is not None and args.depth < 1:
        raise BadInputError(f"--depth is {args.depth}: give a number from 1.")
    least = _LEAST_BRANCH[args.tree] if args.min is None else args.min
    if not 0 <= least <= 100:
        raise BadInputError(f"--min is {args.min}: give a share from 0 to 100 percent.")
    return Cut(min_share=least / 100, depth=args.depth, children=None if args.tree else args.top)


def _traces_at(args: argparse.Namespace, file: str) -> list[Trace]:
    """The traces of a file that --device and --at choose: with `--at oom` those of devices that ran out of memory."""
    traces = of_device(file, load_traces(file, history=False), args.device)
    if args.at != "oom":
        return traces
    failed = [trace for trace in traces if last_oom(trace) is not None]
    if not failed:
        raise BadInputError(f"{file} has no out-of-memory event: use --at peak, end or the index of an event.")
    return failed


def _moment_sentence(made: Holders) -> str:
    """The device, the moment and what is held then, in words that follow the name of the file."""
    moment = "when the snapshot was taken" if made.at == "snapshot" else moment_text(made.event)
    reserved = f", reserved {human_bytes(made.reserved_bytes)}" if made.reserved_bytes else ""
    when = f"{_MOMENT[made.at]}, {moment}" if _MOMENT[made.at] else moment
    held = f"allocated {human_bytes(made.allocated_bytes)} by {plural(made.requests, 'request')}"
    return f", device {made.device}, {when}: {held}{reserved}"


def _print_lists(console: Console, args: argparse.Namespace, trace: Trace, made: Holders) -> None:
    if made.wanted_bytes is not None:
        print_prose(console, f"{human_bytes(made.wanted_bytes)} more was requested by {printable(made.wanted_by)}")
    for growth in made.growth[: args.top]:
        grows = f"grows {human_bytes(growth.bytes_per_step)} a step at {printable(growth.name)}"
        seen = f", {human_bytes(growth.held_bytes)} over the last {growth.steps:,} steps"
        print_prose(console, Text.assemble((grows, "bold red"), seen))
    for note in note_texts(trace.info.get("notes", [])):
        print_prose(console, f"note: {note}", indent="  ")
    if not made.has_sites and not made.by_role:
        print_prose(console, _NO_SITES, indent="  ")
    for name, found in (
        ("call site", made.by_site),
        ("role", made.by_role),
        ("module", made.by_module),
        ("class", made.by_class),
        ("size", made.by_size),
    ):
        if name != "call site" or made.has_sites:
            _print_list(console, name, found, made.allocated_bytes, args.top)


def _print_list(console: Console, name: str, found: list[Holder], total: int, top: int) -> None:
    shown, rest = found[:top], found[top:]
    if not shown:
        return
    rows = [[entry.name, *_figures(entry.held_bytes, entry.requests, total)] for entry in shown]
    if rest:
        held, requests = sum(entry.held_bytes for entry in rest), sum(entry.requests for entry in rest)
        rows.append([f"{len(rest):,} more", *_figures(held, requests, total)])
    print_table(console, (f"by {name}", "held", "share", "requests"), rows)


def _figures(held: int, requests: int, total: int) -> list[str]:
    return [human_bytes(held), f"{held / max(total, 1):.1%}", f"{requests:,}"]
