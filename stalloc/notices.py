"""One sentence on standard error, for what the user has to know but what must not stop the program.

Contract: saying something never raises, whatever standard error is, and takes one line, whatever the sentence holds.
"""

import contextlib
import os
import sys


def say(sentence: str) -> None:
    """Print `stalloc: SENTENCE`; what cannot be printed is shown escaped."""
    stream, own = sys.stderr, sys.__stderr__
    if stream is None:
        return
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in sentence)
    text = f"stalloc: {line}\n"
    with contextlib.suppress(Exception):  # closed, full, or replaced by the program
        stream.flush()
        if own is not None and stream is own:
            # past its buffer: what cannot be written and stays in there changes the exit code of the program
            os.write(own.fileno(), text.encode(own.encoding, "backslashreplace"))
        else:
            stream.write(text)
