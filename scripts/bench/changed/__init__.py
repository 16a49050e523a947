"""Copies of the checkout with something changed in them, to see what a rule is worth or whether a test notices.

Contract: nothing is written to the checkout. A copy is whole (package, kernels, scripts, tests, docs), so that tests
and benches run in it as they do in the checkout, and it stays as it was made, whatever is edited meanwhile. What
numba compiled is copied too, and is compiled anew only where a changed file is a part of it (stalloc/source_stamps.py).

    with Checkout.copied() as base:
        base.compile()
        with base.changed(change, another) as copy:
            copy.run("-m", "pytest", "tests/test_heap.py")
            copy.run("scripts/bench/no_harm", "--json", "-")
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
_LEFT_OUT = (".git", ".venv", ".venv-source", ".*_cache", ".hypothesis", "build", "dist", "site", "*.egg-info")


class ChangeError(ValueError):
    """A change does not fit the file that it is about."""


@dataclass(frozen=True, kw_only=True)
class Change:
    name: str
    file: str
    """Its path in the checkout."""
    old: str
    """What stands there, exactly once."""
    new: str
    why: str = ""
    """What the changed code does."""

    def applied_to(self, text: str) -> str:
        """The changed text. Raises ChangeError if the old text is not there, or more than once."""
        count = text.count(self.old)
        if count != 1:
            there = "is not there" if count == 0 else f"is there {count} times"
            raise ChangeError(
                f"{self.name}: the text to change in {self.file} {there}: name what stands there exactly once, "
                f"in place of {self.old!r}."
            )
        return text.replace(self.old, self.new)


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"

    @classmethod
    @contextlib.contextmanager
    def copied(cls, source: Path = ROOT) -> Iterator["Checkout"]:
        """The checkout as it is now; removed in the end."""
        with tempfile.TemporaryDirectory(prefix="stalloc-changed-", ignore_cleanup_errors=True) as folder:
            copy = cls(Path(folder).resolve())
            shutil.copytree(source, copy.root, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
            copy._show_package()
            yield copy

    @contextlib.contextmanager
    def changed(self, *changes: Change) -> Iterator["Checkout"]:
        """A copy of this one with the changes in it, one after the other; removed in the end."""
        with tempfile.TemporaryDirectory(prefix="changed-", dir=self.root.parent, ignore_cleanup_errors=True) as folder:
            copy = Checkout(Path(folder))
            shutil.copytree(self.root, copy.root, symlinks=True, copy_function=os.link)  # what changes is replaced
            for change in changes:
                copy._apply(change)
            yield copy

    def check(self, *changes: Change) -> None:
        """Raise ChangeError for the first of several changes, each to be made by itself, that cannot be made here."""
        for change in changes:
            change.applied_to(self._read(change))

    @property
    def environment(self) -> dict[str, str]:
        """The variables of programs that are to use this package; what is planned or compiled is kept in the copy."""
        ours, here = str(ROOT / ".venv-source"), str(self.root / ".venv-source")
        others = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one not in ("", ours)]
        return {
            "STALLOC_SHARED": str(ROOT.parent / "shared"),
            **{name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"},
            "PYTHONPATH": os.pathsep.join([here, *others]),
            "STALLOC_CACHE": str(self.root / ".plans"),
        }

    def compile(self) -> None:
        """Compile here what most programs need, once for all copies that are made of this one."""
        self.run("-m", "stalloc.cli.precompile", check=True)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run Python in the copy's folder; options as of `subprocess.run`, `env` on top of `environment`."""
        options = {"cwd": self.root, "text": True, "check": False, **options}
        options["env"] = self.environment | options.get("env", {})
        return subprocess.run(self.command(*arguments), **options)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", *arguments]

    def _show_package(self) -> None:
        package = self.root / ".venv-source" / "stalloc"
        package.mkdir(parents=True)
        for entry in [*(self.root / "stalloc").iterdir(), self.root / "kernels"]:
            if entry.name != "__pycache__":
                (package / entry.name).symlink_to(Path("..", "..", entry.relative_to(self.root)))

    def _read(self, change: Change) -> str:
        try:
            return (self.root / change.file).read_text(encoding="utf-8")
        except OSError as error:
            raise ChangeError(f"{change.name}: {change.file} cannot be read ({error.strerror}).") from error

    def _apply(self, change: Change) -> None:
        path = self.root / change.file
        text = change.applied_to(self._read(change))
        path.unlink()  # a link to the file that other copies have
        path.write_text(text, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()  # it may be as long as the old one, and made within the same second
