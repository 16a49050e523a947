"""Verbs of stalloc, each in a process of its own, as users run them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def stalloc(folder: Path, verb: str, *words: str) -> tuple[int, dict[str, Any], float]:
    """The exit code, the object of --json, and the processor seconds of a verb; where it tells nothing, the end."""
    result, begun = folder / f"{verb}.json", os.times()
    result.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "stalloc", verb, "--json", str(result), *words]
    environment = os.environ | {"STALLOC_CACHE": "off"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    ended = os.times()
    if not result.exists():
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    seconds = ended.children_user + ended.children_system - begun.children_user - begun.children_system
    return done.returncode, json.loads(result.read_text(encoding="utf-8")), seconds
