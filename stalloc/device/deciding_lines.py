"""The lines of a program that decide by what no kernel computed: counted, told what to read, ended if they never end.

Contract: `take` is called wherever a program learns such a value, and finds the line that does. It counts it, gives
what the user assumes that line to read (`STALLOC_ASSUME`, which `stalloc dryrun --assume` sets), and raises
EndlessLoopError once so many values were taken without any new line that the program has to be waiting for one.
"""

import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import ClassVar

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

    file: str
    """The end of the file's path."""
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
    """The value of STALLOC_ASSUME that has them."""
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
        place = self._place()
        if place is None:
            return None
        assumed = self._assumed_at(place)
        if assumed is not None:
            return assumed
        Decisions.last_place = place
        if place in self._places:
            self._in_a_row += 1
        elif len(self._places) < _MAX_PLACES:
            self._in_a_row = 0
        if place in self._places or len(self._places) < _MAX_PLACES:
            self._places[place] += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            self._end(place)
        return None

    def take_number(self) -> float | None:
        """Count a floating-point number that is taken, which may decide nothing; what it is assumed to be, or None."""
        self._numbers += 1
        place = self._place()
        if place is None:
            return None
        assumed = self._assumed_at(place)
        if assumed is None:
            Decisions.last_place = place
            if self._numbers >= MOST_NUMBERS:
                self._end(place)
        return assumed

    def _assumed_at(self, place: str) -> float | None:
        return next((one.value for one in self._assumed if one.fits(place)), None)

    def _end(self, place: str) -> None:
        self._in_a_row = self._numbers = 0
        raise EndlessLoopError(
            f"{place} reads again and again what the virtual GPU does not compute, so its loop may never end: bound "
            f"the number of steps, or say what it reads with stalloc dryrun --assume {short_place(place)}=1."
        )

    def _place(self) -> str | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(self._skipped):
            if frame.f_code.co_filename.endswith("_tensor_str.py"):
                return None  # to print is not to decide
            frame = frame.f_back
        if frame is None:
            return None  # autograd's own thread repeats what the program's has read
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def listed(self) -> list[Decision]:
        """The places that took what is not certain, those that did most first."""
        return [Decision(place=place, num_reads=num) for place, num in self._places.most_common()]
