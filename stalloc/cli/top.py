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
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from stalloc.analysis import Branch, Holder, Holders, holders
from stalloc.analysis.moments import last_oom, moment_text
from stalloc.cli.output import add_json_argument, add_top_argument, check_numbers, command_text, file_label, present
from stalloc.cli.progress import working
from stalloc.cli.tables import print_notes, print_prose, print_table, print_title
from stalloc.cli.trace_options import of_device
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces

_MOMENT = {"peak": "when most is allocated", "oom": "at the out-of-memory error", "end": "at the end"}
_NO_SITES = (
    "the file has no call sites: `stalloc record` records them, and so does torch.cuda.memory._record_memory_history()"
)
_LEAST_BRANCH = {True: 1.0, False: 2.0}  # percent of what is held, with --tree and without
_HOT, _WARM = 0.25, 0.05  # shares of the whole from which a line of the tree is bold, and below which it is dim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="trace to look at")
    add("--at", metavar="MOMENT", help="peak, oom, end or an event index")
    add("--device", type=int, metavar="N", help="this device only (default: all)")
    add_top_argument(parser, 10)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--no-tree", action="store_true", help="the lists only")
    shown.add_argument("--tree", action="store_true", help="the tree only, with all children of each frame")
    add("--depth", type=int, metavar="N", help="levels of the tree (default: all)")
    add("--min", type=float, metavar="PERCENT", help="least share of a branch of the tree (default: 2, with --tree 1)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    check_numbers(args, 1, "depth")
    if args.min is not None and not 0 <= args.min <= 100:
        raise BadInputError(f"--min is {args.min}: give a share from 0 to 100 percent.")
    found = []
    for file in args.files:
        with working(f"reading {file_label(file)}"):
            traces = of_device(file, load_traces(file, history=False), args.device)
            if args.at == "oom":  # of the devices that ran out of memory
                traces = [trace for trace in traces if last_oom(trace) is not None]
            if not traces:
                raise BadInputError(f"{file} has no out-of-memory event: use --at peak, end or the index of an event.")
            found += [(file, trace, holders(trace, args.at)) for trace in traces]
    devices = [{"file": file, **dataclasses.asdict(made)} for file, _, made in found]
    present(args, {"devices": devices}, _print, args, found)
    return 0


def _print(console: Console, args: argparse.Namespace, found: list[tuple[str, Trace, Holders]]) -> None:
    for file, trace, made in found:
        moment = "when the snapshot was taken" if made.at == "snapshot" else moment_text(made.event)
        when = f"{_MOMENT[made.at]}, {moment}" if made.at in _MOMENT else moment
        reserved = f", reserved {human_bytes(made.reserved_bytes)}" if made.reserved_bytes else ""
        held = f"allocated {human_bytes(made.allocated_bytes)} by {plural(made.requests, 'request')}"
        print_title(console, file, f", device {made.device}, {when}: {held}{reserved}")
        if not args.tree:
            _print_lists(console, args, trace, made)
        elif not made.has_sites and not made.by_role:
            print_prose(console, _NO_SITES, indent="  ")
        if made.tree.children and (args.tree or (made.has_sites and not args.no_tree and args.top)):
            if not args.tree:
                console.print(Text("by stack", "bold"))
            _Tree(console, args, max(made.tree.held_bytes, 1)).draw(made.tree, "", "", 1)
        console.print()
    console.print(f"Next: stalloc explain {command_text(args.files[0])}")


def _print_lists(console: Console, args: argparse.Namespace, trace: Trace, made: Holders) -> None:
    if made.wanted_bytes is not None:
        print_prose(console, f"{human_bytes(made.wanted_bytes)} more was requested by {printable(made.wanted_by)}")
    for growth in made.growth[: args.top]:
        grows = f"grows {human_bytes(growth.bytes_per_step)} a step at {printable(growth.name)}"
        seen = f", {human_bytes(growth.held_bytes)} over the last {growth.steps:,} steps"
        print_prose(console, Text.assemble((grows, "bold red"), seen))
    print_notes(console, trace.info.get("notes", []))
    if not made.has_sites and not made.by_role:
        print_prose(console, _NO_SITES, indent="  ")
    for name, found in (
        ("call site", made.by_site if made.has_sites else []),
        ("role", made.by_role),
        ("module", made.by_module),
        ("class", made.by_class),
        ("size", made.by_size),
    ):
        shown, rest = found[: args.top], found[args.top :]
        rows = [[entry.name, *_figures([entry], made.allocated_bytes)] for entry in shown]
        if shown and rest:
            rows.append([f"{len(rest):,} more", *_figures(rest, made.allocated_bytes)])
        if rows:
            print_table(console, (f"by {name}", "held", "share", "requests"), rows)


def _figures(found: Sequence[Holder], total: int) -> list[str]:
    held, requests = sum(one.held_bytes for one in found), sum(one.requests for one in found)
    return [human_bytes(held), f"{held / max(total, 1):.1%}", f"{requests:,}"]


class _Tree:
    """A tree of call sites on a terminal: bytes and share in columns, then the frames, each below its caller.

    A frame stands once below one caller, with all that was allocated through it. Frames that call only one other stand
    in lines of their own at the same depth, with figures on the first. What is left out is counted in a line.
    """

    def __init__(self, console: Console, args: argparse.Namespace, total: int) -> None:
        least = _LEAST_BRANCH[args.tree] if args.min is None else args.min
        self._console, self._total, self._least_bytes = console, total, least / 100 * total
        self._depth, self._most_children = args.depth, None if args.tree else args.top

    def draw(self, branch: Branch, mark: str, below: str, level: int) -> None:
        chain = [branch]
        while len(chain[-1].children) == 1 and chain[-1].children[0].held_bytes == branch.held_bytes and level > 1:
            chain.append(chain[-1].children[0])
        self._line(mark + printable(branch.name), branch.held_bytes)
        children = chain[-1].children
        for frame in chain[1:]:
            self._line(f"{below}{'│ ' if children else '  '}{printable(frame.name)}")
        shown = [child for child in children[: self._most_children] if child.held_bytes >= self._least_bytes]
        if self._depth is not None and level > self._depth:
            shown = []
        left = len(children) - len(shown)
        for number, child in enumerate(shown, start=1):
            corner, bar = ("└ ", "  ") if number == len(shown) and not left else ("├ ", "│ ")
            self.draw(child, below + corner, below + bar, level + 1)
        if left:
            held = sum(child.held_bytes for child in children) - sum(child.held_bytes for child in shown)
            self._line(f"{below}└ {left:,} more", held)

    def _line(self, text: str, held: int | None = None) -> None:
        """Print a line at its full length, as names are not broken."""
        figures, style = " " * 20, ""
        if held is not None:
            share = held / self._total
            figures = f"{human_bytes(held):>11} {share:>6.1%}  "
            style = "bold" if share >= _HOT else "dim" if share < _WARM else ""
        self._console.print(Text.assemble((figures, style), text), no_wrap=True, overflow="ignore", crop=False)
