"""Which stalloc this is: the version, and the commit where it runs from a checkout; and which PyTorch something is of.

The version itself stands in stalloc/__init__.py, from which pyproject.toml reads it too. torch is not imported for its
release. Between releases the same program asks for other memory: 7 % were measured between 2.6 and 2.11.
"""

import importlib.metadata
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from stalloc import __version__
from stalloc.printable import printable


@cache
def full_version() -> str:
    """`0.2.0+g0123456789ab` in a checkout, with `.dirty` behind it if files were changed; else the version alone."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return __version__
    import subprocess

    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or one that does not trust the folder
        return __version__
    return f"{__version__}+g{done.stdout.strip().replace('-', '.')}"


def release_in_use() -> str:
    """The release of the torch that this process has imported; empty if it has none."""
    torch: Any = sys.modules.get("torch")
    return str(torch.__version__) if torch is not None else ""


def release_installed() -> str:
    """The release that this process has imported or would import; empty if there is none."""
    try:
        return release_in_use() or importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def known_release() -> dict[str, Any]:
    return {"torch": release_in_use()} if release_in_use() else {}


def other_release(what: str, made_with: Any, used_with: Any) -> str:
    """The sentence that `what` is of another torch than the one it is used with; empty if not, or if none is known."""
    first, second = (str(release or "").split("+")[0] for release in (made_with, used_with))
    if not first or not second or first == second:
        return ""
    return (
        f"{what} torch {printable(first, 40)}, not torch {printable(second, 40)}: sizes can differ by some per cent "
        "(7 % were measured between 2.6 and 2.11)"
    )
