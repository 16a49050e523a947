"""One sentence on standard error, for what the user has to know but what must not stop the program.

Contract: saying something never raises, whatever standard error is, and takes one printable line, whatever the sentence
holds.
"""

import os
import sys

from stalloc.printable import MAX_SENTENCE, encodable, printable


def say(sentence: str) -> None:
    if sys.stderr is None:
        return  # print would turn to standard output
    import contextlib  # not above: this module is loaded at every start of Python under STALLOC=1

    file, is_own = sys.stderr, sys.stderr is sys.__stderr__
    text = printable(f"stalloc: {sentence}", MAX_SENTENCE) + "\n"
    with contextlib.suppress(Exception):  # closed, full, or replaced by the program
        file.flush()
        if is_own:
            # past its buffer: what cannot be written and stays in there changes the exit code of the program
            os.write(file.fileno(), text.encode(file.encoding, "backslashreplace"))
        else:
            file.write(encodable(text, getattr(file, "encoding", None)))
