"""docs/troubleshooting.md: every command is executed, in the order of the page, and answers what the page shows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented import commands
from warm_programs import run_stalloc

pytestmark = pytest.mark.usefixtures("cupy_installed", "cuda_torch")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = {text.splitlines()[0]: text for text in PAGE.split("\n## ")[1:]}
QUESTIONS = {
    "Out of memory, although as much is free",
    "A large part is reserved but unallocated",
    "How large a batch fits",
    "Memory grows with each step",
    "Out of memory after hours",
    "There is only the text of the error",
}


def test_the_page_answers_the_six_questions() -> None:
    assert set(SECTIONS) == QUESTIONS
    assert all(commands(section) for section in SECTIONS.values())


_LONG = ("How large a batch fits", "A large part is reserved but unallocated")


@pytest.mark.parametrize(
    "question",
    [pytest.param(question, marks=[pytest.mark.slow] * (question in _LONG)) for question in sorted(QUESTIONS)],
)
def test_each_command_answers_what_the_page_shows(question: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name, text in re.findall(r"`(\S+)` holds this line[^\n]*\n\n```text\n(.*?)```", SECTIONS[question], re.DOTALL):
        (tmp_path / name).write_text(text)
    clean = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    for words, lines in commands(SECTIONS[question]):
        assert words[0] == "stalloc"
        variables = {**clean, "STALLOC_CACHE": "off"}
        if words[1] == "record":  # stacks begin where the interpreter does
            command = [sys.executable, "-m", *words]
            done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        else:
            done = run_stalloc(*words[1:], folder=tmp_path, variables=variables)
        assert done.returncode in (0, 1), done.stderr
        assert [line.rstrip() for line in done.stdout.splitlines()] == lines, " ".join(words)
