"""A tree of call sites on a terminal: bytes and share in columns, then the frames, each below its caller.

Contract: a frame stands once below one caller, with all that was allocated through it. Frames that call only one other
stand in lines of their own at the same depth, with figures on the first. What is left out is counted in a line.
"""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from stalloc.analysis import Branch
from stalloc.figures import human_bytes
from stalloc.printable import printable

_HOT, _WARM = 0.25, 0.05  # shares of the whole from which a line is bold, and below which it is dim


@dataclass(frozen=True)
class Cut:
    """How much of a tree is shown."""

    min_share: float = 0.0  #: share of the whole below which a branch is left out
    depth: int | None = None  #: levels; a chain of single frames counts as one
    children: int | None = None  #: of one frame, the largest first


def print_branches(console: Console, root: Branch, cut: Cut) -> None:
    """Print a tree, its root on top, with figures that add up."""
    total = max(root.held_bytes, 1)
    _print(console, root, total, "", "", 1, cut)


def _print(console: Console, branch: Branch, total: int, mark: str, below: str, level: int, cut: Cut) -> None:
    chain = [branch]
    while len(chain[-1].children) == 1 and chain[-1].children[0].held_bytes == branch.held_bytes and level > 1:
        chain.append(chain[-1].children[0])
    _line(console, branch.held_bytes, total, mark + printable(branch.name))
    for frame in chain[1:]:
        bar = "│ " if chain[-1].children else "  "
        _as_it_is(console, Text(" " * _FIGURES + below + bar + printable(frame.name)))
    children = chain[-1].children
    shown = [child for child in children[: cut.children] if child.held_bytes >= cut.min_share * total]
    if cut.depth is not None and level > cut.depth:
        shown = []
    left = len(children) - len(shown)
    for number, child in enumerate(shown):
        is_last = number + 1 == len(shown) and not left
        _print(
            console,
            child,
            total,
            below + ("└ " if is_last else "├ "),
            below + ("  " if is_last else "│ "),
            level + 1,
            cut,
        )
    if left:
        held = sum(child.held_bytes for child in children) - sum(child.held_bytes for child in shown)
        _line(console, held, total, f"{below}└ {left:,} more")


_FIGURES = 20  # columns of a size and a share


def _line(console: Console, held: int, total: int, text: str) -> None:
    share = held / total
    style = "bold" if share >= _HOT else "dim" if share < _WARM else ""
    _as_it_is(console, Text.assemble((f"{human_bytes(held):>11} {share:>6.1%}  ", style), text))


def _as_it_is(console: Console, line: Text) -> None:
    """Print a line at its full length: names are not broken."""
    console.print(line, no_wrap=True, overflow="ignore", crop=False)
