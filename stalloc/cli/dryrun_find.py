"""`stalloc dryrun --find`: the largest value of a parameter with which a program fits a card, or the smallest card."""

import argparse
from typing import Any

from rich.console import Console

from stalloc.cli.dryrun_runs import Offer, Runs, cards_to_try, contenders, offer_of, ran_out_entry, with_memory
from stalloc.cli.output import command_text, present, size_text
from stalloc.cli.program import program_command
from stalloc.cli.sizing_report import last_lines, ran_out_text
from stalloc.cli.tables import print_lines, print_table
from stalloc.device import DEFAULT_GPU
from stalloc.device.known_gpus import KNOWN_GPUS, MEMORY_SOURCES
from stalloc.figures import human_bytes, plural
from stalloc.sizing.searches import Largest, Parameter, Smallest, find_largest, find_smallest
from stalloc.sizing.side_by_side import RunSeen
from stalloc.sizing.tries import Tries


def find(args: argparse.Namespace) -> int:
    if args.find == "gpu":
        return _find_card(args)
    command = program_command(args)
    parameter = Parameter.parse(args.find)
    parameter.check_in(command)
    offer = offer_of(args)
    runs = Runs(args, offer.gpu)
    tries = Tries(
        list(parameter.values),
        lambda value: parameter.filled(command, value),
        parameter.label,
        contenders(with_memory(offer.gpu, offer.program_bytes), args.steps),
        offer.program_bytes,
        runs,
    )
    found = find_largest(tries)
    values = parameter.values
    needed = None
    if found.needed is not None:  # the largest value whose live memory fits at every moment, and the next one
        needed = {
            "largest": _value_at(tries, found.needed),
            "needed_bytes": tries.needed_bytes(found.needed),
            "next": _value_at(tries, found.needed + 1),
            "next_needed_bytes": tries.needed_bytes(found.needed + 1),
        }
    result = {
        **offer.as_json(),
        "parameter": parameter.name,
        "first": values[0],
        "last": values[-1],
        "step": values.step,
        "needed": needed,
        **{name: _largest(tries, name, index) for name, index in found.by_allocator.items()},
        "notes": found.notes,
        "uncertain": tries.findings(found.by_allocator),
        "num_runs": tries.num_runs,
        "files": runs.files.all().as_json(),
    }
    present(args, result, _print_largest, result, offer, parameter, tries, found, command)
    return 0 if found.by_allocator["stalloc"] >= 0 else 1


def _value_at(tries: Tries, index: int) -> Any:
    """The value at a place; None before the first and after the last."""
    return tries.values[index] if 0 <= index < len(tries.values) else None


def _largest(tries: Tries, name: str, index: int) -> dict[str, Any]:
    """One allocator's answer, None if not even the first value fits, and where the value after it runs out."""
    return {
        "largest": _value_at(tries, index),
        "is_last": index + 1 == len(tries.values),
        **_peaks(tries.limited.get((name, index))),
        "fails": _value_at(tries, index + 1),
        "ran_out": ran_out_entry(tries.failed.get((name, index + 1))),
    }


def _peaks(seen: RunSeen | None) -> dict[str, int | None]:
    """The peaks of the device with most; None where nothing was run."""
    keys = ("allocated_peak_bytes", "reserved_peak_bytes")
    return {key: None if seen is None else max((device[key] for device in seen.devices), default=0) for key in keys}


def _print_largest(
    console: Console,
    result: dict[str, Any],
    offer: Offer,
    parameter: Parameter,
    tries: Tries,
    found: Largest,
    command: list[str],
) -> None:
    console.print(offer.title())
    rows, lines, whole, none = [], [], [], []
    for name, one in tries.contenders.items():
        told = result[name]
        sizes = map(_size, (told["allocated_peak_bytes"], told["reserved_peak_bytes"]))
        rows.append([one.shown, _value(told["largest"]), *sizes, _value(told["fails"])])
        if told["ran_out"] is not None:
            lines.append(f"{parameter.label(told['fails'])}, {one.shown}: {ran_out_text(told['ran_out'])}")
        whole += [one.shown] if told["is_last"] else []
        none += [one.shown] if told["largest"] is None else []
    if needed := result["needed"]:
        largest, after = _value(needed["largest"]), _value(needed["next"])
        rows.append(["whatever the allocator: live at a time", largest, _size(needed["needed_bytes"]), "", after])
    print_table(console, ("", f"largest {parameter.name}", "allocated", "reserved", "fails"), rows, indent="  ")
    if whole:
        last = parameter.label(parameter.values[-1])
        lines.append(f"under {' and '.join(whole)} all of the range fits: give --find a larger end than {last}.")
    if none:
        lines.append(f"under {' and '.join(none)} not even {parameter.label(parameter.values[0])} fits.")
    lines += [*found.notes, *last_lines(result), f"{plural(tries.num_runs, 'run')} of the program"]
    print_lines(console, lines)
    best = found.by_allocator["stalloc"]
    words = command_text(*parameter.filled(command, tries.values[max(best, 0)]))
    if best >= 0:
        console.print(f"next: stalloc run {words} on the real GPU")
    else:
        budget = size_text(offer.program_bytes)
        console.print(f"next: stalloc fit --budget {budget} {words}    (finds the cheapest way to make it fit)")


def _value(value: int | None) -> str:
    return "none" if value is None else str(value)


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else human_bytes(num_bytes)


def _find_card(args: argparse.Namespace) -> int:
    """Search; 0 if a card is large enough with stalloc."""
    command = program_command(args)
    names, headroom = cards_to_try(args)
    cards = [with_memory(KNOWN_GPUS[name], KNOWN_GPUS[name].total_bytes - headroom) for name in names]
    runs = Runs(args, DEFAULT_GPU)
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
    present(args, result, _print_card, result, {one.name: one.shown for one in tried}, command)
    return 0 if result["stalloc"]["gpu"] is not None else 1


def _smallest(found: Smallest, name: str, names: list[str]) -> dict[str, Any]:
    at = found.by_allocator[name]
    card = names[at] if at < len(names) else None
    return {
        "gpu": card,
        "memory_bytes": KNOWN_GPUS[card].total_bytes if card else None,
        "memory_source": MEMORY_SOURCES[card] if card else None,
        **_peaks(found.seen.get((name, at))),
        "too_small": names[at - 1] if at else None,
        "ran_out": ran_out_entry(found.seen.get((name, at - 1))),
    }


def _print_card(console: Console, result: dict[str, Any], shown: dict[str, str], command: list[str]) -> None:
    rows, lines = [], []
    if result["needed_bytes"] is not None:
        lines.append(f"live at a time: {human_bytes(result['needed_bytes'])}, which no allocator can do without")
    if result["headroom_bytes"]:
        lines.append(f"{human_bytes(result['headroom_bytes'])} of each card are left for the CUDA context and NCCL")
    for name, allocator in shown.items():
        told = result[name]
        figures = [_size(told[key]) for key in ("memory_bytes", "allocated_peak_bytes", "reserved_peak_bytes")]
        rows.append([allocator, told["gpu"] or "none", told["memory_source"] or "", *figures, told["too_small"] or ""])
        if told["ran_out"] is not None:
            lines.append(f"{told['too_small']}, {allocator}: {ran_out_text(told['ran_out'])}")
    columns = ("", "smallest card", "memory as", "memory", "allocated", "reserved", "too small")
    print_table(console, columns, rows, text_columns=3, indent="  ")
    print_lines(console, [*lines, *last_lines(result), f"{plural(result['num_runs'], 'run')} of the program"])
    words, largest = command_text(*command), max(KNOWN_GPUS, key=lambda name: KNOWN_GPUS[name].total_bytes)
    card = result["stalloc"]["gpu"]
    verb, gpu = ("dryrun", card) if card else ("fit", largest)
    console.print(f"next: stalloc {verb} --gpu {gpu} {words}")
