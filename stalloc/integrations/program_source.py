"""The file that says what a program is, by its command line or in the process that runs it.

Contract: whatever cannot be read whole, such as a pipe or a prompt, is no program that can be known again.
"""

import contextlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from stalloc.errors import BadInputError


@dataclass(frozen=True)
class ProgramSource:
    """A script, or the main module of a package, with the arguments that it is given."""

    path: Path
    content: bytes
    arguments: list[str]

    @property
    def name(self) -> str:
        """What people call it: the script without .py, or the package."""
        return self.path.parent.name if self.path.stem == "__main__" else self.path.stem


def of_command(command: list[str]) -> ProgramSource | None:
    """The program that is given as Python would be: [SCRIPT, ARGS…] or [-m, MODULE, ARGS…]; None if no file says it."""
    if command[0] != "-m":
        return _read(command[0], command[1:])
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` has it
    try:
        spec = importlib.util.find_spec(command[1])
        if spec is not None and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{command[1]}.__main__")
    except (ImportError, ValueError):
        return None
    finally:
        sys.path.remove(here)
    return _read(spec.origin if spec is not None else None, command[2:])


def in_file(command: list[str]) -> ProgramSource:
    """The program that a command names, which has to be in a file. Raises BadInputError if it is not."""
    source = of_command(command)
    if source is None:
        raise BadInputError(f"{command[-1][:200]} is no program in a file: give a script, or -m and a module.")
    return source


def of_this_process() -> ProgramSource | None:
    """The program that this interpreter runs; None too for what was typed in or given with -c."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if not script or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return None
    return _read(script, sys.argv[1:])


def _read(script: str | None, arguments: list[str]) -> ProgramSource | None:
    with contextlib.suppress(OSError):
        path = Path(script or "").resolve()
        if path.is_file():  # a pipe has been read already
            return ProgramSource(path, path.read_bytes(), arguments)
    return None
