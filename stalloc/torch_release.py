"""Which PyTorch something was recorded or made with, and the sentence for where another one is at work.

Contract: torch is not imported for it. Between releases the same program asks for other memory: 7 % were measured
between 2.6 and 2.11.
"""

import importlib.metadata
import sys
from typing import Any

from stalloc.printable import printable


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
    """What a recording says of the torch of this process: nothing if none is imported."""
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
