"""What must not be left in the middle by a handler of the program's signals: compiling, and loading what is compiled.

Contract: handlers of the program run once it is over, one call for each signal that came, and what they raise goes to
the program from there. LLVM calls Python back and has no use for an error there, and numba takes any for one of its
own: an exception of a time-out that came meanwhile was lost, or the process ended. Nor is a thread of ours stopped
there, whose end the interpreter waits for: LLVM's memory would be given back twice.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_NUMBERS = sorted(signal.valid_signals())
_Result = TypeVar("_Result")


class _Inside:
    """A thread other than the main one that is not to be left in the middle."""

    stops = False  # once it may be


_inside: dict[int, _Inside] = {}  # by the number of the thread
os.register_at_fork(after_in_child=_inside.clear)  # the parent's go on there


def stops_later(number: int) -> bool:
    """Whether a thread is not to be left now; then it raises SystemExit as soon as it may be."""
    inside = _inside.get(number)
    if inside is not None:
        inside.stops = True
    return inside is not None


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
