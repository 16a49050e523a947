"""Show who holds memory at one moment as a tree of call sites: callers above, what they called below.

FILE is a trace of any kind that stalloc reads; `stalloc stats --help` names them. --at chooses the moment: the most
allocated (peak, the default), the last out-of-memory error (oom), the end of the record, or an event index.

Stacks that begin with the same frames are one branch until they part; a line has the bytes that were allocated through
its frame, rounded up to 512 bytes each, and their share. Frames of PyTorch are left out. Of a recording by
`stalloc record --ops`, which has no stacks, the tree is of modules and roles. Branches below --min of what is held,
and those deeper than --depth, are counted in a line `N more`. In a pipe the same text comes without colours.

JSON: for each of `devices` the moment (`at`, `event`), `allocated_bytes`, `reserved_bytes`, `requests`, and the whole
`tree` of `name`, `held_bytes`, `requests` and `children`, largest first; --depth and --min cut what is printed only.
"""

import argparse
import dataclasses

from rich.text import Text

from stalloc.analysis import holders
from stalloc.cli.branches import Cut, print_branches
from stalloc.cli.output import (
    add_json_argument,
    add_moment_arguments,
    command_text,
    file_label,
    table_console,
    wants_text,
    write_json,
)
from stalloc.cli.progress import working
from stalloc.cli.tables import print_prose
from stalloc.cli.top import NO_SITES, moment_sentence, traces_at
from stalloc.errors import BadInputError

_KEPT = ("device", "at", "event", "allocated_bytes", "reserved_bytes", "requests", "tree")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc tree`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to look at")
    add_moment_arguments(parser)
    parser.add_argument("--depth", type=int, metavar="N", help="levels to show (default: all)")
    parser.add_argument("--min", type=float, default=1.0, metavar="PERCENT", help="least share to show (default: 1)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tree of each device of each file."""
    if args.depth is not None and args.depth < 1:
        raise BadInputError(f"--depth is {args.depth}: give a number from 1.")
    if not 0 <= args.min <= 100:
        raise BadInputError(f"--min is {args.min}: give a share from 0 to 100 percent.")
    found = []
    for file in args.files:
        with working(f"reading {file_label(file)}"):
            found += [(file, holders(trace, args.at or "peak")) for trace in traces_at(args, file)]
    devices = [
        {"file": file, **{name: value for name, value in dataclasses.asdict(made).items() if name in _KEPT}}
        for file, made in found
    ]
    write_json(args, {"devices": devices})
    if wants_text(args):
        console = table_console()
        for file, made in found:
            print_prose(console, Text.assemble((file_label(file), "bold"), moment_sentence(made)))
            if not made.tree.children:
                continue
            if not made.has_sites and not made.by_role:
                print_prose(console, NO_SITES, indent="  ")
            print_branches(console, made.tree, Cut(min_share=args.min / 100, depth=args.depth))
            console.print()
        console.print(f"Next: stalloc top {command_text(args.files[0])}")
    return 0
