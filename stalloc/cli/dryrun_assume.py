"""`--assume FILE:LINE=N`: what a line of the program reads where the virtual GPU does not compute it."""

import argparse
import contextlib
import os
from collections.abc import Iterator

from stalloc.device.deciding_lines import VARIABLE, as_variable, parse_assumption


def add_assume_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="FILE:LINE=N",
        help="what a line of the program reads where the virtual GPU does not compute it, such as the end of a loop; "
        "may be repeated",
    )


@contextlib.contextmanager
def assuming(args: argparse.Namespace) -> Iterator[None]:
    """A block in which programs read what the option says. Raises BadInputError where it says nothing."""
    before = os.environ.get(VARIABLE)
    if args.assume:
        os.environ[VARIABLE] = as_variable(map(parse_assumption, args.assume))
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before
        else:
            os.environ.pop(VARIABLE, None)
