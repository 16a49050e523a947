"""Doing something after an import, whoever asks for the module first and however often."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stalloc.imports import after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported and has not been."""
    (tmp_path / "made_up_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "made_up_module"
    sys.modules.pop("made_up_module", None)
    sys.meta_path[:] = finders


def test_the_action_follows_the_import_once(module: str) -> None:
    seen: list[int] = []
    after_import(module, lambda: seen.append(sys.modules[module].value))
    assert seen == []
    imported = importlib.import_module(module)
    importlib.reload(imported)
    assert seen == [1]
    assert imported.__spec__ is not None
    assert imported.__loader__ is imported.__spec__.loader
    assert type(imported.__loader__).__name__ == "SourceFileLoader"


def test_asking_whether_the_module_is_there_does_not_use_the_action_up(module: str) -> None:
    seen: list[str] = []
    after_import(module, lambda: seen.append("imported"))
    for _ in range(3):
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.loader.get_source(module) == "value = 1\n"  # type: ignore[union-attr]
    assert seen == []
    importlib.import_module(module)
    assert seen == ["imported"]


def test_two_actions_for_one_module_both_happen(module: str) -> None:
    seen: list[str] = []
    after_import(module, lambda: seen.append("first"))
    after_import(module, lambda: seen.append("second"))
    importlib.import_module(module)
    assert sorted(seen) == ["first", "second"]


def test_an_import_that_failed_can_be_tried_again(module: str, tmp_path: Path) -> None:
    seen: list[str] = []
    source = tmp_path / f"{module}.py"
    source.write_text("raise ImportError('not yet')\n")
    after_import(module, lambda: seen.append("imported"))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(module)
    assert seen == []
    source.write_text("value = 'of another length, or its compiled form would be taken for it'\n")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert seen == ["imported"]


def test_a_module_that_is_imported_already_is_served_at_once() -> None:
    seen: list[str] = []
    after_import("json", lambda: seen.append("now"))
    assert seen == ["now"]


def test_a_module_that_does_not_exist_is_missing_as_ever() -> None:
    finders = list(sys.meta_path)
    after_import("no_such_module_at_all", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
    sys.meta_path[:] = finders
