"""What the scripts share: the environment, how options are read, Python in other processes, what was found as JSON.

Needs nothing but the standard library of any Python 3, since the interpreter of the environment may be another one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GPT, REAL = str(ROOT / "examples" / "train_gpt.py"), ROOT / "tests" / "programs" / "real"
_ASK = '. "$1" && printf "%s\\n%s" "$PYTHON" "${PYTHONPATH-}"'


def enter() -> None:
    """Begin a script anew in the environment of all of them, which is made first if need be, unless it runs there."""
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


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring as it stands there."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def write_json(file: str | None, found: object) -> None:
    """Write to a file, `-`: standard output, None: nowhere; dataclasses become objects."""
    if file is None:
        return
    text = json.dumps(found, indent=1, default=asdict) + "\n"
    if file == "-":
        print(text, end="")
    else:
        Path(file).write_text(text, encoding="utf-8")


def with_packages(folders: Iterable[str | Path]) -> dict[str, str]:
    """This process's variables, with these folders of packages first; no plans are kept, which others would not fit."""
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "STALLOC_CACHE": "off"}


def python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python, whatever its exit code, and keep what it prints; options as of `subprocess.run`."""
    options = {"capture_output": True, "text": True, "check": False} | options
    return subprocess.run([sys.executable, *map(str, words)], **options)


def told_by(program: Path, *arguments: object) -> Any:
    return json.loads(python(program, *arguments, check=True).stdout.splitlines()[-1])


def stalloc(folder: Path, verb: str, *words: str) -> tuple[int, dict[str, Any], float]:
    """The exit code, the object of --json, and the processor seconds of a verb; where it tells nothing, the end."""
    result, begun = folder / f"{verb}.json", os.times()
    result.unlink(missing_ok=True)
    command = ["-P", "-m", "stalloc", verb, "--json", str(result), *words]
    done = python(*command, cwd=folder, env=os.environ | {"STALLOC_CACHE": "off"})
    ended = os.times()
    if not result.exists():
        sys.exit(f"{' '.join([sys.executable, *command])} failed:\n{done.stdout}{done.stderr}")
    seconds = ended.children_user + ended.children_system - begun.children_user - begun.children_system
    return done.returncode, json.loads(result.read_text(encoding="utf-8")), seconds
