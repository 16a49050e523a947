"""Which stalloc this is: the version, and the commit where it runs from a checkout.

The version itself stands in stalloc/__init__.py, from which pyproject.toml reads it too.
"""

import os
import subprocess
from functools import cache
from pathlib import Path

from stalloc import __version__


@cache
def full_version() -> str:
    """`0.2.0+g0123456789ab` in a checkout, with `.dirty` behind it if files were changed; else the version alone."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return __version__
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or one that does not trust the folder
        return __version__
    return f"{__version__}+g{done.stdout.strip().replace('-', '.')}"
