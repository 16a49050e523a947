"""The environment of a Python that finds packages in other folders before its own, as another PyTorch.

Needs nothing but the standard library.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def variables(folders: Iterable[str | Path]) -> dict[str, str]:
    """This process's, with these folders first; no plans are kept, which other packages would not fit."""
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "STALLOC_CACHE": "off"}
