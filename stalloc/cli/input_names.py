"""Names of files as a user gives them: a quoted pattern such as 'run/*/snapshot.pickle' stands for many."""

import glob
import os
import re
from collections.abc import Sequence

from stalloc.errors import BadInputError
from stalloc.inputs import is_remote, matching

_NUMBER = re.compile(r"(\d+)")


def expand_patterns(names: Sequence[str]) -> list[str]:
    """All names, patterns (`*`, `?`, `[…]`, `**`) replaced by what matches, rank2 before rank10.

    A file whose own name looks like a pattern is itself. Raises BadInputError for a pattern that matches nothing.
    """
    found: list[str] = []
    for name in names:
        if not glob.has_magic(name) or os.path.lexists(name):
            found.append(name)
            continue
        matches = matching(name) if is_remote(name) else glob.glob(name, recursive=True)
        if not matches:
            raise BadInputError(f"no file matches {name}: check the pattern.")
        found += sorted(matches, key=_by_number)
    return found


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in _NUMBER.split(name)]
