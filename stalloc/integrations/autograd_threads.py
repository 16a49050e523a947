"""PyTorch's autograd threads at the end of a program.

A backward pass returns to the program before the thread that ran it has dropped what it still refers to. If the
interpreter has ended by then, the thread is ended inside a C++ destructor, and with it the process: "terminate called
without an active exception", exit code 134, under any allocator. Contract: once torch is served, a program whose
backward passes are over ends with its own code.
"""

import atexit
import contextlib
import time
from pathlib import Path

_NAME = "pt_autograd"  # and the number of the device
_LOOK_SECONDS = 0.001  # between two looks; Python's lock is free meanwhile
_PATIENCE_SECONDS = 1.0  # a pass that another thread of the program has begun may go on for ever


def wait_at_exit() -> None:
    """Wait at the interpreter's end until these threads are idle, a second at most; once however often it is called."""
    atexit.unregister(_wait)
    atexit.register(_wait)


def _wait() -> None:
    end, seen = time.monotonic() + _PATIENCE_SECONDS, _states()
    while seen and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        before, seen = seen, _states()
        if seen == before and all(state.startswith("State:\tS") for state in seen.values()):
            return


def _states() -> dict[str, str]:
    """By autograd thread, whether it sleeps and how often it has stopped; empty where the system does not say."""
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # that thread has just ended
            lines = status.read_text().splitlines()
            if lines[0].startswith(f"Name:\t{_NAME}"):
                found[status.parent.name] = " ".join(line for line in lines if line.startswith(("State", "voluntary")))
    return found
