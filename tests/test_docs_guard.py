"""docs/guard.md: every command is executed, in the order of the page, and answers what the page shows."""

import os
import subprocess
from pathlib import Path

import pytest
import test_pytest_plugin
from documented import answers, commands, files
from warm_programs import run_stalloc, run_warm

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PAGE = (Path(__file__).parents[1] / "docs" / "guard.md").read_text(encoding="utf-8")
_PYTEST = "import sys, pytest; sys.path.insert(0, ''); sys.exit(pytest.main(sys.argv[1:]))"


def test_each_command_answers_what_the_page_shows(tmp_path: Path) -> None:
    for name, text in files(PAGE).items():
        (tmp_path / name).write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STALLOC", "PYTEST"))}
    variables = kept | {"STALLOC_CACHE": "off"}
    ran = set()
    for words, shown in commands(PAGE):
        if words[0] == "pytest":
            options = [*test_pytest_plugin.PLUGIN, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *words[1:]]
            done = run_warm(_PYTEST, *options, folder=tmp_path, variables=variables)
        elif words[0] == "stalloc":
            done = run_stalloc(*words[1:], folder=tmp_path, variables=variables)
        else:
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        assert answers(done.stdout, shown), f"{' '.join(words)}\n{done.stdout}"
        ran.add(words[0])
    assert ran == {"pytest", "stalloc", "sed"}
