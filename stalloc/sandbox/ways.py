"""How this machine lets a program's writes be kept from the user's files; found by trying, in a child, once."""

import contextlib
import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stalloc.errors import SetupError
from stalloc.sandbox import landlock, overlay
from stalloc.sandbox.written import remove

LAYER_PREFIX = "stalloc-layer-"
_DONE = b"\0"


@dataclass(frozen=True)
class Way:
    """What is done with the writes of a program, and why not more."""

    kind: Literal["overlay", "landlock", "none"]
    reason: str = ""  #: what the machine said to a layer; empty where it allows one

    def check(self) -> None:
        """Raise SetupError where nothing keeps writes from files."""
        if self.kind == "none":
            raise SetupError(
                f"{self.sentence()}, so the program is not run: what it wrote would be zeros. Run it where user "
                "namespaces or Landlock are allowed, or with --keep-files in a copy of its folder."
            )

    def sentence(self) -> str:
        return {
            "overlay": "writes go to a temporary layer (mount namespace and overlays)",
            "landlock": f"writes are refused (Landlock), since this machine allows no layer: {self.reason}",
            "none": f"writes cannot be kept from files: this machine allows no layer ({self.reason}) "
            "and has no Landlock",
        }[self.kind]


@functools.cache
def way() -> Way:
    reason = _tried()
    if not reason:
        return Way("overlay")
    return Way("landlock" if landlock.version() > 0 else "none", reason)


def layer_place() -> Path:
    """Where layers lie: in TMPDIR, without it in /tmp, or in /var/tmp where that one is in memory and this is not."""
    if "TMPDIR" in os.environ:
        return Path(tempfile.gettempdir())
    mounts = overlay.mounts()
    for path in (tempfile.gettempdir(), "/var/tmp"):
        real = os.path.realpath(path)
        while real not in mounts and real != "/":
            real = os.path.dirname(real)
        if os.access(path, os.W_OK) and mounts.get(real, ("", False))[0] != "tmpfs":
            return Path(path)
    return Path(tempfile.gettempdir())


def _tried() -> str:
    """Why a layer is not possible; empty if it is."""
    layer = Path(tempfile.mkdtemp(prefix=LAYER_PREFIX, dir=layer_place()))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            overlay.enter(layer)
            with tempfile.TemporaryFile() as file:
                file.write(b"0")
            os.write(writing, _DONE)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(writing, f"{error}"[:1000].encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    remove(layer)
    return "" if said == _DONE else said.decode(errors="replace") or "the process that tried one was killed"
