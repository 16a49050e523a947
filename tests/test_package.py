"""The package as a user meets it first: a light import, a version, help that tells exit codes and --json."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from warm_programs import run_stalloc

import stalloc
from stalloc.cli import VERBS

HEAVY = ("torch", "cupy", "numba", "llvmlite", "matplotlib", "pandas")


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


def test_import_loads_no_heavy_library() -> None:
    code = f"import stalloc, sys, json; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_every_public_name_can_be_used() -> None:
    code = "import stalloc; print([n for n in stalloc.__all__ if getattr(stalloc, n) is None])"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = stalloc.nonsense


def test_every_package_is_installed() -> None:
    root = Path(__file__).parents[1]
    named = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(file.parent.relative_to(root).parts) for file in (root / "stalloc").rglob("__init__.py")}
    assert sorted(named) == sorted({*there, "stalloc.kernels", "stalloc.writers.page.assets"})


def test_kernels_are_installed_below_stalloc() -> None:
    done = run_python("-P", "-c", "import stalloc.kernels")
    assert done.returncode == 0, done.stderr


def test_version_is_that_of_the_package() -> None:
    done = run_python("-m", "stalloc", "--version")
    assert done.returncode == 0
    assert re.fullmatch(rf"stalloc {re.escape(stalloc.__version__)}(\+g[0-9a-f]{{12,40}}(\.dirty)?)?\n", done.stdout)


def test_the_version_of_a_checkout_names_its_state(tmp_path: Path) -> None:
    def version() -> str:
        done = run_python("-P", "-m", "stalloc", "--version", PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().removeprefix(f"stalloc {stalloc.__version__}")

    def git(*words: str) -> str:
        identity = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    shutil.copytree(Path(stalloc.__file__).parent, tmp_path / "stalloc", ignore=shutil.ignore_patterns("__pycache__"))
    assert version() == ""
    git("init")
    git("add", "stalloc/__init__.py")
    git("commit", "-m", "First")
    assert version() == f"+g{git('rev-parse', 'HEAD')[:12]}"
    with (tmp_path / "stalloc/__init__.py").open("a") as file:
        file.write("# changed\n")
    assert version() == f"+g{git('rev-parse', 'HEAD')[:12]}.dirty"


def test_stalloc_alone_shows_the_verbs() -> None:
    done = run_python("-m", "stalloc")
    assert (done.returncode, done.stdout) == (2, "")
    assert all(f"  {verb} " in done.stderr for verb in VERBS)


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_what_needs_no_verb_loads_none(option: str) -> None:
    code = f"""
import sys
from stalloc.cli import main
try:
    main([{option!r}])
finally:
    print(*sorted({{name.partition(".")[0] for name in sys.modules}}), file=sys.stderr)
"""
    done = run_python("-c", code)
    assert done.returncode == 0
    assert "stalloc" in done.stderr.split()
    assert {"numpy", "rich", "numba", "networkx"}.isdisjoint(done.stderr.split())


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_documents_json_and_exit_codes(verb: str) -> None:
    done = run_stalloc(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert ("--json FILE" in done.stdout) == (verb != "mcp")  # which speaks JSON anyway
    codes = "0 done, 1 a check failed, 2 bad input or usage"
    if verb in ("run", "record"):
        codes = "the program's own, 128 + N after signal N; 125 if it is stalloc that failed"
    assert f"Exit codes: {codes}" in " ".join(done.stdout.split())


def test_help_without_a_verb_lists_every_verb() -> None:
    done = run_python("-m", "stalloc", "--help")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for verb in VERBS:
        summary = (importlib.import_module(f"stalloc.cli.{verb}").__doc__ or "").partition("\n")[0]
        assert f" {verb} {' '.join(summary.split())}" in text


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("stats",), ("stats", "--no-such-option")])
def test_wrong_usage_ends_with_exit_code_2_and_no_traceback(arguments: tuple[str, ...]) -> None:
    done = run_python("-m", "stalloc", *arguments)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_what_security_md_promises_is_held_by_tests_that_exist() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(r"`((?:tests|scripts)/[\w/]+(?:\.py)?)`", (root / "SECURITY.md").read_text())
    assert len(named) > 12
    assert [name for name in named if not (root / name).is_file()] == []
