"""The command line: one module a verb; this file only finds the verb and turns errors into one sentence.

A verb module has a docstring (its help text, first line the summary), `add_arguments(parser)` and
`run(args) -> int`, the exit code: 0 done, 1 a check failed, 2 bad input or usage. `run` and `record` end with the
program's own code, and with 125 where it is stalloc that failed.
"""

import argparse
import difflib
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from stalloc.errors import BadInputError, NotATraceError, StallocError
from stalloc.garbage import fewer_collections
from stalloc.notices import say
from stalloc.printable import MAX_SENTENCE, printable

GROUPS = {
    "look at a recording": ("stats", "top", "explain", "report", "timeline", "live"),
    "predict": ("dryrun", "simulate", "plan", "swap", "evict"),
    "run": ("run", "record"),
    "fit into a budget": ("fit", "shard", "policies"),
    "guard": ("diff",),
    "more": ("mcp", "validate", "convert", "info", "bench"),
}
"""The verbs, grouped by purpose, as `stalloc --help` lists them."""
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)
OLDER_VERBS = {
    "tree": ("top", "--tree", "--at", "peak"),
    "advise": ("simulate", "--advise"),
    "check": ("diff", "--check"),
}
"""Verbs of former releases and what replaces them; they work for one release, with a notice."""

EXIT_DONE, EXIT_CHECK_FAILED, EXIT_BAD_INPUT = 0, 1, 2
EXIT_OWN_FAILURE = 125  #: of `run` and `record`, whose other codes are the program's; as docker and env have it
EXIT_INTERRUPTED = 130
_OF_PROGRAM = ("run", "record")
_CODES = "Exit codes: 0 done, 1 a check failed, 2 bad input or usage, 130 interrupted."
_WORDS = "The words of reports are explained in docs/glossary.md."
_CODES_OF_PROGRAM = "Exit codes: the program's own, 128 + N after signal N; 125 if it is stalloc that failed."


def _summary(verb: str) -> str:
    """The first line of the docstring of a verb's module, which is not imported: that may take half a second."""
    spec: Any = PathFinder.find_spec(f"stalloc.cli.{verb}", __path__)  # whoever else loads modules, as pytest does
    docstring = spec.loader.get_code(spec.name).co_consts[0]  # where Python keeps it
    return docstring.partition("\n")[0] if isinstance(docstring, str) else ""


class _Parser(argparse.ArgumentParser):
    """Usage errors quote arguments, which may hold anything that a shell hands on."""

    usage_code = EXIT_BAD_INPUT

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(self.usage_code, f"{self.prog}: error: {printable(message, MAX_SENTENCE)}\n")


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    """The parser: with the options of the verb that is asked for, or without one with a summary of each."""
    parser = _Parser(
        prog="stalloc",
        usage="stalloc [-h] [--version] VERB ...",
        description="Plan GPU memory from one step of a program; run, explain and predict with the plan.",
        epilog=f"{_CODES}\n`stalloc VERB --help` tells more. {_WORDS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")  # see _run
    verbs = parser.add_subparsers(prog="stalloc", dest="verb", required=True, metavar="VERB", help=argparse.SUPPRESS)
    for name in VERBS if verb is None else (verb,):
        if verb is not None or "_ARGCOMPLETE" in os.environ:
            _add_verb(verbs, name)
        else:
            verbs.add_parser(name)
    if verb is None:
        for title, group in GROUPS.items():
            parser.add_argument_group(title, "\n".join(map(_help_line, group)))
    return parser


def _help_line(verb: str) -> str:
    width = shutil.get_terminal_size().columns - 4  # argparse indents by two, and leaves two
    return textwrap.fill(_summary(verb), width, initial_indent=f"{verb:<10}", subsequent_indent=" " * 10)


def _add_verb(verbs: Any, name: str) -> None:
    module = importlib.import_module(f"stalloc.cli.{name}")
    codes = _CODES_OF_PROGRAM if name in _OF_PROGRAM else _CODES
    parser = verbs.add_parser(
        name,
        help=_summary(name),
        description=module.__doc__ or "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{codes} {_WORDS}",
        allow_abbrev=False,
    )
    parser.usage_code = EXIT_OWN_FAILURE if name in _OF_PROGRAM else EXIT_BAD_INPUT
    module.add_arguments(parser)
    parser.set_defaults(run=module.run, parser=parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    forks = "stalloc.sandbox.sandbox"  # is loaded where a verb has run a program in a fork, which it ends
    try:
        code = _main(argv)
    except BaseException:
        if forks in sys.modules and sys.modules[forks].is_fork():
            import traceback

            traceback.print_exc()
            sys.modules[forks].leave(EXIT_CHECK_FAILED)
        raise
    return int(sys.modules[forks].leave(code)) if forks in sys.modules else code


def _main(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    failure = EXIT_OWN_FAILURE if argv[:1] and argv[0] in _OF_PROGRAM else EXIT_BAD_INPUT
    try:
        with fewer_collections():
            code = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except NotATraceError as error:
        from stalloc.cli.explain import no_trace_but_errors

        say(no_trace_but_errors(error.file) or str(error))
        return failure
    except StallocError as error:
        say(str(error))
        return failure
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except KeyboardInterrupt:
        say("interrupted.")
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.filename is not None:
            raise
        say(f"standard output cannot be written: {error.strerror or error}: send it elsewhere.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failure


def _run(argv: list[str]) -> int:
    if argv[:1] == ["--version"]:
        from stalloc.version import full_version  # asks git, which takes as long as some verbs

        print(f"stalloc {full_version()}")
        return EXIT_DONE
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    if argv and argv[0] in OLDER_VERBS:
        newer = OLDER_VERBS[argv[0]]
        say(f"`stalloc {argv[0]}` is now `stalloc {' '.join(newer)}`: the next release drops the old name.")
        argv = [*newer, *argv[1:]]
    if argv and argv[0] not in VERBS and not argv[0].startswith("-"):
        close = difflib.get_close_matches(argv[0], [*VERBS, "help"], n=1)
        advice = f"did you mean {close[0]}?" if close else f"choose from {', '.join(VERBS)}."
        raise BadInputError(f"there is no verb {argv[0][:40]!r}: {advice}")
    verb = next((word for word in argv if not word.startswith("-")), None)
    verb = verb if verb in VERBS else None
    parser = build_parser(verb)
    if verb is None and "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    if not argv:
        parser.print_help(sys.stderr)
        return EXIT_BAD_INPUT
    if verb is not None:
        from stalloc.cli.shared_options import apply_shared

        older = [name for name, (newer, flag, *_) in OLDER_VERBS.items() if newer == verb and flag in argv]
        (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        apply_shared(verbs.choices[verb], (*older, verb), (*VERBS, *OLDER_VERBS))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        option = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        close = difflib.get_close_matches(option, args.parser._option_string_actions, n=1, cutoff=0.7)
        meant = f": did you mean {close[0]}?" if close else ""
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    args.words = argv
    from stalloc.cli.output import check_replaced

    check_replaced(args)
    return int(args.run(args))


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that completes a line, where argcomplete is installed (`pip install stalloc[completion]`)."""
    try:
        import argcomplete
    except ImportError:
        raise BadInputError("completion needs argcomplete: install stalloc[completion].") from None
    argcomplete.autocomplete(parser)
