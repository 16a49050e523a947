"""What takes longer than a second says what it is at, on standard error.

Contract: only on a terminal, as one line that goes away again, or stays where escapes are not wanted (NO_COLOR); logs
and pipes get nothing.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

_PATIENCE = 1.0  # seconds


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Say `text` if the block takes longer than a second; what is handed out changes the text."""
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
    """The same in lines, and by no thread: for a process that is forked."""
    if sys.stderr is None or not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"{text} …", file=sys.stderr, flush=True)


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
