"""How much of a snapshot is walked: a pickle may hold one list under many names, and so be larger than its file."""

from pathlib import Path
from typing import Any

from stalloc.errors import BadInputError


class Budget:
    """Items that may still be walked."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path, self._left = path, num_bytes + 1000

    def spend(self, items: Any) -> list[Any]:
        if not isinstance(items, list | tuple):
            raise TypeError(f"a {type(items).__name__} where a list belongs")
        self._left -= len(items)
        if self._left < 0:
            raise BadInputError(f"{self._path}: the pickle repeats its contents endlessly: give an intact snapshot.")
        return list(items)
