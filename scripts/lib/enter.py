"""Lets a Python script run as it is from a fresh checkout: it goes on in the environment that the other scripts use.

Needs nothing but the standard library of any Python 3, since the interpreter of the environment may be another one.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ASK = '. "$1" && printf "%s\\n%s" "$PYTHON" "${PYTHONPATH-}"'


def environment() -> None:
    """Begin the script anew in the environment, which is made first if need be; nothing to do where it runs there."""
    here = str(Path(sys.argv[0]).resolve().parent)
    if here not in sys.path:
        sys.path.insert(0, here)  # the script's own modules, which `python -P` leaves out
    is_shown = str(ROOT / ".venv-source") in sys.path and importlib.util.find_spec("torch") is not None
    if Path(sys.prefix) == ROOT / ".venv" or is_shown:  # what a shell exported may show it to another Python too
        return
    asked = subprocess.run(
        ["bash", "-c", _ASK, "bash", str(ROOT / "scripts" / "lib" / "environment.sh")],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if asked.returncode:
        raise SystemExit(asked.returncode)  # it has said why
    python, path = asked.stdout.split("\n")
    more = {"PYTHONPATH": path} if path else {}
    os.execve(python, [python, "-P", *sys.argv], {**os.environ, **more})
