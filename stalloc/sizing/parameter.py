"""A parameter of a program that is searched: its name, its values, and where it stands among the program's words."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stalloc.errors import BadInputError

_MOST_VALUES = 1 << 20
_HOW = "write NAME=FIRST..LAST or NAME=FIRST..LAST:STEP, for example batch=1..512"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What `--find` names."""

    name: str
    values: range

    @classmethod
    def parse(cls, text: str) -> "Parameter":
        """What "batch=1..512" or "seq=128..8192:128" says. Raises BadInputError where it says nothing."""
        match = re.fullmatch(r"\s*([A-Za-z_][\w-]{0,63})=(\d{1,12})\.\.(\d{1,12})(?::(\d{1,12}))?\s*", text, re.ASCII)
        if match is None:
            raise BadInputError(f"--find is {text[:60]!r}: {_HOW}, or gpu for the smallest card.")
        first, last, step = int(match[2]), int(match[3]), int(match[4] or 1)
        if step < 1 or last < first:
            raise BadInputError(f"--find is {text[:60]!r}, which has no values: {_HOW}.")
        if (last - first) // step >= _MOST_VALUES:
            raise BadInputError(f"--find is {text[:60]!r}, which has more than a million values: give a step.")
        return cls(name=match[1], values=range(first, last + 1, step))

    @property
    def placeholder(self) -> str:
        return f"{{{self.name}}}"

    def check_in(self, command: Sequence[str]) -> None:
        """Raise BadInputError unless the program has the placeholder among its arguments."""
        if any(self.placeholder in word for word in command):
            return
        others = sorted({found for word in command for found in re.findall(r"\{[A-Za-z_][\w-]*\}", word)})
        has = f"only {' and '.join(others)[:100]}" if others else "nothing of the kind"
        raise BadInputError(
            f"--find looks for {self.name}, but the program's arguments have no {self.placeholder}, {has}: write it "
            f"where the value belongs, for example --{self.name} {self.placeholder}."
        )

    def filled(self, command: Sequence[str], value: int) -> list[str]:
        return [word.replace(self.placeholder, str(value)) for word in command]

    def label(self, value: int) -> str:
        return f"{self.name}={value}"


def last_enough(num: int, enough: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """The last of `num` places in a row that is enough, -1 if the first is not; `enough` tries several side by side.
    That one is enough and the next is not was tried, and no place after one that is not enough may be enough again, as
    with tokens in a cache whose program's weights and activations grow with the value, or cards by their memory."""
    low, high = -1, num
    while high - low > 1:
        third = max((high - low) // 3, 1)
        places = sorted({low + third, high - third} - {low, high})
        for place, is_enough in zip(places, enough(places), strict=True):
            if is_enough:
                low = max(low, place)
            else:
                high = min(high, place)
                break
    return low
