"""What `stalloc dryrun --find` prints: the answer for each allocator, what is needed, and where the next value ends."""

from typing import Any

from stalloc.cli.dryrun_offer import Offer
from stalloc.cli.dryrun_report import last_lines
from stalloc.cli.output import command_text, size_text, table_console
from stalloc.cli.tables import print_prose, print_table
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.sizing.largest import Largest
from stalloc.sizing.parameter import Parameter
from stalloc.sizing.run_work import RanOut
from stalloc.sizing.tries import Tries
from stalloc.trace.sites import UNKNOWN

_MOST_HOLDERS = 3


def print_largest(
    result: dict[str, Any], offer: Offer, parameter: Parameter, tries: Tries, found: Largest, command: list[str]
) -> None:
    """Print the table, where memory runs out with the next value, and what to type next."""
    console = table_console()
    console.print(offer.title())
    rows = [_row(one.shown, result[name]) for name, one in tries.contenders.items()]
    needed = result["needed"]
    if needed is not None:
        largest, after = _value(needed["largest"]), _value(needed["next"])
        rows.append(["whatever the allocator: live at a time", largest, _size(needed["needed_bytes"]), "", after])
    columns = ("", f"largest {parameter.name}", "allocated", "reserved", "fails")
    print_table(console, columns, rows, indent="  ")
    for name, one in tries.contenders.items():
        told = result[name]
        if told["ran_out"] is not None:
            label = parameter.label(told["fails"])
            print_prose(console, f"{label}, {one.shown}: {ran_out_text(told['ran_out'])}", indent="  ")
    for line in [*_ends(result, parameter, tries), *found.notes, *last_lines(result)]:
        print_prose(console, line, indent="  ")
    print_prose(console, f"{plural(tries.num_runs, 'run')} of the program", indent="  ")
    best = found.by_allocator["stalloc"]
    if best >= 0:
        words = command_text(*parameter.filled(command, tries.values[best]))
        console.print(f"next: stalloc run {words} on the real GPU")
    else:
        words = command_text(*parameter.filled(command, tries.values[0]))
        budget = size_text(offer.program_bytes)
        console.print(f"next: stalloc fit --budget {budget} {words}    (finds the cheapest way to make it fit)")


def _row(shown: str, told: dict[str, Any]) -> list[str]:
    return [
        shown,
        _value(told["largest"]),
        _size(told["allocated_peak_bytes"]),
        _size(told["reserved_peak_bytes"]),
        _value(told["fails"]),
    ]


def _value(value: int | None) -> str:
    return "none" if value is None else str(value)


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else human_bytes(num_bytes)


def ran_out_text(told: dict[str, Any] | RanOut) -> str:
    """Where memory ran out, and who held it."""
    one = told if isinstance(told, RanOut) else RanOut(**told)
    holders = ", ".join(f"{human_bytes(size)} by {_holder(name)}" for name, size in one.holders[:_MOST_HOLDERS])
    return (
        f"{printable(one.place)} asks for {human_bytes(one.wanted_bytes)} when {human_bytes(one.allocated_bytes)} are "
        f"allocated and {human_bytes(one.reserved_bytes)} reserved; most is held: {holders}"
    )


def _holder(name: str) -> str:
    return printable(name) if name != UNKNOWN else "backward or others without a line"


def _ends(result: dict[str, Any], parameter: Parameter, tries: Tries) -> list[str]:
    """A sentence where an answer is an end of the range."""
    lines = []
    whole = [one.shown for name, one in tries.contenders.items() if result[name]["is_last"]]
    if whole:
        last = parameter.label(parameter.values[-1])
        lines.append(f"under {' and '.join(whole)} all of the range fits: give --find a larger end than {last}.")
    none = [one.shown for name, one in tries.contenders.items() if result[name]["largest"] is None]
    if none:
        lines.append(f"under {' and '.join(none)} not even {parameter.label(parameter.values[0])} fits.")
    return lines
