"""`stalloc dryrun --find`: the largest value of a parameter with which a program fits a card, or the smallest card."""

import argparse
import dataclasses
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.dryrun_report import Offer, last_lines
from stalloc.cli.dryrun_runs import Runs, contenders, headroom_of, offer_of, ran_out_text
from stalloc.cli.output import command_text, size_text, table_console, wants_text, write_json
from stalloc.cli.program import program_command
from stalloc.cli.tables import print_prose, print_table
from stalloc.device import DEFAULT_GPU
from stalloc.device.known_gpus import KNOWN_GPUS, MEMORY_SOURCES
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.sizing.searches import Largest, Parameter, Smallest, find_largest, find_smallest
from stalloc.sizing.side_by_side import RunSeen
from stalloc.sizing.tries import Tries


def find(args: argparse.Namespace) -> int:
    """Search; 0 if stalloc has an answer."""
    if args.find == "gpu":
        return _find_card(args)
    command = program_command(args)
    parameter = Parameter.parse(args.find)
    parameter.check_in(command)
    offer = offer_of(args)
    runs = Runs(args)
    runs.warm(offer.gpu)
    tries = Tries(
        list(parameter.values),
        lambda value: parameter.filled(command, value),
        parameter.label,
        contenders(dataclasses.replace(offer.gpu, total_bytes=offer.program_bytes), args.steps),
        offer.program_bytes,
        runs,
    )
    found = find_largest(tries)
    result = {**_result(offer, parameter, tries, found), "files": runs.files.all().as_json()}
    if wants_text(args):
        _print_largest(result, offer, parameter, tries, found, command)
    write_json(args, result)
    return EXIT_DONE if found.by_allocator["stalloc"] >= 0 else EXIT_CHECK_FAILED


def _result(offer: Offer, parameter: Parameter, tries: Tries, found: Largest) -> dict[str, Any]:
    values = parameter.values
    needed = found.needed
    return {
        **offer.as_json(),
        "parameter": parameter.name,
        "first": values[0],
        "last": values[-1],
        "step": values.step,
        "needed": None if needed is None else _needed(tries, needed),
        **{name: _largest(tries, name, index) for name, index in found.by_allocator.items()},
        "notes": found.notes,
        "uncertain": tries.findings(found.by_allocator),
        "num_runs": tries.num_runs,
    }


def _needed(tries: Tries, index: int) -> dict[str, Any]:
    """The largest value whose live memory fits at every moment, and the next value."""
    has_next = index + 1 < len(tries.values)
    return {
        "largest": tries.values[index] if index >= 0 else None,
        "needed_bytes": tries.needed_bytes(index),
        "next": tries.values[index + 1] if has_next else None,
        "next_needed_bytes": tries.needed_bytes(index + 1),
    }


def _largest(tries: Tries, name: str, index: int) -> dict[str, Any]:
    """One allocator's answer, None if not even the first value fits, and where the value after it runs out."""
    is_last = index + 1 == len(tries.values)
    return {
        "largest": tries.values[index] if index >= 0 else None,
        "is_last": is_last,
        **_seen_entry(tries.limited.get((name, index))),
        "fails": None if is_last else tries.values[index + 1],
        "ran_out": _ran_out(tries.failed.get((name, index + 1))),
    }


def _seen_entry(seen: RunSeen | None) -> dict[str, int | None]:
    """The peaks of the device with most; None where nothing was run."""
    keys = ("allocated_peak_bytes", "reserved_peak_bytes")
    return {key: None if seen is None else max((device[key] for device in seen.devices), default=0) for key in keys}


def _ran_out(seen: RunSeen | None) -> dict[str, Any] | None:
    return None if seen is None or seen.ran_out is None else dataclasses.asdict(seen.ran_out)


def _print_largest(
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


def _find_card(args: argparse.Namespace) -> int:
    """Search; 0 if a card is large enough with stalloc."""
    command = program_command(args)
    if args.gpu or args.memory:
        raise BadInputError("--find gpu looks through all cards: leave --gpu and --memory out.")
    headroom = headroom_of(args)
    names = sorted(KNOWN_GPUS, key=lambda name: KNOWN_GPUS[name].total_bytes)
    names = [name for name in names if KNOWN_GPUS[name].total_bytes > headroom]
    if not names:
        raise BadInputError(f"a headroom of {args.headroom} leaves nothing of any card: give less.")
    cards = [
        dataclasses.replace(KNOWN_GPUS[name], total_bytes=KNOWN_GPUS[name].total_bytes - headroom) for name in names
    ]
    runs = Runs(args)
    runs.warm(DEFAULT_GPU)
    tried = contenders(DEFAULT_GPU, args.steps)
    found = find_smallest(cards, command, tried, runs)
    result: dict[str, Any] = {
        "headroom_bytes": headroom,
        "needed_bytes": found.needed_bytes,
        **{one.name: _smallest(found, one.name, names) for one in tried},
        "num_runs": found.num_runs,
        "uncertain": found.findings,
        "files": runs.files.all().as_json(),
    }
    if wants_text(args):
        _print_card(result, {one.name: one.shown for one in tried}, command)
    write_json(args, result)
    return EXIT_DONE if result["stalloc"]["gpu"] is not None else EXIT_CHECK_FAILED


def _smallest(found: Smallest, name: str, names: list[str]) -> dict[str, Any]:
    """What is known of the smallest card for one allocator, and of the next smaller card."""
    at = found.by_allocator[name]
    card = names[at] if at < len(names) else None
    return {
        "gpu": card,
        "memory_bytes": KNOWN_GPUS[card].total_bytes if card else None,
        "memory_source": MEMORY_SOURCES[card] if card else None,
        **_seen_entry(found.seen.get((name, at))),
        "too_small": names[at - 1] if at else None,
        "ran_out": _ran_out(found.seen.get((name, at - 1))),
    }


def _print_card(result: dict[str, Any], shown: dict[str, str], command: list[str]) -> None:
    console = table_console()
    rows = []
    for name, allocator in shown.items():
        told = result[name]
        figures = [_size(told[key]) for key in ("memory_bytes", "allocated_peak_bytes", "reserved_peak_bytes")]
        rows.append([allocator, told["gpu"] or "none", told["memory_source"] or "", *figures, told["too_small"] or ""])
    columns = ("", "smallest card", "memory as", "memory", "allocated", "reserved", "too small")
    print_table(console, columns, rows, text_columns=3, indent="  ")
    if result["needed_bytes"] is not None:
        text = f"live at a time: {human_bytes(result['needed_bytes'])}, which no allocator can do without"
        print_prose(console, text, indent="  ")
    if result["headroom_bytes"]:
        text = f"{human_bytes(result['headroom_bytes'])} of each card are left for the CUDA context and NCCL"
        print_prose(console, text, indent="  ")
    for name, allocator in shown.items():
        told = result[name]
        if told["ran_out"] is not None:
            print_prose(console, f"{told['too_small']}, {allocator}: {ran_out_text(told['ran_out'])}", indent="  ")
    for line in last_lines(result):
        print_prose(console, line, indent="  ")
    print_prose(console, f"{plural(result['num_runs'], 'run')} of the program", indent="  ")
    words, largest = command_text(*command), max(KNOWN_GPUS, key=lambda name: KNOWN_GPUS[name].total_bytes)
    card = result["stalloc"]["gpu"]
    verb, gpu = ("dryrun", card) if card else ("fit", largest)
    console.print(f"next: stalloc {verb} --gpu {gpu} {words}")
