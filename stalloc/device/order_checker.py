"""The checker of the order of work: what of a program's work is not ordered by events and waits, told in sentences.

Contract: `OrderChecker(library)` lets the virtual GPU do work late and check all accesses of memory that are known:
copies and fills by the driver, operations of PyTorch and others (`watched_work`), kernels of CuPy by their arguments.
`found()` says what was found, each pair of places once; at the end of the process it is said on standard error, or
added to the file that STALLOC_VIRTUAL_ORDER_LOG names.
"""

import atexit
import ctypes
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from stalloc.figures import human_bytes
from stalloc.notices import say

VARIABLE = "STALLOC_VIRTUAL_ORDER"
LOG = "STALLOC_VIRTUAL_ORDER_LOG"  # for processes whose output somebody else takes
READS, WRITES, IS_NEW = 0, 1, 2  # how memory is accessed, as virtual_order.h has it
_FREES = 4
_STRICT = 3
_AT_A_TIME = 64
_LIBRARIES = ("torch", "functorch", "cupy", "cupyx", "cupy_backends", "triton")
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_PACKAGES = [importlib.util.find_spec(name) for name in ("stalloc", "stalloc.kernels")]  # a checkout has them apart
_OWN = tuple(os.path.dirname(one.origin) + os.sep for one in _PACKAGES if one is not None and one.origin)
_DEVICE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class _Finding(ctypes.Structure):
    """The C side's record: see virtual_order.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kind", "writes", "other_writes", "has_waited")),
        *((name, ctypes.c_uint32) for name in ("place", "other_place")),
        ("num_seen", ctypes.c_uint64),
        *((name, ctypes.c_size_t) for name in ("address", "size_bytes", "stream", "other_stream")),
        *((name, ctypes.c_int) for name in ("device", "other_device")),
        ("call", ctypes.c_char * 64),
    )


@dataclass(frozen=True)
class Finding:
    """One thing that was found, as a sentence, and how often it was seen."""

    text: str
    num_seen: int


class Places:
    """Places of a program, file and line, by number; 0 is none."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._texts = ["work of a library"]
        self._is_programs: dict[str, bool] = {}  # by file
        self.caller = 0  #: of the last backward pass, whose own threads have no lines of the program

    def here(self) -> int:
        """The line of the program that is running in this thread; else the one that it runs for."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            is_programs = self._is_programs.get(file)
            if is_programs is None:
                is_programs = self._is_programs[file] = _is_programs(file)
            if is_programs:
                return self._number(file, frame.f_lineno)
            frame = frame.f_back
        frame = sys._getframe(1)
        while frame is not None:  # a line of stalloc's, outside of this folder
            file = frame.f_code.co_filename
            if file.startswith(_OWN) and not file.startswith(_DEVICE):
                return self._number(file, frame.f_lineno)
            frame = frame.f_back
        return self.caller

    def _number(self, file: str, line: int) -> int:
        number = self._numbers.get((file, line))
        if number is None:
            number = self._numbers[file, line] = len(self._texts)
            self._texts.append(f"{file}:{line}")
        return number

    def text(self, number: int) -> str:
        return self._texts[number]


def _is_programs(file: str) -> bool:
    if file.startswith(("<frozen", "<__array_function__", *_OWN)):
        return False
    for folder in _INSTALLED:
        if file.startswith(folder):
            return not file[len(folder) :].startswith(tuple(f"{name}{os.sep}" for name in _LIBRARIES))
    return not file.startswith(_STANDARD)


class OrderChecker:
    def __init__(self, library: ctypes.CDLL) -> None:
        # functions that are short and wait for nothing are called with Python's lock held
        self._library = ctypes.PyDLL(library._name)
        self.places = Places()
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self.at = self._function("at", ctypes.c_uint32)
        self.makes_all_it_writes = self._function("makes_all_it_writes", ctypes.c_int)
        #: whether what this thread asks for may be in memory of CUDA graphs, which is theirs again later
        self.borrows = self._function("borrows", ctypes.c_int)
        items = size, ctypes.c_int, address, address, ctypes.c_int
        self.touch = self._function("touch", ctypes.c_int, address, address, size, ctypes.c_int)
        self.touch_strided = self._function("touch_strided", ctypes.c_int, address, address, *items)
        self.touch_by_host = self._function("touch_by_host", address, *items)
        self._ask: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_uint32)(self.places.here)
        self._library.stalloc_virtual_set_order(_STRICT)
        self._library.stalloc_virtual_order_ask(self._ask)
        self._is_told = False
        atexit.register(self.end)

    def _function(self, name: str, *types: Any) -> Any:
        function = getattr(self._library, f"stalloc_virtual_order_{name}")
        function.argtypes, function.restype = types, None
        return function

    def found(self) -> list[Finding]:
        found: list[Finding] = []
        while True:
            several = (_Finding * _AT_A_TIME)()
            num = self._library.stalloc_virtual_order_findings(several, len(found), _AT_A_TIME)
            found += [Finding(_sentence(one, self.places), one.num_seen) for one in several[: num - len(found)]]
            if len(found) >= num:
                return found

    def tell(self) -> list[Finding]:
        """Say what was found, once in a process, and return it."""
        found = self.found()
        texts = [f"{one.text}{f' ({one.num_seen} times)' if one.num_seen > 1 else ''}." for one in found]
        if texts and not self._is_told:
            if log := os.environ.get(LOG):
                with open(log, "a", encoding="utf-8") as file:
                    file.writelines(f"{text}\n" for text in texts)
            else:
                for text in texts:
                    say(text)
        self._is_told = True
        return found

    def end(self) -> None:
        self.tell()
        self._library.stalloc_virtual_order_ask(None)


def _stream(handle: int | None, device: int) -> str:
    if not handle:
        return f"the default stream{f' of device {device}' if device else ''}"
    return f"stream {handle:#x}"


def _sentence(one: _Finding, places: Places) -> str:
    call = one.call.decode()
    here, there = places.text(one.place), places.text(one.other_place)
    stream, other = _stream(one.stream, one.device), _stream(one.other_stream, one.other_device)
    what = f"{human_bytes(one.size_bytes)} at {one.address:#x}"
    verb = "frees" if one.writes & _FREES else "writes" if one.writes else "reads"
    pending = "write" if one.other_writes else "read"
    if one.kind in (_RACE, _HANDED_ON):
        start = f"{here} {verb} {what} on {stream} while {there} may still {pending} it on {other}: "
        if one.kind == _HANDED_ON:
            return (
                f"{start}the memory was freed and given to another tensor in between, and no event or wait orders "
                f"{stream} after {other}: call record_stream for {other} on the tensor that {there} uses, or wait for "
                f"{other} before it is freed"
            )
        if one.has_waited:
            return (
                f"{start}{stream} last waited for {other} before that was given to it: record the event that it waits "
                f"for after {there}, on {other}"
            )
        return f"{start}no event or wait orders {stream} after {other}: let it wait (wait_stream, wait_event)"
    if one.kind == _HOST:
        return (
            f"{here} {verb} {what} of pinned host memory while {there} may still {pending} it on {other}: the host has "
            f"not waited for that: synchronize {other}, or an event that is recorded on it after {there}"
        )
    return _OTHERS[one.kind].format(here=here, there=there, stream=stream, other=other, what=what, verb=verb, call=call)


_RACE, _HANDED_ON, _HOST = 1, 2, 3
_OTHERS = {
    4: "{here} {verb} {what} on {stream}, where no memory is mapped",
    5: "{here} {verb} {what} on {stream}, which was freed before",
    6: "{call} takes {what} away at {here} while {there} may still use it on {other}: the host has not waited for that",
    7: "{call} at {here} unmaps {what}, of which a part is not mapped",
    8: "{call} at {here} maps {what}, where something is mapped already",
    9: "{call} at {here} maps {what}, which was not reserved",
    10: "{call} at {here} gives back {what}, of which a part is still mapped",
    11: "{here} uses {stream}, which was destroyed before",
    12: "{here} calls {call} while a graph is captured, which its capture forbids: the capture fails on a GPU",
    13: "{here} launches a graph that {verb} {what}, which was freed after its capture and given to another tensor: "
    "keep the tensors that a graph uses as long as it is launched",
    14: "{here} {verb} {what} on {stream}, which is mapped, but no device was given access to it (cuMemSetAccess)",
}
