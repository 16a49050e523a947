"""What a program promises of its CUDA graphs, so that their pools may share memory, and lend it between replays.

Contract: nothing is inferred. Pools are one only if the program says so, and only those that are new meanwhile; a pool
that is there already stays as it is. Without stalloc the promises change nothing.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stalloc import device as devices
from stalloc.integrations.installation import installation
from stalloc.integrations.installing import current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stalloc.device.order_checker import OrderChecker


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


@contextmanager
def borrow_graph_memory() -> Iterator[None]:
    """Serve what this thread asks for meanwhile from memory that CUDA graphs leave idle until they are replayed.

    It serves requests on the stream that the graphs are replayed on, of the device that is current now; what they
    leave is where no tensor lives in their pools. Other requests, and those for which there is no room, are served as
    ever, and so are all of a thread while another one borrows on this device. The program promises:

    - that nothing allocated inside lives when a graph of that pool is replayed, or any is captured. If something does,
      that raises GraphMemoryError (a RuntimeError) with the line that allocated it, and nothing is replayed;
    - that all graphs of the pool are replayed by `torch.cuda.CUDAGraph.replay`;
    - that an output of which it holds no tensor (a weak reference, an address) has been read before.

    May be nested. Where the replays were on another stream, it waits for the device when it begins.
    """
    runtime, torch = current(), sys.modules.get("torch")
    if runtime is None or installation.replays is None or torch is None or not torch.cuda.is_initialized():
        yield
        return
    installation.replays.heed()
    device = torch.cuda.current_device()
    loans = runtime.controllers[device].captures.loans
    runtime.begin_borrowing()
    try:
        begins = loans.begin(torch._C._cuda_getCurrentRawStream(device))
        checker = _order_checker() if begins else None
        try:
            if checker is not None:
                checker.borrows(True)
            yield
        finally:
            if begins:
                loans.end()
            if checker is not None:
                checker.borrows(False)
    finally:
        runtime.end_borrowing()


def _order_checker() -> "OrderChecker | None":
    """Who checks the order of work here, and would miss that memory is lent."""
    if devices.active() != "virtual":
        return None
    from stalloc.device.virtual import order_checker

    return order_checker()
