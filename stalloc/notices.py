"""One sentence on standard error, for what the user has to know but what must not stop the program.

Contract: saying something never raises, whatever standard error is, and takes one line, whatever the sentence holds.
"""

import contextlib
import os
import sys


def say(sentence: str) -> None:
    """Print `stalloc: SENTENCE`; what cannot be printed is shown escaped."""
    if sys.stderr is None:
        return  # print would turn to standard output
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in sentence)
    text = f"stalloc: {line}\n"
    with contextlib.suppress(Exception):  # closed, full, or replaced by the program
        sys.stderr.flush()
        if sys.stderr is sys.__stderr__:
            # past its buffer: what cannot be written and stays in there changes the exit code of the program
            os.write(sys.stderr.fileno(), text.encode(sys.stderr.encoding, "backslashreplace"))
        else:
            sys.stderr.write(text)
