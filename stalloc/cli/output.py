"""How verbs speak: one JSON object to a file or standard output, tables and sizes for people."""

import argparse
import json
import sys
from typing import Any

from rich.console import Console

from stalloc.files import write_whole

MIB, GIB = 1 << 20, 1 << 30


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--json FILE`, which every verb has."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as one JSON object to FILE (- for standard output)"
    )


def wants_text(args: argparse.Namespace) -> bool:
    """Whether the tables for people are printed: not when JSON goes to standard output."""
    return args.json != "-"


def write_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write `result` where `--json` says; nothing without the option."""
    if args.json is None:
        return
    text = json.dumps(result, indent=2, sort_keys=False) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return
    write_whole(args.json, text, "choose another file for --json")


def table_console() -> Console:
    """Where tables for people go: rows are never wrapped, and a file or a pipe has no edge."""
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


def human_bytes(num_bytes: int) -> str:
    """Bytes for people: GiB and MiB with two decimals, below that bytes."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if abs(num_bytes) >= MIB // 10:
        return f"{num_bytes / MIB:.2f} MiB"
    return f"{num_bytes} B"
