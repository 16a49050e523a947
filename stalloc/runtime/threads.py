"""Threads of ours: they work beside the program, and are over when it ends.

Contract: at the end of the interpreter each is stopped between two of its lines, not in the middle of compiling, and
waited for. One that were left would be ended by the interpreter wherever it is, in C++ code too, and take the process
with it.
"""

import _thread
import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from stalloc.held_signals import stops_later

_PATIENCE_SECONDS = 20  # for compiled code, and for LLVM, which have to come to their end first
_LOOK_SECONDS = 0.02  # between two looks at a thread that is to end

_running: dict[int, threading.Event] = {}  # by the number of the thread
_ending = threading.Event()


def start_thread(function: Callable[..., None], *arguments: Any) -> None:
    """Run a function in a thread of its own, which does not keep the program from ending.

    An interruption of `threading.Thread.start` may leave a thread that ends at once, with a message. Raises
    RuntimeError when the interpreter ends.
    """
    if _ending.is_set():
        raise RuntimeError("the program ends")
    _thread.start_new_thread(_run, (function, arguments))


def _run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    number, over = threading.get_ident(), threading.Event()
    _running[number] = over
    try:
        if not _ending.is_set():  # since it was started
            function(*arguments)
    except SystemExit:
        pass  # it was stopped
    finally:
        del _running[number]
        over.set()


def _end(number: int) -> bool:
    """Raise SystemExit in a thread, between two of its lines; whether this was done, and not left to the thread."""
    if stops_later(number):
        return False
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), ctypes.py_object(SystemExit))
    return True


@atexit.register
def _stop() -> None:
    report, missed = sys.unraisablehook, set()

    def hear(unraisable: Any) -> None:
        if unraisable.exc_type is SystemExit and threading.get_ident() in _running:
            missed.add(threading.get_ident())  # it was raised where Python can only report it
        else:
            report(unraisable)

    _ending.set()
    sys.unraisablehook = hear
    threads = list(_running.items())
    for number, _ in threads:
        if not _end(number):
            missed.add(number)  # unless it ends by itself
    end = time.monotonic() + _PATIENCE_SECONDS
    for number, over in threads:
        while not over.wait(_LOOK_SECONDS) and time.monotonic() < end:
            if number in missed:
                missed.discard(number)
                if not _end(number):
                    missed.add(number)


os.register_at_fork(after_in_child=_running.clear)  # the parent's go on there
