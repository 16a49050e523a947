"""Threads of ours, which are over when the program ends, and what neither they nor signals leave in the middle.

Contract: at the end of the interpreter each thread of ours is stopped between two of its lines, and waited for. One
that were left would be ended by the interpreter wherever it is, in C++ code too, and take the process with it.
Compiling, and loading what is compiled, is done as a whole: handlers of the program's signals run once it is over, one
call for each signal that came, and what they raise goes to the program from there. LLVM calls Python back and has no
use for an error there, and numba takes any for one of its own: an exception of a time-out that came meanwhile was lost,
or the process ended. Nor is a thread of ours stopped there: LLVM's memory would be given back twice.
"""

import _thread
import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_NUMBERS = sorted(signal.valid_signals())
_Result = TypeVar("_Result")


class _Inside:
    """A thread other than the main one that is not to be left in the middle."""

    stops = False  # once it may be


_inside: dict[int, _Inside] = {}  # by the number of the thread
os.register_at_fork(after_in_child=_inside.clear)  # the parent's go on there


def _as_a_whole(function: Callable[..., _Result], *arguments: Any) -> _Result:
    number = threading.get_ident()
    if number in _inside:
        return function(*arguments)
    inside = _inside[number] = _Inside()
    try:
        return function(*arguments)
    finally:
        _inside.pop(number, None)
        if inside.stops:
            raise SystemExit


def uninterrupted(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function; signals wait until it has returned. Python handles them in its main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return _as_a_whole(function, *arguments)
    arrived: list[int] = []

    def note(number: int, frame: object) -> None:
        arrived.append(number)

    handlers: dict[int, Any] = {}
    try:
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler  # first: an interruption may come in between
                signal.signal(number, note)
        return function(*arguments)
    finally:
        _restore(handlers, note)
        _raise_again(arrived)


def _restore(handlers: dict[int, Any], note: Callable[..., None]) -> None:
    try:
        for number, handler in handlers.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
    except BaseException:
        _restore(handlers, note)
        raise


def _raise_again(numbers: list[int]) -> None:
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_again(numbers[1:])


_POLICY = "OMP_WAIT_POLICY"


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """What is loaded within waits without keeping a processor busy, unless the user has said how.

    OpenMP reads its variables once, when it is loaded; none is left behind, so that a program sees those that it was
    given. Threads that spin while they wait make three quarters of what a virtual GPU takes to initialise the weights
    of a model on two processors.
    """
    if _POLICY in os.environ:
        yield
        return
    os.environ[_POLICY] = "passive"
    try:
        yield
    finally:
        os.environ.pop(_POLICY, None)


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
    if (inside := _inside.get(number)) is not None:  # then it does so as soon as it may
        inside.stops = True
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
