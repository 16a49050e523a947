"""The command line: one module a verb; this file only finds the verb and turns errors into one sentence.

A verb module has a docstring (its help text, first line the summary), `add_arguments(parser)` and
`run(args) -> int`, the exit code: 0 done, 1 a check failed, 2 bad input or usage.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from stalloc.errors import StallocError
from stalloc.notices import say
from stalloc.printable import MAX_SENTENCE, printable

VERBS = (
    "run",
    "record",
    "dryrun",
    "stats",
    "top",
    "plan",
    "validate",
    "convert",
    "diff",
    "simulate",
    "explain",
    "info",
    "bench",
)

EXIT_DONE, EXIT_CHECK_FAILED, EXIT_BAD_INPUT = 0, 1, 2


def _verb_module(verb: str):
    return importlib.import_module(f"stalloc.cli.{verb}")


class _Parser(argparse.ArgumentParser):
    """Usage errors quote arguments, which may hold anything that a shell hands on."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, MAX_SENTENCE))


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    """The parser; only the verb that is asked for is imported, all of them when none is (for --help)."""
    from stalloc import __version__

    parser = _Parser(
        prog="stalloc",
        description="Plan GPU memory from one step of a program; run, explain and predict with the plan.",
        epilog="Exit codes: 0 done, 1 a check failed, 2 bad input or usage. `stalloc VERB --help` tells more.",
    )
    parser.add_argument("--version", action="version", version=f"stalloc {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name in VERBS if verb is None else (verb,):
        module = _verb_module(name)
        summary, _, rest = (module.__doc__ or "").partition("\n")
        sub = verbs.add_parser(
            name,
            help=summary,
            description=f"{summary}\n{rest}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog="Exit codes: 0 done, 1 a check failed, 2 bad input or usage.",
            allow_abbrev=False,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = argv[0] if argv and argv[0] in VERBS else None
    args = build_parser(verb).parse_args(argv)
    try:
        return int(args.run(args))
    except StallocError as error:
        say(str(error))
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
