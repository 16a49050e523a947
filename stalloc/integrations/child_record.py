"""A process that a guarded test started: what it allocates is recorded, and left as a trace when it ends.

Contract: the process ends as it would have; what goes wrong here is one sentence.
"""

import atexit
import os
import sys

from stalloc.integrations.native_history import NativeHistory
from stalloc.notices import say
from stalloc.printable import printable


def follow(folder: str) -> None:
    """Record from here on."""
    history = NativeHistory()
    history.begin()
    atexit.register(_leave, history, folder, os.getpid())


def _leave(history: NativeHistory, folder: str, process: int) -> None:
    if os.getpid() != process or not os.path.isdir(folder):
        return  # a child of fork, or one that outlived its test
    from stalloc.trace import save_traces

    try:
        command = printable(" ".join(sys.argv)[:200]) or "python"
        traces = history.traces(command)
        if traces:
            named = [trace.replace(info=trace.info | {"process": command}) for trace in traces]
            save_traces(os.path.join(folder, f"{process}.trace.npz"), named)
    except Exception as error:
        say(f"what this process allocated is not recorded for its test: {type(error).__name__}: {error}")
