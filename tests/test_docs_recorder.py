"""docs/flight-recorder.md and docs/settings.md: every command is executed, and answers what the pages show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documented import answers, commands, files
from warm_programs import run_stalloc, without_compiling

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["flight-recorder.md", "settings.md"])
def test_each_command_answers_what_the_page_shows(tmp_path: Path, name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    for file, text in files(page).items():
        (tmp_path / file).write_text(text)
    clean = {key: value for key, value in os.environ.items() if not key.endswith("ALLOC_CONF") and key != "STALLOC"}
    variables = clean | {"STALLOC_CACHE": "off"}
    found = commands(page)
    assert found
    for words, shown in found:
        if words[0] == "stalloc" and words[1] != "record":  # stacks begin where the interpreter does
            done = run_stalloc(*words[1:], folder=tmp_path, variables=variables)
        else:
            given = dict(word.split("=", 1) for word in words if "=" in word)
            rest = [word for word in words if "=" not in word]
            command = [sys.executable, *(["-P", "-m", *rest] if rest[0] == "stalloc" else rest[1:])]
            done = subprocess.run(
                command, cwd=tmp_path, env=variables | given, capture_output=True, text=True, timeout=300, check=False
            )
        said = done.stdout + without_compiling(done.stderr)
        assert done.returncode in (0, 1), said
        assert answers(said, shown), f"{' '.join(words)}\n{said}"
