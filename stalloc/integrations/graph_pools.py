"""What a program promises of its CUDA graphs, so that their pools may share memory.

Contract: nothing is inferred. Pools are one only if the program says so, and only those that are new meanwhile; a pool
that is there already stays as it is. Without stalloc the promise changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from stalloc.integrations.installing import current


@contextmanager
def exclusive_graphs() -> Iterator[None]:
    """Let graphs that are captured meanwhile share memory, though they do not share a pool of torch's.

    The program promises of these graphs what torch asks of graphs in one pool: no two run at once, and the output of
    one that is not kept during later captures is read before another is replayed. It holds for all devices and threads
    of the process. May be nested, and used again: each outermost use makes a pool of its own.
    """
    runtime = current()
    controllers = runtime.controllers if runtime is not None else []
    for controller in controllers:
        controller.captures.begin_sharing()
    try:
        yield
    finally:
        for controller in controllers:
            controller.captures.end_sharing()
