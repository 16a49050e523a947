"""Progress on standard error, for work that takes longer than a second.

Contract: on a terminal as one line that goes away again, or stays where escapes are not wanted (NO_COLOR); pipes get
nothing. Verbs that run a program many times, which may take minutes, say plain lines: on a terminal one for each step,
in logs and pipes one a second at the most.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

_PATIENCE = 1.0  # seconds


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Say `text` if the block takes longer than a second; the context gives a function that changes the text."""
    shown = [text]
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda new: None
        return
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(shown, over), daemon=True)
    teller.start()
    try:
        yield lambda new: shown.__setitem__(0, new)
    finally:
        over.set()
        teller.join()


def lines_told() -> Callable[[str], None]:
    """A function that says a text in a line of its own; it needs no thread, so the process may be forked."""
    if sys.stderr is None:
        return lambda text: None
    last = [-_PATIENCE]

    def tell(text: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() or now - last[0] >= _PATIENCE:
            last[0] = now
            print(f"{text} …", file=sys.stderr, flush=True)

    return tell


def _tell(shown: list[str], over: threading.Event) -> None:
    if over.wait(_PATIENCE):
        return
    if os.environ.get("NO_COLOR"):
        print(shown[0], file=sys.stderr, flush=True)
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(shown[0]) as status:
        while not over.wait(0.2):
            status.update(shown[0])
