"""What verbs do with the files that a program on the virtual GPU writes, and what they say about them."""

import argparse
from collections.abc import Iterable, Sequence

from stalloc.notices import say
from stalloc.sandbox import Files, ProgramFiles, SandboxedRun, way

KEPT = "--keep-files: what the program writes is written for real, with the virtual GPU's zeros for values"


def program_files(args: argparse.Namespace, command: Sequence[str]) -> ProgramFiles:
    """For a verb that runs a program many times on the virtual GPU, and discards what it writes."""
    files = ProgramFiles(command, keep=args.keep_files)
    if args.keep_files:
        say(KEPT)
    elif not files.is_real and way().kind == "landlock":
        say(refusal())
    return files


def refusal() -> str:
    """The sentence that is said before running a program whose writes are refused."""
    return f"files: {way().sentence()}; --keep-files lets them through"


def sandboxed_run(
    args: argparse.Namespace, command: Sequence[str], outputs: Iterable[str | None] = (), *, quiet: bool = False
) -> SandboxedRun | None:
    """For a verb that runs a program once, on the virtual GPU, in this process; None where writes are real.

    `outputs`: files that the verb itself writes while those of the program are in a sandbox. `quiet`: the process that
    started this one has said it already.
    """
    if ProgramFiles(command, keep=args.keep_files).is_real:
        if args.keep_files and not quiet:
            say(KEPT)
        return None
    if way().kind == "landlock" and not quiet:
        say(refusal())
    return SandboxedRun(command, [one for one in outputs if one])


def say_files(files: Files) -> None:
    """Name what was discarded and what was kept."""
    for sentence in files.sentences():
        say(sentence)
