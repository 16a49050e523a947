"""One sentence on standard error, for what the user has to know but what must not stop the program.

Contract: saying something never raises, whatever standard error is, and takes one line, whatever the sentence holds.
"""

import contextlib
import sys


def say(sentence: str) -> None:
    """Print `stalloc: SENTENCE`; what cannot be printed is shown escaped."""
    if sys.stderr is None:
        return  # print would turn to standard output
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in sentence)
    with contextlib.suppress(Exception):  # closed, full, or replaced by the program
        print(f"stalloc: {line}", file=sys.stderr, flush=True)
