"""`stalloc dryrun --find gpu`: the smallest card of the catalogue on which a program completes."""

import argparse
import dataclasses
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.dryrun_find_report import ran_out_text
from stalloc.cli.dryrun_offer import headroom_of
from stalloc.cli.dryrun_report import last_lines
from stalloc.cli.dryrun_runs import Runs, contenders
from stalloc.cli.output import command_text, table_console, wants_text, write_json
from stalloc.cli.program import program_command
from stalloc.cli.tables import print_prose, print_table
from stalloc.device import DEFAULT_GPU
from stalloc.device.known_gpus import KNOWN_GPUS, MEMORY_SOURCES
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.sizing.smallest_card import Smallest, find_smallest


def find_card(args: argparse.Namespace) -> int:
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
        **{one.name: _entry(found, one.name, names) for one in tried},
        "num_runs": found.num_runs,
        "uncertain": found.findings,
        "files": runs.files.all().as_json(),
    }
    if wants_text(args):
        _print(result, {one.name: one.shown for one in tried}, command)
    write_json(args, result)
    return EXIT_DONE if result["stalloc"]["gpu"] is not None else EXIT_CHECK_FAILED


def _entry(found: Smallest, name: str, names: list[str]) -> dict[str, Any]:
    """What is known of one allocator's card, and of the next smaller one."""
    at = found.by_allocator[name]
    card, smaller = (names[at] if at < len(names) else None), (names[at - 1] if at else None)
    seen, failed = found.seen.get((name, at)), found.seen.get((name, at - 1))
    ran_out = failed.ran_out if failed is not None else None

    def peak(key: str) -> int | None:
        return max((device[key] for device in seen.devices), default=0) if seen is not None else None

    return {
        "gpu": card,
        "memory_bytes": KNOWN_GPUS[card].total_bytes if card else None,
        "memory_source": MEMORY_SOURCES[card] if card else None,
        "allocated_peak_bytes": peak("allocated_peak_bytes"),
        "reserved_peak_bytes": peak("reserved_peak_bytes"),
        "too_small": smaller,
        "ran_out": dataclasses.asdict(ran_out) if ran_out is not None else None,
    }


def _print(result: dict[str, Any], shown: dict[str, str], command: list[str]) -> None:
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
    words = command_text(*command)
    card = result["stalloc"]["gpu"]
    verb, gpu = ("dryrun", card) if card else ("fit", _LARGEST)
    console.print(f"next: stalloc {verb} --gpu {gpu} {words}")


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else human_bytes(num_bytes)


_LARGEST = max(KNOWN_GPUS, key=lambda name: KNOWN_GPUS[name].total_bytes)
