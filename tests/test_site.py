"""The documentation site is built without a warning. Where MkDocs is not there, test_docs.py follows links at least."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site is built with MkDocs: ./scripts/site installs it")
    pytest.importorskip(
        "mkdocstrings_handlers.python", reason="the site is built with MkDocs: ./scripts/site installs it"
    )
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stalloc dryrun" in (tmp_path / "commands.html").read_text()
    assert "flight_recorder" in (tmp_path / "python.html").read_text()
