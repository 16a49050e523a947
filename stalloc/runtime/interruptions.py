"""Which errors are the program's own: raised where it was interrupted, not by what it was interrupted in.

Contract: signals are handled wherever the main thread is, in the middle of stalloc too; what their handlers raise is
meant for the program, and reaches it.
"""

import signal
from types import CodeType
from typing import TYPE_CHECKING, Any

from stalloc.core.entry import Handler, slow_entry

if TYPE_CHECKING:
    pass


def is_interruption(error: BaseException) -> bool:
    """Whether it is no failure of what was being done: KeyboardInterrupt and the like, or from a handler of signals."""
    if not isinstance(error, Exception):
        return True
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def is_passing(error: BaseException) -> bool:
    """Whether what failed may be tried again: it was interrupted, or called where the stack was nearly used up."""
    return is_interruption(error) or isinstance(error, RecursionError)


def driver_status(error: BaseException) -> int:
    import cupy

    return int(error.status) if isinstance(error, cupy.cuda.runtime.CUDARuntimeError) else 0


def _code(handler: Any) -> CodeType | None:
    function = getattr(handler, "func", handler)  # of functools.partial
    function = getattr(function, "__func__", function)  # of a method
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def persistent_entry(handler: Handler) -> int:
    """A `slow_entry` for what has to be done as a whole, whatever interrupts it, and may be done twice.

    An error of its own is raised where the thread's Python code goes on.
    """

    def again(first: int, second: int, third: int, errors: list[BaseException]) -> int:
        return handler(first, second, third) if is_interruption(errors[-1]) else 0

    return slow_entry(handler, again)
