"""The lines of a program that decide by what no kernel computed: counted, told what to read, ended if they never end.

Contract: `take` is called wherever a program learns such a value, and finds the line that does. It counts it, gives
what the user assumes that line to read (`STALLOC_ASSUME`, which `stalloc dryrun --assume` sets), and raises
EndlessLoopError once so many values were taken without any new line that the program has to be waiting for one.

Reads of CuPy's arrays give what they gave, and make the requests that they made. A truth value, an integer, or elements
of integers and booleans that are not just what the program uploaded itself are a decision. Printing an array is none.
What CuPy reads itself to know how large a result is (`nonzero`, masks, `unique`) comes this way too.
"""

import contextlib
import ctypes
import functools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

from stalloc.errors import BadInputError, EndlessLoopError

VARIABLE = "STALLOC_ASSUME"
MOST_IN_A_ROW = 100_000  # values taken without a new line that takes one
MOST_NUMBERS = 1_000_000  # floating-point numbers read: most programs only print those
_MAX_PLACES = 64
_WORDS = {"true": 1, "false": 0}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Reads, at one place of a program, of integers or booleans that follow from what no kernel computed."""

    place: str
    num_reads: int


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """What a line of a program is to read where no kernel computed it."""

    file: str  #: the end of its path
    line: int
    value: float

    def fits(self, place: str) -> bool:
        """Whether a place is the one that is meant."""
        return place == f"{self.file}:{self.line}" or place.endswith(f"/{self.file}:{self.line}")


def parse_assumption(text: str) -> Assumption:
    """What "train.py:88=1" says. Raises BadInputError where it says nothing."""
    match = re.fullmatch(r"(.+):(\d{1,9})=\s*(true|false|-?\d{1,18}(?:\.\d{1,18})?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise BadInputError(f"{text[:80]!r} assumes nothing: write FILE:LINE=NUMBER, for example train.py:88=1.")
    word = match[3].lower()
    return Assumption(file=match[1], line=int(match[2]), value=float(_WORDS.get(word, word)))


def as_variable(assumptions: Iterable[Assumption]) -> str:
    return json.dumps([f"{one.file}:{one.line}={one.value:f}" for one in assumptions])


def last_place() -> str | None:
    """Where the program read what no kernel computed last, and nothing is assumed."""
    return Decisions.last_place


def short_place(place: str) -> str:
    """A place as --assume takes it: the last two parts of its path."""
    return "/".join(place.split("/")[-2:])


class Decisions:
    """The decisions of this process; `skipped` are the folders whose lines are not the program's."""

    last_place: ClassVar[str | None] = None  #: of CuPy's decisions and PyTorch's together

    def __init__(self, skipped: tuple[str, ...]) -> None:
        self._skipped = (*skipped, contextlib.__file__)  # whose decorators call what they decorate
        self._places: Counter[str] = Counter()
        self._in_a_row = self._numbers = 0
        text = os.environ.get(VARIABLE, "")
        self._assumed = [parse_assumption(one) for one in json.loads(text)] if text else []

    def take(self) -> float | None:
        """Count a value that is taken now; what the line is assumed to read, None if nothing is assumed."""
        place, assumed = self._place()
        if place is not None and assumed is None:
            if place in self._places:
                self._in_a_row += 1
            elif len(self._places) < _MAX_PLACES:
                self._in_a_row = 0
            if place in self._places or len(self._places) < _MAX_PLACES:
                self._places[place] += 1
            if self._in_a_row >= MOST_IN_A_ROW:
                self._end(place)
        return assumed

    def take_number(self) -> float | None:
        """Count a floating-point number that is taken, which may decide nothing; what it is assumed to be, or None."""
        self._numbers += 1
        place, assumed = self._place()
        if place is not None and assumed is None and self._numbers >= MOST_NUMBERS:
            self._end(place)
        return assumed

    def _end(self, place: str) -> None:
        self._in_a_row = self._numbers = 0
        raise EndlessLoopError(
            f"{place} reads again and again what the virtual GPU does not compute, so its loop may never end: bound "
            f"the number of steps, or say what it reads with stalloc dryrun --assume {short_place(place)}=1."
        )

    def _place(self) -> tuple[str | None, float | None]:
        """The line that takes a value, and what it is assumed to read."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(self._skipped):
            if frame.f_code.co_filename.endswith("_tensor_str.py"):
                return None, None  # to print is not to decide
            frame = frame.f_back
        if frame is None:
            return None, None  # autograd's own thread repeats what the program's has read
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        assumed = next((one.value for one in self._assumed if one.fits(place)), None)
        if assumed is None:
            Decisions.last_place = place
        return place, assumed

    def listed(self) -> list[Decision]:
        return [Decision(place=place, num_reads=num) for place, num in self._places.most_common()]


_DECIDING = ("__bool__", "__int__", "__index__")
_READING = (*_DECIDING, "__float__", "item", "tolist", "get")
_SHOWING = ("__repr__", "__str__", "__format__")
_NUMBER_BYTES = 16  # a copy so short may be of another number that was at this address before
_MOST_BYTES = 1 << 20  # larger copies are not made


def count_cupy_reads(cupy: Any, library: ctypes.CDLL) -> Decisions:
    """Count the decisions that a program takes on CuPy's arrays from now on."""
    folder = os.path.dirname(cupy.__file__)
    parts = (os.path.join(os.path.dirname(folder), name) for name in ("cupyx", "cupy_backends"))
    decisions = Decisions((folder, *parts, os.path.dirname(__file__)))
    is_inside = False  # only the outermost call counts, as they are made of each other

    def was_uploaded(array: Any) -> bool:
        num_bytes = int(array.nbytes)
        if num_bytes == 0:
            return True
        if not _NUMBER_BYTES < num_bytes <= _MOST_BYTES or not array.flags.forc:
            return False
        there, pointer = ctypes.create_string_buffer(num_bytes), ctypes.c_void_p(array.data.ptr)
        return bool(library.stalloc_virtual_copied(pointer, ctypes.c_size_t(num_bytes), there))

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def read(array: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            before, is_inside = is_inside, True
            try:
                result = function(array, *args, **kwargs)
            finally:
                is_inside = before
            if before or name in _SHOWING:
                return result
            if name in _DECIDING or array.dtype.kind in "biu":
                assumed = None if was_uploaded(array) else decisions.take()
            else:
                assumed = decisions.take_number() if array.size == 1 else None
            return result if assumed is None else _like(result, assumed)

        return read

    for name in (*_READING, *_SHOWING):
        if (function := getattr(cupy.ndarray, name, None)) is not None:
            setattr(cupy.ndarray, name, counted(name, function))
    return decisions


def _like(result: Any, number: float) -> Any:
    if isinstance(result, (bool, int, float)):
        return type(result)(number)
    if hasattr(result, "fill"):
        result.fill(number)
    return result
