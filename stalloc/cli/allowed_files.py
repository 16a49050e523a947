"""Which files `stalloc mcp` opens: those in the folders that the user allowed, wherever links lead.

Contract: what `allowed_file` returns is a regular file whose real path lies in one of the folders.
"""

from collections.abc import Sequence
from pathlib import Path

from stalloc.errors import BadInputError
from stalloc.printable import printable


def allowed_folders(names: Sequence[str]) -> list[Path]:
    """The folders by their real paths. Raises BadInputError where one is none."""
    for name in names:
        if not Path(name).is_dir():
            raise BadInputError(f"--allow is {printable(name)}, which is no folder: give one that has your files.")
    return [Path(name).resolve() for name in names]


def allowed_file(name: str, folders: Sequence[Path]) -> Path:
    """The real path of a file, relative names being in the first folder. Raises BadInputError if it is not allowed.

    Whether a file outside exists is not told.
    """
    path = (folders[0] / name).resolve() if "\0" not in name else Path("/")
    if not any(path.is_relative_to(folder) for folder in folders):
        raise BadInputError(
            f"{printable(name)} is not in the folders that this server may read: ask the user for a file in "
            f"{', '.join(printable(str(folder)) for folder in folders)}, or to start it with another --allow FOLDER."
        )
    if not path.is_file():
        raise BadInputError(f"there is no file {printable(name)}: relative names are in {printable(str(folders[0]))}.")
    return path
