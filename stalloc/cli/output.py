"""How verbs speak: one JSON object to a file or standard output, tables and sizes for people."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from stalloc.errors import BadInputError
from stalloc.files import write_whole
from stalloc.inputs import shown_name
from stalloc.printable import MAX_SENTENCE, printable

if TYPE_CHECKING:
    from rich.console import Console

MAX_NOTES = 20
JSON_VERSION = 1  #: rises when a name that `--json` gives is taken away, or means something else: docs/files.md


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as one JSON object to FILE (- for standard output)"
    )


def check_replaced(args: argparse.Namespace) -> None:
    """Raise BadInputError where an option names a file to write that is an input, or that `--json` never wrote.

    The second is what `stalloc stats --json a.pickle b.pickle` names, typed by somebody who takes --json for a flag.
    """
    given = {name: value for name, value in vars(args).items() if name not in (*_WRITTEN, "words")}
    values = [one for value in given.values() for one in (value if isinstance(value, list) else [value])]
    inputs = [one for one in values if isinstance(one, str)]
    for option in _WRITTEN:
        file = getattr(args, option, None)
        if not file or file.startswith(("/dev/", "/proc/")) or not os.path.isfile(file):  # output that goes on
            continue
        if is_one_of(file, inputs):
            raise BadInputError(f"{file} is the input: name another file for --{option}.")
        if option == "json" and not _is_ours(file):
            raise BadInputError(
                f"{file} is there already, and not written by --json: name another file for --json, or remove that one."
            )


_WRITTEN = ("json", "graph", "junit")  #: options that name a file that is replaced


def is_one_of(output: str | os.PathLike[str], inputs: Iterable[str | None]) -> bool:
    """Whether a file that is to be written is there, and is one of these."""
    there = [given for given in inputs if given and os.path.exists(given)]
    return os.path.exists(output) and any(os.path.samefile(given, output) for given in there)


def _is_ours(file: str) -> bool:
    """Whether a file is empty or the JSON of a verb; what cannot be read is told when it is written."""
    try:
        with open(file, "rb") as opened:
            head = opened.read(64)
    except OSError:
        return True
    return not head or b'"json_version"' in head


class _FromZero(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if values < 0:
            raise BadInputError(f"{option_string} is {values}: give a number from 0.")
        setattr(namespace, self.dest, values)


def add_top_argument(parser: argparse.ArgumentParser, default: int, shown: str = "lines of each list") -> None:
    told = f"{shown} (default: {default})"
    parser.add_argument("--top", type=int, default=default, metavar="N", help=told, action=_FromZero)


def check_numbers(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raise BadInputError if one of these options, where it is given, is below what it can be."""
    for name in names:
        if (value := getattr(args, name)) is not None and value < least:
            raise BadInputError(f"--{name.replace('_', '-')} is {value}: give a number from {least}.")


def present(args: argparse.Namespace, result: dict[str, Any], show: Callable[..., None], *shown: Any) -> None:
    """Write `result` as `write_json` does, and `show` people what was found: called with their console and `shown`."""
    try:
        write_json(args, result)
    finally:
        if wants_text(args):
            show(table_console(), *shown)


def wants_text(args: argparse.Namespace) -> bool:
    """Whether the tables for people are printed: not when JSON goes to standard output."""
    return args.json != "-"


def write_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write `result` where `--json` says; nothing without the option."""
    if args.json is None:
        return
    text = json.dumps({"json_version": JSON_VERSION} | result, indent=2, sort_keys=False) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return
    write_whole(args.json, text, "choose another file for --json")


def command_text(*words: str) -> str:
    """Words of a command to copy, quoted for a shell; longer than a name may be."""
    return printable(shlex.join(words), MAX_SENTENCE)


def file_label(file: str) -> str:
    """What reports call a file: its name, or standard input."""
    return printable(shown_name(file).name)


def size_text(size_bytes: int) -> str:
    """A size as an option takes it, to the byte."""
    for shift, unit in ((30, "GiB"), (20, "MiB")):
        if not size_bytes % (1 << shift):
            return f"{size_bytes >> shift}{unit}"
    return f"{size_bytes}B"


def note_texts(notes: Sequence[object]) -> list[str]:
    """The notes of a file or its reader, a sentence each; only the first of very many."""
    texts = [printable(str(note), MAX_SENTENCE) for note in notes[:MAX_NOTES]]
    return texts if len(notes) <= MAX_NOTES else [*texts, f"{len(notes) - MAX_NOTES:,} more notes"]


def table_console() -> "Console":
    """Where tables for people go: rows are never wrapped, and a file or a pipe has no edge.

    Strings are no markup. What others wrote goes through `printable` before, so that a line stays one line.
    """
    from stalloc.cli.console import OurConsole  # rich, which takes as long as all other imports of a verb

    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # without any, no escape is written
    console = OurConsole(soft_wrap=True, highlight=False, markup=False, emoji=False, color_system=colors)
    if not console.is_terminal:
        console.width = 200
    return console
