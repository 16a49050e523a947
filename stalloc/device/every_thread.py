"""A dispatch mode of PyTorch that is in force in every thread."""

import sys
import threading
from collections.abc import Callable
from typing import Any


def enter_in_every_thread(mode: Callable[[], Any]) -> None:
    """Enter a mode in this thread, and a new one in each thread that begins later."""

    def begin_in_thread(*_: Any) -> None:
        sys.setprofile(None)
        mode().__enter__()

    mode().__enter__()
    threading.setprofile(begin_in_thread)
