"""Compiled code: a first use that takes long says why, on a terminal only."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest


def _said(cache: Path, terminal: bool) -> str:
    """What a program that uses the compiled core says on its standard error."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", "import stalloc.core.requests"]
    process = subprocess.Popen(command, stderr=theirs, env={**os.environ, "NUMBA_CACHE_DIR": str(cache)})
    assert process.wait(timeout=300) == 0
    os.write(theirs, b"|")
    said = os.read(ours, 1000).decode()
    os.close(ours)
    os.close(theirs)
    return said


@pytest.mark.slow
def test_a_first_use_that_has_to_compile_says_so_once_and_only_on_a_terminal(tmp_path: Path) -> None:
    first, again = _said(tmp_path / "a", terminal=True), _said(tmp_path / "a", terminal=True)
    assert first.count("stalloc: compiling") == 1
    assert again == "|"
    assert _said(tmp_path / "b", terminal=False) == "|"
