"""What starts stalloc in a process that is to be served from its first use of CUDA on, as `stalloc run` wants it.

Contract: it is done once, by whoever comes first: the program, where it uses CUDA, or a call of stalloc's that needs
the runtime. Until then no driver is asked for anything, so the environment is the program's to set.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # a start of Python under STALLOC=1 loads this
    from collections.abc import Callable

_awaited: "list[Callable[[], object]]" = []  # one, or none


def await_use(start: "Callable[[], object]") -> None:
    """Have `start` be called when stalloc is needed."""
    _awaited[:] = [start]


def is_awaited() -> bool:
    return bool(_awaited)


def begin() -> bool:
    """It is needed now: start it, if it is awaited; whether it was."""
    start = _awaited.pop() if _awaited else None
    if start is not None:
        start()
    return start is not None
