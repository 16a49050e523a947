"""What takes longer than a second says what it is at, on standard error.

Contract: on a terminal it is one line, after a second, that goes away again; elsewhere a sentence for each thing that
is done, from the fifth second on, for whoever reads the log of a job. What is over by then says nothing.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from stalloc.notices import say

_PATIENCE, _PATIENCE_OF_LOGS = 1.0, 5.0  # seconds


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Say `text` if the block takes longer than a second; what is handed out changes the text."""
    shown = [text]
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(shown, over), daemon=True)
    teller.start()
    try:
        yield lambda new: shown.__setitem__(0, new)
    finally:
        over.set()
        teller.join()


def _tell(shown: list[str], over: threading.Event) -> None:
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if over.wait(_PATIENCE if is_terminal else _PATIENCE_OF_LOGS):
        return
    if not is_terminal:
        _tell_log(shown, over)
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(shown[0]) as status:
        while not over.wait(0.2):
            status.update(shown[0])


def _tell_log(shown: list[str], over: threading.Event) -> None:
    said = ""
    while not over.is_set():
        if said != shown[0]:
            said = shown[0]
            say(f"{said} …")
        over.wait(_PATIENCE)
