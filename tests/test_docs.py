"""The pages as a reader uses them: links lead somewhere, commands are known, and answer what the pages show."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_pytest_plugin
from documented import answers, commands, files, typed
from warm_programs import run_file, run_stalloc, run_warm, without_compiling

from stalloc.cli import VERBS, main
from stalloc.fitting import fit_record
from stalloc.planner import plan_record

ROOT = Path(__file__).parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
_LONG = (
    "Use it with CuPy",
    "How large",
    "A large part",
    "From a clean machine",
    "A memory budget",
    "What a program",
    "Ask before",
    "Compare with PyTorch",
    "Memory grows with each step",
    "Guarding GPU memory in CI",
    "Use it on a cluster",
    "Parameters that come and go",
)
_PYTEST = "import sys, pytest; sys.path.insert(0, ''); sys.exit(pytest.main(sys.argv[1:]))"


def with_answers() -> list[object]:
    """The pages that show what commands answer; parts of usage.md and of troubleshooting.md, which stand alone."""
    found = []
    for name, page in PAGES.items():
        for part in page.split("\n## ")[1:] if name.endswith(("troubleshooting.md", "usage.md")) else [page]:
            title = part.splitlines()[0].lstrip("# ")
            if commands(part):
                found.append(pytest.param(part, id=title, marks=[pytest.mark.slow] * title.startswith(_LONG)))
    return found


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
@pytest.mark.parametrize("text", with_answers())
def test_each_command_answers_what_the_page_shows(text: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "recordings").symlink_to(ROOT / "tests" / "recordings")
    for name, content in files(text).items():
        (tmp_path / name).write_text(content)
    dropped = ("STALLOC", "PYTEST", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    for words, shown in commands(text):
        done = answer(words, tmp_path, clean | {"STALLOC_CACHE": "off"}, shows_stacks="by stack" in text)
        error = without_compiling(done.stderr)
        assert done.returncode in (0, 1), done.stdout + error
        assert answers(done.stdout, shown) or answers(done.stdout + error, shown), f"{words}\n{done.stdout}{error}"


def answer(
    words: list[str], folder: Path, variables: dict[str, str], shows_stacks: bool
) -> subprocess.CompletedProcess[str]:
    """What a command of a page does, in a folder; stacks that are shown begin where the interpreter does."""
    given = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    variables = variables | given
    program, *rest = words[len(given) :]
    if program == "pytest":
        options = [*test_pytest_plugin.PLUGIN, "-p", "no:cacheprovider", "--rootdir", str(folder), *rest]
        return run_warm(_PYTEST, *options, folder=folder, variables=variables)
    is_told = "--device" in rest or "STALLOC_DEVICE" in variables
    finds_out = rest[:1] == ["run"] and not is_told  # that there is no GPU, which a fork has already
    if program == "stalloc" and not finds_out and not (shows_stacks and rest[0] == "record"):
        return run_stalloc(*rest, folder=folder, variables=variables)
    if program == "python" and "STALLOC" not in given:  # which is read at the start of one
        return run_file(folder / rest[0], *rest[1:], folder=folder, variables=variables)
    python = {"stalloc": ["-P", "-m", "stalloc"], "python": []}
    command = [sys.executable, *python[program], *rest] if program in python else [program, *rest]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)


def test_links_lead_to_files_and_headings() -> None:
    for name, page in PAGES.items():
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]+))?\)", page):
            file = (ROOT / name).parent / target if target else ROOT / name
            assert file.exists(), f"{name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}, anchor


def test_every_page_has_a_place_in_the_site() -> None:
    placed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")} <= placed


@pytest.mark.parametrize(
    ("part", "said"),
    [("Plans", f"`version` ({plan_record.VERSION})"), ("Fits", f'"{fit_record.FORMAT}", {fit_record.VERSION};')],
)
def test_the_page_of_files_says_the_versions_that_are_written(part: str, said: str) -> None:
    text = PAGES["docs/files.md"].split(f"\n## {part}, ")[1].split("\n## ")[0]
    assert said in text


def test_commands_and_their_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, set[str]] = {}
    for name, page in PAGES.items():
        for verb, *options in typed(page):
            if verb not in known:
                assert verb in VERBS, f"{name}: stalloc {verb}"
                known[verb] = option_strings(verb, capsys)
            assert known[verb].issuperset(options), f"{name}: stalloc {verb} {options}"


def option_strings(verb: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options that the help of a verb names."""
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    return set(re.findall(r"--[\w-]+", capsys.readouterr().out))
